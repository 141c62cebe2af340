"""Recognises an LMDeploy server and finds out which transports it can use.

LMDeploy has no route for its version or its executor, so its answers to other routes have to tell.  None of these
requests changes anything.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, cast

import msgspec

from weightcast.adapters.lmdeploy.adapter import LmdeployAdapter
from weightcast.adapters.requests import JsonObject, object_at
from weightcast.adapters.stock import stock_info
from weightcast.comm.run_steps import EngineRequest
from weightcast.config import PauseMode
from weightcast.errors import DeadlineExceeded, TargetRejected
from weightcast.protocols import Kind, LoadMetrics
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.fields import shown

NO_GROUP = "weightcast-no-such-group"
_STATUS = "/update_weights_from_ipc"
_BUSY_S = 5.0  # ranks answer only after their current work, which may be a broadcast without a sender
_START = b"process_start_time_seconds"
_REUSED = (b"lmdeploy:prefix_cache_hit_rate", b"lmdeploy:cached_tokens_total")
_RAY = "start it with --distributed-executor-backend ray, the only one that takes weights by ipc and broadcast"
_MAX_LABEL = 200
_NOT_ABORT: tuple[PauseMode, ...] = ("retract", "in_place", "wait")
_ONLY_SLEEP = 'LMDeploy\'s only pause is sleep, which drops every request; use pause="abort" (--pause abort)'


class LmdeployKind(Kind):
    """Unpatched LMDeploy."""

    name = "lmdeploy"
    speaks = LmdeployAdapter
    receiver_page = "docs/engines/lmdeploy-receiver.md"
    load = LoadMetrics(
        running="lmdeploy:num_requests_running",
        waiting="lmdeploy:num_requests_waiting",
        tokens="lmdeploy:generation_tokens_total",
    )

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        sleeping = yield from object_at("/is_sleeping")
        if sleeping is None or not isinstance(sleeping.get("is_sleeping"), bool):
            return None
        models = yield from object_at("/v1/models")
        served = _first_model(models)
        if served.get("owned_by") != "lmdeploy" and not (yield from _has_its_routes()):
            return None
        status = yield from _receiver()
        sizes = yield from object_at("/distserve/engine_info")
        refusal = yield from _status_of_unknown_group()
        metrics = yield from _metrics()
        model, asleep = str(served.get("id") or "?"), bool(sleeping["is_sleeping"])
        return describe(url, model, asleep, status, sizes, refusal, metrics)


def describe(
    url: str,
    model: str,
    asleep: bool,
    status: JsonObject | None,
    sizes: JsonObject | None,
    refusal: int,
    metrics: Mapping[bytes, float],
) -> EngineInfo:
    """Describes a server from its answers.

    Args:
        asleep: True while some of its memory is released.
        status: JsonObject to ``GET /update_weights_from_ipc``; None before 0.17.
        sizes: JsonObject to ``/distserve/engine_info``, or None.
        refusal: HTTP status with which it refused to destroy a group that it does not have.
        metrics: Largest value of each metric; empty without metrics.
    """
    uuids = _in_rank_order(status or {})
    ranks = len(uuids) or _attention_tp(sizes or {})
    on_cpu = (status or {}).get("device_type") == "cpu"
    devices = uuids or ["cpu" if on_cpu else "cuda"] * ranks
    transports, messages = _usable_transports(status or {}, refusal)
    if any(metrics.get(name, 0.0) > 0 for name in _REUSED):
        # Neither an update nor sleep empties this cache, so requests would get results of the old weights.
        transports = []
        messages.append("its prefix cache would keep results of old weights: start it without --enable-prefix-caching")
    if asleep:
        messages.append("it is asleep (POST /wakeup wakes it)")
    # Weights that sleep and yet are ready are on the GPU and were never loaded.
    if status is not None and "weights" in (status.get("sleeping_tags") or ()) and status.get("ready") is True:
        received = _receiver_transports(status)
        transports = [name for name in transports if name in received]
        messages.append("it was started with --empty-init: its first weights must come by checkpoint-engine")
    started = metrics.get(_START)
    if started is None:
        messages.append(
            "it cannot tell whether it has restarted, so it counts as active only until the next probe: start it "
            "without --disable-metrics"
        )
    version = "0.17 or later" if status is not None else "0.16 or earlier" if refusal != 404 else "without groups"
    return stock_info(
        url,
        devices,
        engine=f"lmdeploy ({version})",
        model=shown(model)[:_MAX_LABEL],
        version=None,
        transports=tuple(transports),
        message="; ".join(messages),
        paused=asleep,
        kind="lmdeploy",
        dp_size=_size(sizes, "dp_size"),
        ep_size=_size(sizes, "ep_size"),
        instance="" if started is None else f"started at {started!r}",
        tells_version=False,
        no_pause=dict.fromkeys(_NOT_ABORT, _ONLY_SLEEP),
    )


def _usable_transports(status: JsonObject, refusal: int) -> tuple[list[str], list[str]]:
    transports: list[str] = []
    messages: list[str] = []
    if refusal == 400:  # its ranks looked for the group, so every rank can take weights
        if status.get("device_type") in (None, "cuda", "cpu"):
            transports.append("ipc")
        else:
            # A device that cannot import events reads copies, and would read the first bucket again and again.
            messages.append(f"LMDeploy reads weights in shared memory on CUDA, not on {status['device_type']}")
        transports.append("broadcast")
    elif refusal == 501:
        messages.append("only LMDeploy's PyTorch engine takes weights: start it with --backend pytorch")
    elif refusal == 404:
        messages.append("this LMDeploy has no routes for weights by broadcast; use 0.16 or later")
    else:
        messages.append(_RAY)
    received = _receiver_transports(status)
    if received and refusal == 500:
        messages.append("or use checkpoint-engine, which works with any executor: --via checkpoint-engine")
    return [*transports, *received], messages


def _receiver_transports(status: JsonObject) -> list[str]:
    """Transports that the server's own weight receiver can use, whose status this is."""
    return ["checkpoint-engine"] if status.get("checkpoint_engine_version") else []


