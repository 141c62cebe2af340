"""The trainer ranks that talk to no engine: what rank 0's ``Head`` does, they leave undone.

Every rank runs the same loop and asks its ``Follower`` at each step.  Rank 0's is a ``Head``, and its results are those
that every rank hears.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared
from weightcast.digest.source_sums import AllSums, Mismatch
from weightcast.errors import WeightcastError
from weightcast.report import UpdateReport
from weightcast.transports.link import Link
from weightcast.transports.plan import UpdatePlan
from weightcast.update.exchange import Exchange
from weightcast.update.messages import AttemptResult
from weightcast.update.prepare import SendPlan
from weightcast.update.update_run import UpdateRun
from weightcast.watch.listeners import Events
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout

FOLLOW_DEADLINES = 6  # other trainer ranks wait this many deadlines, because they cannot see what the head waits for


class Follower:
    """The steps of an update on a rank without engines.  ``Head`` says what each does.

    Attributes:
        leads: True on the rank that talks to engines.
        run: The update that was begun last; on a rank without engines, one without targets.
        events: Hears of the update.
    """

    leads = False

    def __init__(self, events: Events | None = None) -> None:
        self.events = events if events is not None else Events()
        self.run = UpdateRun((), 0, self.events)

    @property
    def failed(self) -> bool:
        """True once a bucket could not be sent in this attempt."""
        return False

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the targets."""
        return ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in which trainer ranks send by themselves."""
        return ()

    # -- between updates

    def use(self, plan: UpdatePlan) -> None:
        """Takes the plan of the updates to come."""

    def prepare(self, plan: SendPlan, shared: Sequence[Sequence[Shared]]) -> None:
        """Hands the plan to engines; ``shared`` is as ``BucketStream.share_ahead`` returns it."""

    def end_preparing(self) -> None:
        """Waits for the engines' work on the plan."""

    def meet_ahead(self) -> None:
        """Makes the groups that need no session."""

    def release(self) -> None:
        """Asks engines to unmap the trainer's memory."""

    def close(self, staying: Collection[Link] = ()) -> None:
        """Closes the transport on both sides."""

    # -- one update

    def begin(self, version: int, *, counts_on: bool = False) -> None:
        """Starts a new update."""

    def begin_catch_up(self) -> AttemptResult:
        """Starts an update of the targets that are behind, if there are any."""
        return AttemptResult()

    def look_ahead(self) -> None:
        """Asks the targets for their description."""

    def begin_open(self, plan: SendPlan) -> None:
        """Asks for sessions."""

    def open(self, plan: SendPlan) -> AttemptResult:
        """Waits for the sessions."""
        return AttemptResult()

    def meet(self, exchange: Exchange, invited: Sequence[Invited]) -> Mapping[str, str]:
        """Joins groups of all trainer ranks and engine ranks; returns the failures by name of the group."""
        return exchange.join(invited)

    def after_meeting(self, result: AttemptResult) -> AttemptResult:
        """Returns ``result`` if all have joined."""
        return result

    def exchange_failed(self, failures: Sequence[Mapping[str, str]]) -> None:
        """Notes groups in which messages failed, by name, for each trainer rank in order."""

    def send(self, bucket: Bucket | None, shared: Sequence[Shared], so_far: tuple[int, int] = (0, 0)) -> None:
        """Sends a filled bucket."""

    def announce(self, layouts: Sequence[BucketLayout], so_far: tuple[int, int]) -> None:
        """Announces buckets that every trainer rank sends by itself."""

    def drain(self) -> None:
        """Waits until every target has taken every bucket."""

    def finish(self, sums: AllSums | None = None, *, repeats: bool = True) -> AttemptResult:
        """Verifies and commits."""
        return AttemptResult()

    def differ(self, found: Sequence[Mismatch]) -> AttemptResult:
        """Fails because sums of the trainer ranks differ."""
        return AttemptResult()

    def compare(self, tokens: Sequence[int], mine: Sequence[float], why_not: str = "") -> AttemptResult:
        """Compares log-probabilities."""
        return AttemptResult()

    def fail(self, error: WeightcastError) -> AttemptResult:
        """Ends every session, and decides whether another attempt follows."""
        return AttemptResult()

    def break_off(self, error: BaseException) -> None:
        """Ends every session after an exception that is the trainer's own."""

    def report(self) -> UpdateReport | None:
        """Reports the update as it is now."""
        return None
