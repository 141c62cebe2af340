"""Hold a conversation with an engine that somebody else has written down.

An adapter's step is a generator of requests (``protocols.Steps``); this module sends them and hands the answers back.
It knows neither the engine nor what the step is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

from weightcast.comm.http import Client
from weightcast.errors import DeadlineExceeded, TargetRejected

if TYPE_CHECKING:
    from weightcast.protocols import EngineRequest


_Result = TypeVar("_Result")
Send = Callable[["EngineRequest", float], bytes]


def converse(
    client: Client, steps: Generator[EngineRequest, bytes, _Result], *, timeout_s: float, send: Send | None = None
) -> _Result:
    """Send every request of a step, in order, and return what the step came to.

    A refusal (a status of 400 or more) is raised inside the generator, at its ``yield``, and so is silence beyond the
    request's own limit; if it is not handled there it comes out here.  Whatever else goes wrong ends the conversation.

    Args:
        client: The engine.
        steps: The requests.
        timeout_s: Deadline of the whole conversation, in seconds.
        send: Sends one request within so many seconds; None for plain requests and answers.

    Raises:
        TargetUnreachable, TargetLost, TargetRejected, DeadlineExceeded: As ``Client.post_json``.
    """
    deadline = time.monotonic() + timeout_s
    send = send or (lambda request, limit_s: send_plain(client, request, limit_s))
    try:
        try:
            request = next(steps)
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        who=client.target.url, waiting_for=f"{request.method} {request.path}", timeout_s=timeout_s
                    )
                limit_s = left_s if request.timeout_s is None else min(left_s, request.timeout_s)
                try:
                    reply = send(request, limit_s)
                except TargetRejected as error:
                    request = steps.throw(error)
                except DeadlineExceeded as error:
                    if request.timeout_s is None:
                        raise
                    request = steps.throw(error)  # it set that limit itself, and may know what silence means
                else:
                    request = steps.send(reply)
        except StopIteration as end:
            return end.value
    finally:
        steps.close()


def send_plain(client: Client, request: EngineRequest, limit_s: float) -> bytes:
    """One request, one answer."""
    if request.method == "GET":
        return client.get_json(request.path, timeout_s=limit_s)
    return client.post_json(request.path, request.body, timeout_s=limit_s)
