"""The head's attempts at an update.

Only trainer rank 0 has a ``Head``.  A ``Head`` never raises for a failure of engines or network during an update.  It
returns an ``AttemptResult``, which ``update/attempts.py`` tells to every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared
from weightcast.config import Target
from weightcast.digest.sent import replicas_differ
from weightcast.digest.source_sums import AllSums, Mismatch
from weightcast.errors import ConfigError, UpdateFailed, VerificationFailed, WeightcastError
from weightcast.report import UpdateReport
from weightcast.transports.blame import run_each, together
from weightcast.transports.link import Link, leave_all
from weightcast.transports.plan import UpdatePlan
from weightcast.transports.preflight import check_not_older
from weightcast.update.choose import Planner
from weightcast.update.exchange import Exchange
from weightcast.update.failed_attempt import FailedAttempt
from weightcast.update.follower import Follower
from weightcast.update.members import Members
from weightcast.update.messages import AttemptResult, Failure
from weightcast.update.prepare import Preparation, SendPlan
from weightcast.update.roster import Roster
from weightcast.update.sessions import Opening, end_sessions, open_message, wanted_boxes
from weightcast.update.switch_back import switch_back
from weightcast.update.update_run import UpdateRun
from weightcast.update.verify import Verifier, WeightsChanged, check_alike
from weightcast.watch.listeners import Events
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout

log = logging.getLogger("weightcast.update.head")

Progress = Callable[[int, int], None]


class Head(Follower):
    """The attempts of one update after the other.

    Attributes:
        members: The targets, and the plan of their updates.
    """

    leads = True

    def __init__(
        self,
        targets: Sequence[Target],
        roster: Roster,
        planner: Planner,
        events: Events | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Asks nothing yet; the targets are members of the roster.

        ``progress`` is called with bytes sent and bytes in all, after each bucket or run of buckets; for tests.
        """
        super().__init__(events)
        self._progress = progress
        self._preparing: Preparation | None = None
        self._config = planner.config
        self.members = Members([roster.link(target.url) for target in targets], planner)
        self._verifier = Verifier(self.members, planner.exporter)
        self._roster = roster
        self._links: Sequence[Link] = ()  # those of this attempt
        self._opening: Opening | None = None
        self._asked_at: float | None = None
        self._failure: WeightcastError | None = None
        self._repeats = True

    # -- before an attempt

    def choose(self) -> AttemptResult:
        """Probes every target and plans their updates; raises as ``Members.choose``."""
        self._roster.look(self.members.links)
        plan = self.members.choose(first=self._roster.current is None)
        return AttemptResult(plan=plan, served=self.members.served)

    def use(self, plan: UpdatePlan) -> None:
        """As ``Members.use``."""
        self.members.use(plan)

    def prepare(self, plan: SendPlan, shared: Sequence[Sequence[Shared]]) -> None:
        """Hands the plan of the updates to come to every chosen target, and works out what the head compares.

        ``shared`` is as ``BucketStream.share_ahead`` returns it.
        """
        links = self.members.planned
        self._preparing = Preparation(links, plan.tables, self._config, shared)
        self.members.mapped = self._preparing.mapped
        self._verifier.prepare(plan, links)

    def end_preparing(self) -> None:
        """Waits for the engines' work on the plan."""
        assert self._preparing is not None
        preparing, self._preparing = self._preparing, None
        preparing.wait()

    def meet_ahead(self) -> None:
        """As ``Members.meet_ahead``."""
        self.members.meet_ahead()

    def begin(
        self,
        version: int,
        *,
        counts_on: bool = False,
        must_be: str | None = None,
        only: Sequence[Link] | None = None,
    ) -> None:
        """Starts a new update, in which targets that failed before take part again.

        With ``counts_on`` the version is the lowest that it may have.  It passes the numbers that were tried, and
        those that targets serve when they are asked.  ``must_be`` is the model digest that the weights must have, if
        they must.  ``only`` has the targets that take part; None for all.
        """
        if counts_on:
            version = max((version, *(tried + 1 for tried in self._roster.tried)))
        self._start_over()
        for link in self.members.links:
            link.broke_off("the update before this one did not end", whole=False)
        # After a call that was broken off, the members may be others than those of this plan.
        targets = self._roster.links if only is None else only
        self.run = UpdateRun(targets, version, self.events, counts_on=counts_on)
        self._verifier.begin(must_be)

    def _start_over(self) -> None:
        end_sessions(self.members.links, self._roster, "the update before this one did not end")
        self.members.carriers.begin()
        self._links, self._opening = (), None

    def begin_catch_up(self) -> AttemptResult:
        """Starts an update of the targets that do not serve the current version; ``again`` if there are any."""
        current, behind = self._roster.current, self._roster.behind
        if current is None or not behind:
            return AttemptResult()
        if current.digest is None or self._config.verify == "none":
            return AttemptResult(failure=Failure.of(_no_digest(current.version)))
        self.begin(current.version, must_be=current.digest, only=behind)
        return AttemptResult(again=True)

    # -- one attempt

    def look_ahead(self) -> None:
        """Asks the targets for their description.  The trainer works on until ``open`` reads the answers."""
        self._asked_at = self._roster.ask(self.run.active)

    def begin_open(self, plan: SendPlan) -> None:
        """Probes every active target and asks for a session on it; ``open`` waits for the answers."""
        self._failure, self._repeats = None, True
        self._start_over()
        self.run.attempts += 1
        with self._notes_failure(), self.run.phase("open"):
            self._links = links = self._take()
            self.members.renew_carriers(links)
            trainer = self._roster.trainer
            message = open_message(self._config, links, self.run.version, plan.tables, trainer=trainer)
            self.run.tell_attempt(message, links)
            self._opening = Opening(message, links)

    def _take(self) -> Sequence[Link]:
        """Probes every active target, and settles the version; returns those that can take part in this attempt."""
        active, config = self.run.active, self._config
        self._roster.look(active, since=self._asked_at)
        infos = self.run.settle_version(active)
        if config.verify == "none":
            self._verifier.check_tried(self.run.version, self._roster.tried)
        check_not_older(self.run.version, infos, config)
        return self.members.take(active)

    def open(self, plan: SendPlan) -> AttemptResult:
        """Waits for the sessions that ``begin_open`` asked for, and makes the group."""
        carriers, opening = self.members.carriers, self._opening
        try:
            with self.run.phase("open"):
                if self._failure is not None:
                    raise self._failure
                assert opening is not None
                opening.wait()
                if self.members.plan.exchanges:
                    carriers.invite()
                else:
                    carriers.connect()
        except WeightcastError as error:
            return self.fail(error)
        return AttemptResult(
            sums_buckets=self._verifier.open(plan, self._links),
            invited=tuple(carriers.invited),
            boxes=wanted_boxes(self._links, self._config),
        )

    def meet(self, exchange: Exchange, invited: Sequence[Invited]) -> Mapping[str, str]:
        """Joins the groups to which the others are ``invited``; ``after_meeting`` reports what fails."""
        with self._notes_failure(), self.run.phase("open"):
            self.members.carriers.lose(exchange.use(self.members.carriers.join()))
        return {}

    def after_meeting(self, result: AttemptResult) -> AttemptResult:
        """Returns ``result`` if all have joined."""
        return result if self._failure is None else self.fail(self._failure)

    def exchange_failed(self, failures: Sequence[Mapping[str, str]]) -> None:
        """Notes groups in which messages of trainer ranks failed, by name, for each trainer rank in order."""
        if self._failure is None and (by_group := _by_group(failures)):
            with self._notes_failure():
                self.members.carriers.lose(by_group)

    @contextmanager
    def _notes_failure(self) -> Generator[None]:
        try:
            yield
        except WeightcastError as error:
            self._failure = error

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the targets."""
        return tuple(link.url for link in self.members.links)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in which trainer ranks send by themselves."""
        return tuple(self.members.carriers.members)

    @property
    def failed(self) -> bool:
        """True once a bucket could not be sent."""
        return self._failure is not None

    def send(self, bucket: Bucket | None, shared: Sequence[Shared], so_far: tuple[int, int] = (0, 0)) -> None:
        """Digests and sends a bucket, unless one has failed; ``finish`` reports a failure.

        ``so_far`` is ``StepEnded.sent_bytes`` and ``total_bytes`` with this bucket.
        """
        if self.failed:
            return
        assert bucket is not None
        with self._notes_failure():
            with self.run.phase("pack", bucket.layout.index):
                self._verifier.add(bucket)
            with self.run.phase("send", bucket.layout.index, so_far):
                self.members.carriers.send(bucket, shared)
        self._tell_progress(so_far)

    def announce(self, layouts: Sequence[BucketLayout], so_far: tuple[int, int]) -> None:
        """Announces buckets that every trainer rank sends by itself; as ``send``."""
        with self._notes_failure():
            self._verifier.expect(layouts)
            with self.run.phase("send", layouts[0].index, so_far):
                self.members.carriers.announce(layouts)
        self._tell_progress(so_far)

    def _tell_progress(self, so_far: tuple[int, int]) -> None:
        if self._progress is not None and not self.failed:
            self._progress(*so_far)

    def drain(self) -> None:
        """Waits until every target has taken every bucket; ``finish`` reports a failure."""
        if self._failure is None:
            with self._notes_failure(), self.run.phase("send"):
                self.members.carriers.drain()

    def finish(self, sums: AllSums | None = None, *, repeats: bool = True) -> AttemptResult:
        """Drains the transport, verifies, and commits; ``sums`` are None without verification.

        Without ``repeats`` no attempt follows a failure, because the weights may be others by then.
        """
        self._repeats = repeats
        try:
            return self._finish(sums or AllSums())
        finally:
            self._verifier.release()

    def _finish(self, sums: AllSums) -> AttemptResult:
        try:
            if self._failure is not None:
                raise self._failure
            if sums.differ:
                return AttemptResult(differ=True)
            with self.run.phase("pack"):
                sent = self._verifier.finish(sums)
            self.drain()
            if self._failure is not None:
                raise self._failure
            with self.run.phase("verify"):
                self._verifier.close_all(sent, self._links, self.run.version)
            with self.run.phase("commit"):
                self._verifier.check_tried(self.run.version, self._roster.tried)
                self._roster.tried[self.run.version] = self._verifier.digest
                # No target switches before all targets have received everything and have proven it.
                run_each(lambda link: self._verifier.commit(link, sent, self._roster), self._links)
                check_alike(self._links)
        except WeightcastError as error:
            return self.fail(error)
        self.run.add_phase("load", max(link.session.load_s for link in self._links), beside=True)
        self.run.add_phase("verify", max(link.session.verify_s for link in self._links), beside=True)
        if self._verifier.wants_score(self._links):
            return AttemptResult(score=True)
        return AttemptResult(report=self.report())

    def differ(self, found: Sequence[Mismatch]) -> AttemptResult:
        """Fails because sums of the trainer ranks differ, in these tensors."""
        return self.fail(replicas_differ(found))

    def compare(self, tokens: Sequence[int], mine: Sequence[float], why_not: str = "") -> AttemptResult:
        """Compares log-probabilities with the engines'; ``why_not`` says why the trainer has none, else empty."""
        with self.run.phase("verify"):
            self._verifier.compare(self._links, tokens, mine, why_not)
        failures = [link.outcome.failed for link in self.run.targets]
        bad = together(failure for failure in failures if isinstance(failure, VerificationFailed))
        if isinstance(bad, WeightcastError):
            return self._conclude_failed(bad, str(bad))
        return AttemptResult(report=self.report())

    # -- failure and end

    def give_up(self, reason: str) -> None:
        """Ends every session, because the trainer or a target failed; each link records what its engine keeps."""
        self._opening = None
        self.members.carriers.abort(reason)
        end_sessions(self._links, self._roster, reason)
        self.members.carriers.settle()

    def break_off(self, error: BaseException) -> None:
        """Ends every session after an exception that is the trainer's own, such as an interrupt."""
        reason = f"the trainer failed: {type(error).__name__}: {error}".rstrip(": ")
        self.give_up(reason)
        if not isinstance(error, WeightcastError):  # no report follows, which would ask each target
            for link in self.run.targets:
                link.broke_off(reason, whole=False)

    def release(self) -> None:
        """Asks the targets to unmap the trainer's memory."""
        leave_all(self.members.links)

    def close(self, staying: Collection[Link] = ()) -> None:
        """Closes the transport on both sides; safe to call twice.  Notes of those ``staying`` wait for a report."""
        end_sessions(self.members.links, self._roster, "the trainer closes its connections")
        self.members.close_carriers()
        for link in self.members.links:
            for note in () if link in staying else link.take_notes():
                log.warning("%s: %s", link.url, note)

    def fail(self, error: WeightcastError) -> AttemptResult:
        """Ends every session, asks what each target serves, and decides whether another attempt follows."""
        self._failure = error
        failed = FailedAttempt(self.run, self.members, self._links, self._roster, self._config)
        with self.run.phase("recover"):
            self.give_up(str(error))
            failed.find_culprits(error)
        words, repeats = f"update to version {self.run.version} failed", self._repeats
        if repeats and failed.repeats():
            return AttemptResult(again=True)
        if failed.gives_way(repeats=repeats):
            try:
                with self.run.phase("recover"):
                    return AttemptResult(again=True, plan=self.members.choose_again())
            except WeightcastError as why:
                return self._conclude_failed(why, f"{words}: {why}")
        if repeats and failed.leaves_others():
            return AttemptResult(again=True)
        # In a first attempt no target was told anything; the report says what an earlier attempt did.
        untouched = not self._links and self.run.attempts <= 1
        if isinstance(error, WeightsChanged) or (untouched and isinstance(error, ConfigError)):
            return AttemptResult(failure=Failure.of(error), report=self.report())
        return self._conclude_failed(error, f"{words}: {error}")

    def _conclude_failed(self, error: WeightcastError, text: str) -> AttemptResult:
        """Switches targets back where the caller asked for all or nothing, and reports."""
        config, version = self._config, self.run.version
        if config.on_failure == "raise":
            with self.run.phase("recover"):
                text += switch_back(self._links, version=version, reason=str(error), timeout_s=config.timeout_s)
        report = self.report()
        if config.on_failure == "quarantine" and any(row.status == "serving" for row in report.targets):
            return AttemptResult(report=report)
        failed = Failure(error=UpdateFailed.__name__, text=text, hint=error.hint, failures=(Failure.of(error),))
        return AttemptResult(failure=failed, report=report)

    def report(self) -> UpdateReport:
        """As ``UpdateRun.report``."""
        return self.run.report(self._links, self.members, self._roster, self._verifier, whole=self._failure is None)


def _by_group(failures: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The failures of all trainer ranks in each group, given those of each rank, in order."""
    by_group: dict[str, list[str]] = {}
    for rank, failed in enumerate(failures):
        for name, text in failed.items():
            by_group.setdefault(name, []).append(f"trainer rank {rank}: {text}")
    return {name: "; ".join(texts) for name, texts in by_group.items()}


def _no_digest(version: int) -> ConfigError:
    return ConfigError(
        f"no engine can be brought in at version {version}: "
        "no digest says whether the weights are still those of that version",
        hint='connect with verify="received" or more, or leave it to the next update()',
    )
