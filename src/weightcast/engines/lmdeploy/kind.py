"""How an LMDeploy server is recognised, and what can be found out about it.

LMDeploy has no route for its version or its executor; what it can do is found out by what its routes answer.  None of
the questions changes anything.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from weightcast.comm.ipc import host_id
from weightcast.engines.lmdeploy.adapter import LmdeployAdapter
from weightcast.errors import DeadlineExceeded, TargetRejected
from weightcast.protocols import Adapter, EngineRequest
from weightcast.wire.messages import PROTOCOL, EngineInfo, RankInfo, shown

NO_GROUP = "weightcast-no-such-group"
_STATUS = "/update_weights_from_ipc"
_BUSY_S = 5.0  # what ranks are asked waits for what they are doing, a broadcast that nobody sends, say
_HERE = frozenset({"127.0.0.1", "localhost", "::1"})
_START = b"process_start_time_seconds"
_REUSED = (b"lmdeploy:prefix_cache_hit_rate", b"lmdeploy:cached_tokens_total")
_RAY = "start it with --distributed-executor-backend ray, the only one that takes weights by ipc and broadcast"
_MAX_LABEL = 200
Answer = dict[str, Any]
Asking = Generator[EngineRequest, bytes, Answer | None]


class LmdeployKind:
    """LMDeploy, unpatched."""

    name = "lmdeploy"

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        sleeping = yield from _get("/is_sleeping")
        if sleeping is None or not isinstance(sleeping.get("is_sleeping"), bool):
            return None
        models = yield from _get("/v1/models")
        served = _first_model(models)
        if served.get("owned_by") != "lmdeploy" and not (yield from _has_its_routes()):
            return None
        status = yield from _get(_STATUS)
        sizes = yield from _get("/distserve/engine_info")
        refusal = yield from _ask_for_no_group()
        metrics = yield from _metrics()
        model, asleep = str(served.get("id") or "?"), bool(sleeping["is_sleeping"])
        return describe(url, model, asleep, status, sizes, refusal, metrics)

    def adapter(self, info: EngineInfo) -> Adapter:
        """As ``Kind.adapter``."""
        return LmdeployAdapter(info)


def describe(
    url: str,
    model: str,
    asleep: bool,
    status: Answer | None,
    sizes: Answer | None,
    refusal: int,
    metrics: Mapping[bytes, float],
) -> EngineInfo:
    """What follows from a server's answers.

    Args:
        url: Where it is.
        model: Name under which it serves.
        asleep: True while some of its memory is released.
        status: Its ``GET /update_weights_from_ipc``; None where it has none (before 0.17).
        sizes: Its ``/distserve/engine_info``; None where it does not say.
        refusal: Status with which it refused to destroy a group that it has not.
        metrics: Largest value of each of its metrics; empty where it has none.
    """
    uuids = _in_rank_order(status or {})
    ranks = len(uuids) or _attention_tp(sizes or {})
    on_cpu = (status or {}).get("device_type") == "cpu"
    devices = uuids or ["cpu" if on_cpu else "cuda"] * ranks
    transports, messages = _what_it_takes(status or {}, refusal)
    if any(metrics.get(name, 0.0) > 0 for name in _REUSED):
        # Nothing empties that cache: not an update, not sleep.  What it has of the old weights would be used on.
        transports = []
        messages.append("it keeps prefixes computed with old weights: start it without --enable-prefix-caching")
    if asleep:
        messages.append("it is asleep (POST /wakeup wakes it)")
    if status is not None and _holds_empty_weights(status):
        transports = [name for name in transports if name == "checkpoint-engine"]
        messages.append("it was started with --empty-init: its first weights must come by checkpoint-engine")
    host = urlsplit(url).hostname or ""
    started = int(metrics.get(_START, 0.0)) % (1 << 32)
    version = "0.17 or later" if status is not None else "0.16 or earlier" if refusal != 404 else "without groups"
    return EngineInfo(
        protocol=PROTOCOL,
        engine=f"lmdeploy ({version})",
        model=shown(model)[:_MAX_LABEL],
        state="serving",
        version=None,
        digest=None,
        tp_size=ranks,
        host_id=host_id() if host in _HERE else f"host:{host}"[:_MAX_LABEL],
        # It tells no process ids; the time of its start says that it is another one.
        ranks=tuple(RankInfo(rank=rank, pid=started, device=device) for rank, device in enumerate(devices)),
        staging="none",
        transports=tuple(transports),
        specs=(),
        message="; ".join(messages),
        paused=asleep,
        kind="lmdeploy",
        dp_size=_size(sizes, "dp_size"),
        ep_size=_size(sizes, "ep_size"),
    )


def _what_it_takes(status: Answer, refusal: int) -> tuple[list[str], list[str]]:
    """Transports, and what stands in the way of the others."""
    transports: list[str] = []
    messages: list[str] = []
    if refusal == 400:  # it looked for the group: every rank of it can take weights
        transports += ["ipc", "broadcast"]
        if status.get("device_type") not in (None, "cuda", "cpu"):
            # Where it cannot import an event it reads copies, and would read the first one again and again.
            transports.remove("ipc")
            messages.append(f"weights in shared memory are for CUDA, not for {status['device_type']}")
    elif refusal == 501:
        messages.append("only its PyTorch engine takes weights: start it with --backend pytorch")
    elif refusal == 404:
        messages.append("this LMDeploy has no routes for weights by broadcast; use 0.16 or later")
    else:
        messages.append(_RAY)
    if status.get("checkpoint_engine_version"):
        transports.append("checkpoint-engine")
        if refusal == 500:
            messages.append("or go by checkpoint-engine, which any executor takes: --via checkpoint-engine")
    return transports, messages


def _holds_empty_weights(status: Answer) -> bool:
    """Asleep, and yet ready to be written: its weights are on the GPU and have never been loaded."""
    return "weights" in (status.get("sleeping_tags") or ()) and status.get("ready") is True


def _in_rank_order(status: Answer) -> list[str]:
    uuids = [str(uuid) for uuid in status.get("device_uuids") or ()]
    ranks = [int(rank) for rank in status.get("worker_ranks") or ()]
    if len(ranks) != len(uuids):
        return []
    in_order = [uuid for _, uuid in sorted(zip(ranks, uuids, strict=True))]
    return [uuid.removeprefix("GPU-")[:_MAX_LABEL] for uuid in in_order]


def _attention_tp(sizes: Answer) -> int:
    """Ranks behind this URL that join a group: with data parallelism each replica has a server of its own."""
    return max(1, _size(sizes, "tp_size") // _size(sizes, "dp_size"))


def _size(sizes: Answer | None, name: str) -> int:
    size = (sizes or {}).get(name)
    return size if isinstance(size, int) and size > 0 else 1


def _first_model(models: Answer | None) -> Answer:
    data: Any = (models or {}).get("data")
    first: Any = data[0] if isinstance(data, list) and data else None
    return cast(Answer, first) if isinstance(first, dict) else {}


def _has_its_routes() -> Generator[EngineRequest, bytes, bool]:
    """vLLM has a ``/is_sleeping`` too, but spells ``/wake_up`` otherwise."""
    schema = yield from _get("/openapi.json")
    paths: Any = (schema or {}).get("paths")
    return isinstance(paths, dict) and {"/wakeup", "/update_weights"} <= paths.keys()


def _ask_for_no_group() -> Generator[EngineRequest, bytes, int]:
    """Who has ranks that take weights looks for the group and does not find it; who has none cannot even look."""
    try:
        yield EngineRequest(
            path="/destroy_weights_update_group", body=msgspec.json.encode({"group_name": NO_GROUP}), timeout_s=_BUSY_S
        )
    except TargetRejected as error:
        return error.status or 500
    except DeadlineExceeded:
        return 400  # its ranks are in the middle of something that has to do with groups
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


def _get(path: str) -> Asking:
    """The JSON object behind a route, also one that was written as text; None if it has none."""
    try:
        body = yield EngineRequest(method="GET", path=path, timeout_s=_BUSY_S if path == _STATUS else None)
    except TargetRejected as error:
        if error.status in (401, 403):
            raise
        return None
    except DeadlineExceeded:
        if path != _STATUS:
            raise
        return {}  # it has the route; its ranks are busy
    try:
        answer = msgspec.json.decode(body)
        if isinstance(answer, str):
            answer = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    return cast(Answer, answer) if isinstance(answer, dict) else None
