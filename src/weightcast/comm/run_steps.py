"""Runs the steps of an adapter: sends the requests that a generator (``Steps``) yields and hands it the answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.errors import DeadlineExceeded, TargetRejected
from weightcast.runtime.deadline import Deadline

if TYPE_CHECKING:
    from weightcast.wire.answers import Ack

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One HTTP request that an adapter wants sent.

    Attributes:
        path: Path with a leading slash, and with the query if there is one.
        body: JSON bytes; empty for none.
        timeout_s: Deadline of this one request, in seconds; None takes the step's.
        lease: True if the answer is followed by a stream that the caller must keep open.  When the stream closes, or
            the caller dies, the engine ends the session.
    """

    method: str = "POST"
    path: str
    body: bytes = b""
    timeout_s: float | None = None
    lease: bool = False


Steps: TypeAlias = "Generator[EngineRequest, bytes, Ack]"
Send = Callable[[EngineRequest, Deadline], Awaitable[bytes]]


async def converse_on_loop(
    client: Client,
    steps: Generator[EngineRequest, bytes, _Result],
    *,
    timeout_s: float | Deadline,
    send: Send | None = None,
) -> _Result:
    """Sends every request of a step, in order, and returns the step's result.  It is for the event loop.

    A refusal (a status of 400 or more) is raised inside the generator, at its ``yield``.  So is a passed deadline of
    the request's own.  Every other error ends the step: those of ``Client.post_json``.  ``timeout_s`` limits the whole
    step.  ``send`` sends one request; None for plain requests and answers.
    """
    deadline = timeout_s if isinstance(timeout_s, Deadline) else Deadline(timeout_s)
    try:
        request = next(steps)
        while True:
            if deadline.left_s() <= 0:
                raise DeadlineExceeded(
                    who=client.target.url, waiting_for=f"{request.method} {request.path}", timeout_s=deadline.limit_s
                )
            limit = deadline if request.timeout_s is None else deadline.at_most(request.timeout_s)
            try:
                reply = await (send_plain(client, request, limit) if send is None else send(request, limit))
            except TargetRejected as error:
                request = steps.throw(error)
            except DeadlineExceeded as error:
                if request.timeout_s is None:
                    raise
                request = steps.throw(error)  # the step set that limit itself and may handle it
            else:
                request = steps.send(reply)
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


def converse(
    client: Client, steps: Generator[EngineRequest, bytes, _Result], *, timeout_s: float | Deadline
) -> _Result:
    """As ``converse_on_loop``, for a thread that waits for the result."""
    return event_loop.run(converse_on_loop(client, steps, timeout_s=timeout_s))


async def send_plain(client: Client, request: EngineRequest, limit: Deadline, *, at_once: bool = False) -> bytes:
    """Sends one request and returns the body of its answer; ``at_once`` is that of ``Client.post``."""
    if request.method == "GET":
        return await client.get(request.path, timeout_s=limit)
    return await client.post(request.path, request.body, timeout_s=limit, at_once=at_once)
