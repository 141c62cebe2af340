"""Requests of the LMDeploy adapter, and the payloads in them."""

from __future__ import annotations

from typing import Any

from weightcast.adapters.lmdeploy.adapter import LmdeployAdapter
from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import TargetRejected
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Open, Owner
from weightcast.wire.plans import UpdateTables

SPECS = [TensorSpec(name=f"w{index}", dtype="float32", shape=(4, 8)) for index in range(4)]


def opening(**changes: Any) -> Open:
    fields: dict[str, Any] = {
        "session": "0" * 32,
        "owner": Owner(host="h", pid=1),
        "version": 7,
        "timeout_s": 5.0,
        "lease_s": 20.0,
        "pause": "abort",
        "verify": "none",
        "plan": UpdateTables(tuple(SPECS), ()),
    }
    return Open(**fields | changes)


def talk(steps: Any, *answers: bytes | int | TargetRejected) -> tuple[list[EngineRequest], Any]:
    """Runs a step; returns its requests and its result.  A number is a refusal with that status."""
    asked: list[EngineRequest] = []
    left = list(answers)
    try:
        request = next(steps)
        while True:
            asked.append(request)
            answer = left.pop(0)
            if isinstance(answer, int):
                answer = TargetRejected("no", url="u", status=answer)
            request = steps.send(answer) if isinstance(answer, bytes) else steps.throw(answer)
    except StopIteration as end:
        assert not left
        return asked, end.value


def opened(adapter: LmdeployAdapter) -> list[str]:
    asked, _ = talk(adapter.open(opening()), b'{"is_sleeping": false}', b"", b"")
    return [request.path for request in asked]
