"""Plans: the cases to measure on each machine, most valuable first; the driver stops when its time is used up.

A case is a model in a layout with a sweep, and ``kind`` says which script measures it. A case that hangs uses up its
whole deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weightcast.lab.bench.methods import Layout

MIB, GIB = 1 << 20, 1 << 30
Kind = Literal["updates", "limits", "loader", "digest", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case, which the driver runs in a process of its own.

    Attributes:
        name: Name of the case and of its result file.
        kind: Kind of measurement.
        layout: Processes and devices, for updates and limits.
        bucket_bytes: Bucket sizes to sweep for weightcast.
        peer_bytes: Bucket sizes to sweep for the peers; empty to leave all peers out.
        left_out: Peers that are left out, with the reason.
        levels: Levels of proof to measure.
        staging: Staging of our engines.
        turns: Timed turns of each method.
        warm: Untimed turns before them.
        tries: Turns of each setting of a sweep.
        budget_s: Time after which no round starts, in seconds.
        deadline_s: Time after which the process is killed, in seconds.
        options: Command-line options of the other kinds.
    """

    name: str
    kind: Kind = "updates"
    layout: Layout | None = None
    bucket_bytes: tuple[int, ...] = ()
    peer_bytes: tuple[int, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    levels: tuple[str, ...] = ("resident", "none")
    staging: str = "auto"
    turns: int = 10
    warm: int = 2
    tries: int = 2
    budget_s: float = 150.0
    deadline_s: float = 240.0
    options: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """How many it needs."""
        layout = self.layout
        if layout is None:
            return 0 if "cpu" in self.options else 1
        if layout.device == "cpu":
            return 0
        return layout.trainers + (layout.engines if layout.placement == "disaggregated" else 0)


_OURS_GPU = (512 * MIB, GIB, 2 * GIB)
_PEERS_GPU = (512 * MIB, GIB, 2 * GIB)
_OURS_CPU = (16 * MIB, 64 * MIB)
_PEERS_CPU = (16 * MIB, 64 * MIB)
_LARGE_CPU = (64 * MIB, 256 * MIB)


def _gpu(name: str, model: str, placement: Any, trainers: int, engines: int, **more: Any) -> Case:
    generate = bool(more.pop("generate", False))
    layout = Layout(
        model=model, placement=placement, trainers=trainers, engines=engines, device="cuda", generate=generate
    )
    return Case(**({"name": name, "layout": layout, "bucket_bytes": _OURS_GPU, "peer_bytes": _PEERS_GPU} | more))


def _cpu(name: str, model: str, placement: Any, trainers: int, engines: int, **more: Any) -> Case:
    generate = bool(more.pop("generate", False))
    layout = Layout(
        model=model, placement=placement, trainers=trainers, engines=engines, device="cpu", generate=generate
    )
    return Case(
        **(
            {"name": name, "layout": layout, "bucket_bytes": _OURS_CPU, "peer_bytes": _PEERS_CPU, "deadline_s": 420.0}
            | more
        )
    )


def _limits(gpus: int) -> list[Case]:
    """Alone, and between as many as there are."""
    found = [_gpu("limits-1", "dense-1GiB", "colocated", 1, 1, kind="limits", budget_s=40, deadline_s=90)]
    if gpus > 1:
        apart = gpus // 2
        found.append(
            _gpu(
                f"limits-{gpus}",
                "dense-1GiB",
                "disaggregated",
                apart,
                gpus - apart,
                kind="limits",
                budget_s=40,
                deadline_s=90,
            )
        )
    return found


def _h200(gpus: int) -> list[Case]:
    cases = _limits(gpus)
    if gpus >= 2:
        half = gpus // 2
        cases.append(_gpu("disaggregated-1+1-8b", "qwen3-8b", "disaggregated", 1, 1))
        if half > 1:
            cases.append(_gpu(f"disaggregated-{half}+{half}-8b", "qwen3-8b", "disaggregated", half, half))
    cases.append(_gpu("colocated-1-8b", "qwen3-8b", "colocated", 1, 1))
    # ``direct`` that keeps the trainer's weights mapped, beside ``ipc`` and the peers, in a short run.
    short: dict[str, Any] = dict(bucket_bytes=(2 * GIB,), peer_bytes=(GIB,), turns=8, tries=1)
    cases.append(_gpu("direct-colocated-1-8b", "qwen3-8b", "colocated", 1, 1, budget_s=60, deadline_s=130, **short))
    if gpus >= 2:
        # ``direct`` between GPUs: NCCL messages, and shards that engine ranks read on the other GPU.
        pair: dict[str, Any] = short | dict(budget_s=75, deadline_s=150)
        cases.append(_gpu("direct-disaggregated-1+1-8b", "qwen3-8b", "disaggregated", 1, 1, **pair))
        # A turn of checkpoint-engine takes 5 s.
        cases.append(_gpu("direct-colocated-2-8b", "qwen3-8b", "colocated", 2, 2, **pair | dict(turns=7, warm=2)))
    if gpus > 1:
        cases.append(_gpu(f"colocated-{gpus}-8b", "qwen3-8b", "colocated", gpus, gpus))
    # The cost of proof is small, so there are many turns and no other methods.
    levels = ("resident", "received", "none")
    alone: dict[str, Any] = dict(levels=levels, bucket_bytes=(2 * GIB,), peer_bytes=(), turns=80, warm=4, budget_s=100)
    cases.append(_gpu("proof-colocated-1-8b", "qwen3-8b", "colocated", 1, 1, **alone))
    if gpus >= 2:
        cases.append(_gpu("proof-disaggregated-1+1-8b", "qwen3-8b", "disaggregated", 1, 1, **alone))
    many: dict[str, Any] = dict(peer_bytes=(512 * MIB,), bucket_bytes=(256 * MIB,), budget_s=195, deadline_s=360)
    # An engine has two sets of weights, so its one-time work takes two turns.
    many |= dict(turns=3, warm=3, tries=1)
    if gpus >= 2:
        cases.append(_gpu("disaggregated-1+1-many", "many-65536", "disaggregated", 1, 1, **many))
    many_alone: dict[str, Any] = many | dict(peer_bytes=(), turns=16, budget_s=90, deadline_s=150)
    cases.append(_gpu("proof-colocated-1-many", "many-65536", "colocated", 1, 1, **many_alone))
    if gpus >= 2:
        cases.append(_gpu("proof-disaggregated-1+1-many", "many-65536", "disaggregated", 1, 1, **many_alone))
    slow = {"checkpoint-engine": "a turn of it takes 15 s, longer than those of all others together"}
    cases.append(_gpu("colocated-1-many", "many-65536", "colocated", 1, 1, left_out=slow, **many))
    cases.append(
        _gpu(
            "stall-colocated-1-8b",
            "qwen3-8b",
            "colocated",
            1,
            1,
            generate=True,
            turns=5,
            bucket_bytes=(512 * MIB, 2 * GIB),
            peer_bytes=(GIB,),
        )
    )
    if gpus >= 2:
        cases.append(
            _gpu(
                "stall-disaggregated-1+1-8b",
                "qwen3-8b",
                "disaggregated",
                1,
                1,
                generate=True,
                turns=5,
                bucket_bytes=(512 * MIB,),
                peer_bytes=(GIB,),
            )
        )
        # The second set of weights does not fit beside the first on one GPU.
        moe = dict(turns=5, staging="none", bucket_bytes=(GIB,), peer_bytes=(2 * GIB,), budget_s=200, deadline_s=320)
        half = gpus // 2
        if gpus == 2:
            direct = moe | dict(peer_bytes=(GIB,), tries=1, budget_s=100, deadline_s=190)
            cases.append(_gpu("direct-disaggregated-1+1-30b", "qwen3-30b-a3b", "disaggregated", 1, 1, **direct))
        cases.append(_gpu(f"disaggregated-{half}+{half}-30b", "qwen3-30b-a3b", "disaggregated", half, half, **moe))
        if gpus >= 4:
            cases.append(_gpu(f"colocated-{gpus}-30b", "qwen3-30b-a3b", "colocated", gpus, gpus, **moe))
        cases.append(
            _gpu("disaggregated-1+1-70b", "llama-70b-20-layers", "disaggregated", 1, 1, turns=5, peer_bytes=(2 * GIB,))
        )
    shared = ("--device", "cuda", "--engines", "1", "--turns", "3", "--warm", "2", "--model", "qwen3-8b")
    cases.append(Case(name="direct-4-to-tp2-8b", kind="direct", options=shared, deadline_s=230))
    if gpus >= 2:
        pair_options = (*shared, "--trainers", "2", "--tp", "2", "--gpus", "2")
        cases.append(Case(name="direct-2-to-tp2-8b", kind="direct", options=pair_options, deadline_s=150))
    cases.append(Case(name="loader-30b", kind="loader", options=("--model", "qwen3-30b-a3b"), deadline_s=200))
    cases.append(Case(name="digest", kind="digest", deadline_s=120))
    return cases


def _cpu_plan() -> list[Case]:
    # The cost of proof by processor time, without other methods between.
    proof: dict[str, Any] = dict(bucket_bytes=(64 * MIB,), peer_bytes=(), turns=12)
    return [
        _cpu("cpu-colocated", "dense-256MiB", "colocated", 1, 1),
        _cpu("cpu-disaggregated", "dense-256MiB", "disaggregated", 1, 1, bucket_bytes=_LARGE_CPU),
        _cpu(
            "cpu-colocated-1g", "dense-1GiB", "colocated", 1, 1, bucket_bytes=_LARGE_CPU, budget_s=270, deadline_s=420
        ),
        _cpu(
            "cpu-disaggregated-1g",
            "dense-1GiB",
            "disaggregated",
            1,
            1,
            bucket_bytes=_LARGE_CPU,
            budget_s=300,
            deadline_s=600,
        ),
        _cpu("cpu-colocated-many", "many-2048", "colocated", 1, 1, bucket_bytes=(16 * MIB,), peer_bytes=(16 * MIB,)),
        _cpu("cpu-colocated-small", "small-65536", "colocated", 1, 1, bucket_bytes=(64 * MIB,), peer_bytes=(64 * MIB,)),
        _cpu("cpu-disaggregated-moe", "moe-4-layers", "disaggregated", 1, 1),
        _cpu("proof-cpu-colocated", "dense-256MiB", "colocated", 1, 1, **proof),
        _cpu("proof-cpu-colocated-many", "many-2048", "colocated", 1, 1, **proof | dict(bucket_bytes=(16 * MIB,))),
        _cpu(
            "proof-cpu-disaggregated", "dense-256MiB", "disaggregated", 1, 1, **proof | dict(bucket_bytes=(256 * MIB,))
        ),
        _cpu("proof-cpu-disaggregated-moe", "moe-4-layers", "disaggregated", 1, 1, **proof),
        _cpu("cpu-stall", "dense-256MiB", "colocated", 1, 1, generate=True, bucket_bytes=(64 * MIB,)),
        _cpu("cpu-limits", "dense-256MiB", "disaggregated", 1, 1, kind="limits", deadline_s=120),
        Case(name="cpu-direct", kind="direct", options=("--model", "dense-256MiB", "--device", "cpu"), deadline_s=300),
        Case(name="cpu-loader", kind="loader", options=("--model", "moe-4-layers", "--device", "cpu"), deadline_s=120),
        Case(name="cpu-digest", kind="digest", options=("--device", "cpu"), deadline_s=120),
    ]


def _smoke() -> list[Case]:
    """Returns a case with a tiny model for every kind and every peer, to check that they run."""
    few = dict(turns=1, bucket_bytes=(MIB,), peer_bytes=(MIB,), budget_s=90)
    return [
        _cpu("smoke-colocated", "tiny", "colocated", 1, 1, **few),
        _cpu("smoke-disaggregated", "tiny-moe", "disaggregated", 2, 2, **few),
        _cpu("smoke-stall", "tiny", "colocated", 2, 2, generate=True, **few),
        _cpu("smoke-limits", "tiny", "disaggregated", 1, 1, kind="limits"),
        Case(name="smoke-loader", kind="loader", options=("--model", "tiny-moe", "--device", "cpu"), deadline_s=60),
    ]


PLANS = {
    "smoke": _smoke,
    "cpu": _cpu_plan,
    "h200-1": lambda: _h200(1),
    "h200-2": lambda: _h200(2),
    "h200-4": lambda: _h200(4),
    "h200-8": lambda: _h200(8),
}