def _in_rank_order(status: JsonObject) -> list[str]:
    uuids = [str(uuid) for uuid in status.get("device_uuids") or ()]
    ranks = [int(rank) for rank in status.get("worker_ranks") or ()]
    if len(ranks) != len(uuids):
        return []
    in_order = [uuid for _, uuid in sorted(zip(ranks, uuids, strict=True))]
    return [uuid.removeprefix("GPU-")[:_MAX_LABEL] for uuid in in_order]


def _attention_tp(sizes: JsonObject) -> int:
    """Tensor-parallel ranks behind this URL; with data parallelism each replica has its own server."""
    return max(1, _size(sizes, "tp_size") // _size(sizes, "dp_size"))


def _size(sizes: JsonObject | None, name: str) -> int:
    size = (sizes or {}).get(name)
    return size if isinstance(size, int) and size > 0 else 1


def _first_model(models: JsonObject | None) -> JsonObject:
    data: Any = (models or {}).get("data")
    first: Any = data[0] if isinstance(data, list) and data else None
    return cast(JsonObject, first) if isinstance(first, dict) else {}


def _has_its_routes() -> Generator[EngineRequest, bytes, bool]:
    """True for LMDeploy's routes; vLLM has ``/is_sleeping`` too, but calls the other route ``/wake_up``."""
    schema = yield from object_at("/openapi.json")
    paths: Any = (schema or {}).get("paths")
    return isinstance(paths, dict) and {"/wakeup", "/update_weights"} <= paths.keys()


def _status_of_unknown_group() -> Generator[EngineRequest, bytes, int]:
    """The HTTP status for destroying a group that does not exist: 400 if the ranks can take weights."""
    try:
        yield EngineRequest(
            path="/destroy_weights_update_group", body=msgspec.json.encode({"group_name": NO_GROUP}), timeout_s=_BUSY_S
        )
    except TargetRejected as error:
        return error.status or 500
    except DeadlineExceeded:
        return 400  # the ranks are busy with a group
    return 400


def _metrics() -> Generator[EngineRequest, bytes, dict[bytes, float]]:
    try:
        page = yield EngineRequest(method="GET", path="/metrics")
    except TargetRejected:
        return {}
    found: dict[bytes, float] = {}
    for line in page.splitlines():
        name, _, rest = line.partition(b" ")
        if line.startswith(b"#") or not rest:
            continue
        name = name.partition(b"{")[0]
        try:
            value = float(line.rpartition(b" ")[2])
        except ValueError:
            continue
        found[name] = max(value, found.get(name, value))
    return found


def _receiver() -> Generator[EngineRequest, bytes, JsonObject | None]:
    """The state of the server's own weight receiver; None before 0.17."""
    try:
        return (yield from object_at(_STATUS, timeout_s=_BUSY_S))
    except DeadlineExceeded:
        return {}  # the route exists, and the ranks are busy
