"""Table of the peers: the cases in which each can run, its settings, and the parts that are not its own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers import flattened, sources
from weightcast.lab.bench.case import Contender
from weightcast.lab.bench.methods import Layout, Method
from weightcast.lab.bench.shapes import model_shape

_PIPE = "messages go through a pipe, not through HTTP or Ray"
_SHM = "shared memory stands for CUDA IPC"
_GLOO = "gloo stands for NCCL"
_MOST_TENSORS = 20_000
_TOO_MANY = "with so many tensors a turn takes most of a minute; the smaller models say what it does"


def peers(layout: Layout, *, bucket_bytes: Sequence[int]) -> tuple[list[Contender], dict[str, str]]:
    """Returns the contenders for one case, and the peers that cannot run, with the reason.

    Args:
        layout: Who is where.
        bucket_bytes: The sweep of each that has buckets.
    """
    found: list[Contender] = []
    not_run: dict[str, str] = {}
    on_cpu = layout.device == "cpu"
    shape = model_shape(layout.model)
    too_many = len(shape.places) > _MOST_TENSORS
    largest = max(_bytes(place.shape) for place in shape.places)

    def add(
        name: str,
        halves: tuple[str, str],
        *,
        needs: Callable[[], object] = lambda: None,
        sweep: Sequence[int] = bucket_bytes,
        emulated: tuple[str, ...] = (),
        why_not: str = "",
    ) -> None:
        if why_not:
            not_run[name] = why_not
            return
        try:
            needs()
        except sources.NotHere as error:
            not_run[name] = str(error)
            return
        settings = tuple(
            Method(
                name=f"{name}, {size >> 20} MiB",
                trainer=halves[0],
                engine=halves[1],
                options={"bucket_bytes": size},
                emulated=emulated,
            )
            for size in dict.fromkeys(sweep)
        )
        found.append(Contender(name=name, settings=settings))

    if layout.placement == "disaggregated":
        device = (_GLOO,) if on_cpu else ()
        add(
            "vLLM packed broadcast",
            ("peers.vllm:PackedTrainer", "peers.vllm:PackedEngine"),
            needs=lambda: sources.module(sources.PACKED),
            emulated=("communicator is torch's, not vLLM's PyNcclCommunicator", _PIPE, *device),
        )
        add(
            "SGLang flattened bucket, broadcast",
            ("peers.flattened:SglangTrainer", "peers.flattened:SglangEngine"),
            needs=flattened.sglang,
            emulated=("sender and receiver loops", _PIPE, *device),
        )
        add(
            "broadcast for each tensor",
            ("peers.per_tensor:BroadcastTrainer", "peers.per_tensor:BroadcastEngine"),
            sweep=bucket_bytes[:1],
            emulated=("all of it; the scheme of early RLHF frameworks", _PIPE, *device),
            why_not=_TOO_MANY if too_many else "",
        )
        not_run["checkpoint-engine"] = "its way to other devices needs the Mooncake transfer engine over RDMA"
        return found, not_run

    device = (_SHM,) if on_cpu else ()
    add(
        "vLLM packed IPC",
        ("peers.vllm:IpcTrainer", "peers.vllm:IpcEngine"),
        needs=lambda: sources.module(sources.PACKED),
        sweep=[max(size, largest) for size in bucket_bytes],
        emulated=(_PIPE,),
        why_not="its code needs CUDA" if on_cpu else "",
    )
    add(
        "SGLang flattened bucket, IPC",
        ("peers.flattened:SglangTrainer", "peers.flattened:SglangEngine"),
        needs=flattened.sglang,
        emulated=("sender and receiver loops", _PIPE, *device),
    )
    add(
        "LMDeploy flattened bucket, persistent buffer",
        ("peers.flattened:LmdeployTrainer", "peers.flattened:LmdeployEngine"),
        needs=flattened.lmdeploy,
        emulated=("sender and receiver loops", _PIPE, *device),
    )
    add(
        "checkpoint-engine",
        ("peers.checkpoint_engine:Trainer", "peers.checkpoint_engine:Engine"),
        needs=lambda: sources.package("checkpoint_engine.ps"),
        emulated=("device shim", _SHM) if on_cpu else (),
        why_not="" if layout.engines == layout.trainers else "one engine for each trainer only",
    )
    add(
        "IPC handle for each tensor",
        ("peers.per_tensor:HandlesTrainer", "peers.per_tensor:HandlesEngine"),
        emulated=("all of it; the naive scheme", _PIPE, *device),
        why_not=_TOO_MANY if too_many else "",
    )
    return found, not_run


def _bytes(shape: tuple[int, ...]) -> int:
    product = 2
    for size in shape:
        product *= size
    return product
