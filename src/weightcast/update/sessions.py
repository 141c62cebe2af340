"""The sessions of one attempt: how they are opened, and how they end."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from weightcast.config import UpdateConfig
from weightcast.errors import TargetRejected, WeightcastError, WireError
from weightcast.transports.blame import raise_together, run_each, start_each, wait_each
from weightcast.transports.link import Link, in_flight_to
from weightcast.update.roster import Roster
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import BOXES, Open, Owner
from weightcast.wire.pieces import decode_boxes, decode_wanted
from weightcast.wire.plans import UpdateTables

log = logging.getLogger("weightcast.update.sessions")

LEASE_DEADLINES = 4  # an engine ends a session after this many deadlines of one wait without a message


def this_process() -> Owner:
    """This process as the owner of sessions, and of memory that engines map."""
    return Owner(host=socket.gethostname(), pid=os.getpid())


def open_message(
    config: UpdateConfig, links: Sequence[Link], version: int, plan: UpdateTables, *, trainer: str = ""
) -> Open:
    """Returns the message that opens a new session on these targets; ``trainer`` is ``Roster.trainer``."""
    # A receiver that knows the sizes of broadcasts may post bucket n+1's receive before it replies to n, so the sender
    # must not wait for that reply.
    plan = plan if in_flight_to(links) > 1 else plan.without_sizes
    return Open(
        session=(secrets.token_hex(16) + trainer)[-32:],
        owner=this_process(),
        version=version,
        allow_older=config.allow_older,
        timeout_s=config.timeout_s,
        lease_s=config.timeout_s * LEASE_DEADLINES,
        pause=links[0].start.pause or "abort",  # those with another one say so (``Link.open``)
        verify=config.verify,
        plan=plan,
    )


class Opening:
    """Sessions that targets were asked for.

    If one of the engines has no lease, ``wait`` asks: such an engine is paused while its session is open.
    """

    def __init__(self, message: Open, links: Sequence[Link]) -> None:
        """Asks, and waits for no answer."""
        self._message = message
        self._links = links
        self._asked = self._ask() if all(link.adapter.leased for link in links) else ()

    def _ask(self) -> Sequence[Future[object]]:
        return start_each(lambda link: link.open(self._message), self._links)

    def wait(self) -> None:
        """Waits for the answers; raises those of targets that refuse."""
        raise_together([future.exception() for future in self._asked or self._ask()])


def wanted_boxes(links: Sequence[Link], config: UpdateConfig) -> tuple[bytes, ...] | None:
    """The boxes that engine ranks want which read trainer ranks' buffers through NIXL; None if no engine does.

    An engine is asked once for each of its starts.  Without an answer its ranks read each run by itself.
    """
    readers = [link for link in links if link.plan.reads_remotely]
    if not readers or config.max_extra_bytes is not None:
        return None

    async def ask(link: Link) -> None:
        if link.start.boxes is not None:
            return
        try:
            kinds = decode_boxes(await link.client.get(BOXES, timeout_s=config.timeout_s)).kinds
            for one in kinds:
                decode_wanted(one)
        except (TargetRejected, WireError) as error:
            log.info("%s does not say which boxes its ranks want: %s", link.url, error)
            kinds = ()
        link.start.boxes = kinds

    run_each(ask, readers)
    return tuple(dict.fromkeys(one for link in readers for one in link.start.boxes or ()))


async def commit_again(link: Link, roster: Roster, lost: WeightcastError, *, timeout_s: float) -> Ack:
    """Returns the answer to a Commit whose first answer was lost; TargetRejected if it has not switched.

    ``lost`` is raised if the engine cannot be asked or does not know; its outcome is in doubt then.
    """
    outcome = link.outcome
    outcome.in_doubt = True
    if not link.adapter.leased:
        raise lost  # the engine would take a second Commit for another one
    await roster.look_on_loop([link], hasty=True)
    if not isinstance(link.answer, EngineInfo):
        raise lost
    try:
        ack = await link.commit_again(timeout_s=timeout_s)
    except TargetRejected:
        outcome.in_doubt = False
        raise
    except WeightcastError:
        raise lost from None
    outcome.in_doubt = False
    outcome.notes.append(f"its answer to Commit was lost ({lost}); asked again, it had switched")
    return ack


def end_sessions(links: Iterable[Link], roster: Roster, reason: str) -> None:
    """Ends every session that is open or asked for; each link records what its engine keeps."""
    left = [link for link in links if link.is_open]
    if not left:
        return
    wait_each(start_each(lambda link: link.abort(reason), left))  # goes on, even if an interrupt ends the wait
    roster.ask_silent([link for link in left if link.session.overdue])
