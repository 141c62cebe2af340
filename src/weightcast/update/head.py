"""The head's attempts at an update, and its recovery when a target fails.

Only trainer rank 0 has a ``Head``.  A ``Head`` never raises for a failure of engines or network during an update.  It
returns an ``AttemptResult``, which ``update/updater.py`` tells to every rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from weightcast.comm.shared_buckets import Shared
from weightcast.config import Target, check_version
from weightcast.digest.sent import Sent
from weightcast.digest.source_sums import Folded
from weightcast.errors import ConfigError, UpdateFailed, VerificationFailed, WeightcastError
from weightcast.fleet.roster import Current, Roster
from weightcast.protocols import Cell
from weightcast.report import UpdateReport
from weightcast.transports.blame import engine_of, failures_of, only_its_group, raise_together, run_each, together
from weightcast.transports.link import Link, leave_all
from weightcast.transports.outcome import Outcome, check_alike
from weightcast.transports.preflight import check_not_older
from weightcast.update.choose import Planner
from weightcast.update.exchange import Exchange
from weightcast.update.members import Members, Probed
from weightcast.update.messages import AttemptResult, Failure
from weightcast.update.prepare import Preparation, SendPlan
from weightcast.update.sessions import Sessions
from weightcast.update.switch_back import switch_back
from weightcast.update.verify import Verifier, WeightsChanged
from weightcast.watch.events import AttemptStarted, short
from weightcast.watch.listeners import Events
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import total_bytes
from weightcast.wire.messages import Open

log = logging.getLogger("weightcast.update.head")

_REPEATS = 2  # of an attempt in which a group failed and no target is to blame
FOLLOW_DEADLINES = 6  # other trainer ranks wait this many deadlines, because they cannot see what the head waits for


# Over 350 lines: each step of an attempt reads and changes the same outcomes, exclusions and failure.
class Head:
    """The attempts of one update after the other, and the sessions on the targets."""

    def __init__(
        self,
        targets: Sequence[Target],
        roster: Roster,
        planner: Planner,
        before: Head | None = None,
        events: Events | None = None,
    ) -> None:
        """Asks nothing yet; links come from ``before``, the head of the membership before."""
        self._events = events if events is not None else Events()
        known = before._members.kept_links(roster) if before is not None else {}
        config, exporter = planner.config, planner.exporter
        self._members = Members(targets, roster, planner, known, self._events)
        self._verifier = Verifier(self._members, config, exporter, planner.specs)
        self._config = config
        self._exporter = exporter
        self._roster = roster
        self.sessions = Sessions(self._members, roster, config)
        self._excluded: set[str] = set()
        self._attempts = 0
        self._unexplained = 0  # attempts in which a group failed and no target is to blame
        self._outcomes: dict[str, Outcome] = {}
        self._phases: dict[str, float] = {}
        self._on_head_s = 0.0  # sum of the phases that follow one another on this rank
        self._started = 0.0
        self.version = 0  # of the update that was begun last
        self._counts_on = False
        self._asked_at: float | None = None
        self._failure: WeightcastError | None = None
        self._mapped: Sequence[Link] = ()  # targets that have mapped this trainer's memory before the first update

    # -- before an attempt

    def choose(self) -> AttemptResult:
        """Probes every target and plans their updates; raises as ``Members.choose``."""
        plan = self._members.choose()
        served = (link.info.version for link in self._members.links.values() if link.planned)
        return AttemptResult(plan=plan, served=max((one for one in served if one is not None), default=None))

    def prepare(self, plan: SendPlan, shared: Sequence[Sequence[Shared]]) -> Preparation:
        """Hands the plan of the updates to come to every chosen target, and works out what the head compares.

        ``shared`` is as ``BucketStream.share_ahead`` returns it.
        """
        links = [link for link in self._members.links.values() if link.planned]
        preparing = Preparation(links, plan.tables, self._config, shared)
        self._mapped = preparing.mapped
        self._verifier.prepare(plan, links)
        return preparing

    def check_prepared(self, preparing: Preparation) -> AttemptResult:
        """Waits for the engines' work on the plan, and refuses those that cannot prove all that the caller asks for."""
        errors: list[VerificationFailed] = []
        for link, ack in preparing.wait():
            try:
                self._verifier.check_opened(link, ack)
            except VerificationFailed as error:
                errors.append(error)
        found = together(errors)
        if not isinstance(found, WeightcastError):
            return AttemptResult()
        return AttemptResult(failure=Failure.of(ConfigError(str(found), hint=found.hint)))

    def meet_ahead(self) -> None:
        """Makes the process groups of the updates to come; as ``Sessions.meet_ahead``."""
        links = self._members.links
        self.sessions.meet_ahead([links[url] for url in self._members.urls if url in links and links[url].planned])

    def begin(
        self,
        version: int,
        *,
        counts_on: bool = False,
        must_be: str | None = None,
        only: Sequence[str] | None = None,
    ) -> None:
        """Starts a new update, in which targets that failed before take part again.

        With ``counts_on`` the version is the lowest that it may have.  It passes the numbers that were tried, and
        those that targets serve when they are asked.  ``must_be`` is the model digest that the weights must have, if
        they must.  ``only`` has the URLs of the targets that take part; None for all.
        """
        self.version = max((version, *(tried + 1 for tried in self._roster.tried))) if counts_on else version
        self._counts_on = counts_on
        self.sessions.begin()
        for url in self._members.urls:
            self._roster.broke_off(url, "the update before this one did not end", whole=False)
        self._excluded.clear()
        self._attempts = self._unexplained = 0
        # After a call that was broken off, the members may be others than those of this plan.
        self._outcomes = {url: Outcome() for url in (self._roster.urls if only is None else only)}
        self._phases = {}
        self._on_head_s = 0.0
        self._started = time.monotonic()
        self._verifier.begin(must_be)

    def begin_catch_up(self) -> AttemptResult:
        """Starts an update of the targets that do not serve the current version; ``again`` if there are any."""
        behind = [row.url for row in self._roster.health() if not row.active and row.state != "gone"]
        current = self._roster.current
        if current is None or not behind:
            return AttemptResult()
        if current.digest is None or self._config.verify == "none":
            error = ConfigError(
                f"no engine can be brought in at version {current.version}: "
                "no digest says whether the weights are still those of that version",
                hint='connect with verify="received" or more, or leave it to the next update()',
            )
            return AttemptResult(failure=Failure.of(error))
        self.begin(current.version, must_be=current.digest, only=behind)
        return AttemptResult(again=True)

    # -- one attempt

    def look_ahead(self) -> None:
        """Asks the targets for their description.  The trainer works on until ``open`` reads the answers."""
        self._asked_at = self._roster.ask(self._active())

    def begin_open(self, plan: SendPlan) -> None:
        """Probes every active target and asks for a session on it; ``open`` waits for the answers."""
        self._failure = None
        self.sessions.begin()
        self._attempts += 1
        with self._phase("open"):
            try:
                links = self._make_links(self._check_version(self._members.probe(self._active(), since=self._asked_at)))
                for link in links:
                    self._outcomes[link.url].transport = link.plan.transport
                    self._outcomes[link.url].legs = link.plan.legs
                self.sessions.begin_open(links, self.version, plan.tables, self._verifier.check_opened, self._began)
            except WeightcastError as error:
                self._failure = error

    def open(self, plan: SendPlan) -> AttemptResult:
        """Waits for the sessions that ``begin_open`` asked for, and makes the group."""
        try:
            with self._phase("open"):
                if self._failure is not None:
                    raise self._failure
                self.sessions.open()
        except WeightcastError as error:
            return self._fail(error)
        sums_buckets = self._verifier.open(plan, self.sessions.links)
        return AttemptResult(
            sums_buckets=sums_buckets, invited=self.sessions.invited, boxes=self.sessions.wanted_boxes()
        )

    def meet(self, exchange: Exchange) -> None:
        """Joins the groups of all trainer ranks and engine ranks to which the others are ``invited``."""
        try:
            with self._phase("open"):
                self.sessions.lost(exchange.use(self.sessions.connect()))
        except WeightcastError as error:
            self._failure = error

    def after_meeting(self, result: AttemptResult) -> AttemptResult:
        """Returns ``result`` if all have joined."""
        return result if self._failure is None else self._fail(self._failure)

    def exchange_failed(self, failures: Sequence[Mapping[str, str]]) -> None:
        """Notes groups in which messages of trainer ranks failed, by name, for each trainer rank in order."""
        by_group: dict[str, list[str]] = {}
        for rank, failed in enumerate(failures):
            for name, text in failed.items():
                by_group.setdefault(name, []).append(f"trainer rank {rank}: {text}")
        if not by_group or self._failure is not None:
            return
        try:
            self.sessions.lost({name: "; ".join(texts) for name, texts in by_group.items()})
        except WeightcastError as error:
            self._failure = error

    @property
    def failed(self) -> bool:
        """True once a bucket could not be sent."""
        return self._failure is not None

    def _began(self, message: Open) -> None:
        self._events.emit(
            AttemptStarted(
                number=self._attempts,
                session=short(message.session),
                version=message.version,
                targets=tuple(link.url for link in self.sessions.links),
                at=time.monotonic(),
            )
        )

    def add_phase(self, name: str, seconds: float) -> None:
        """Adds to the time of a phase of this rank; no two of these run at once."""
        self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._on_head_s += seconds

    def send(self, bucket: Bucket, shared: Sequence[Shared], so_far: tuple[int, int] = (0, 0)) -> None:
        """Digests and sends a bucket; ``finish`` reports a failure.

        ``so_far`` is ``StepEnded.sent_bytes`` and ``total_bytes`` with this bucket.
        """
        try:
            with self._phase("pack", bucket.layout.index):
                self._verifier.add(bucket)
            with self._phase("send", bucket.layout.index, so_far):
                self.sessions.send(bucket, shared)
        except WeightcastError as error:
            self._failure = error

    def finish(
        self, sources: Sequence[Folded] = (), buckets: Mapping[int, Sequence[torch.Tensor]] | None = None
    ) -> AttemptResult:
        """Drains the transport, verifies, and commits; the arguments are those of ``Verifier.finish``."""
        try:
            return self._finish(sources, buckets or {})
        finally:
            self._verifier.release()

    def _finish(self, sources: Sequence[Folded], buckets: Mapping[int, Sequence[torch.Tensor]]) -> AttemptResult:
        try:
            if self._failure is not None:
                raise self._failure
            with self._phase("pack"):
                sent = self._verifier.finish(sources, buckets)
            with self._phase("send"):
                self.sessions.drain()
            with self._phase("verify"):
                self._close_all(sent)
            with self._phase("commit"):
                self._check_tried()
                self._roster.tried[self.version] = self._verifier.digest
                # No target switches before all targets have received everything and have proven it.
                run_each(lambda link: self._commit_one(link, sent), self.sessions.links)
                check_alike(self.sessions.links)
        except WeightcastError as error:
            return self._fail(error)
        self._phases["load"] = max(link.load_s for link in self.sessions.links)
        self._phases["verify"] = self._phases.get("verify", 0.0) + max(link.verify_s for link in self.sessions.links)
        wants_score = self._config.verify == "behaviour"
        if wants_score and self._exporter.scores:
            return AttemptResult(score=True)
        if wants_score:
            for link in self.sessions.links:
                self._outcomes[link.url].add("this exporter has no forward pass, so behaviour could not be compared")
        return AttemptResult(report=self.report())

    def compare(self, tokens: Sequence[int], mine: Sequence[float], why_not: str = "") -> AttemptResult:
        """Compares log-probabilities with the engines'; ``why_not`` says why the trainer has none, else empty."""
        if why_not:
            for link in self.sessions.links:
                self._verifier.not_compared(link, self._outcomes[link.url], why_not)
        else:
            compare = self._verifier.compare_scores
            with self._phase("verify"):
                run_each(lambda link: compare(link, self._outcomes[link.url], tokens, mine), self.sessions.links)
        bad = together(
            outcome.failed for outcome in self._outcomes.values() if isinstance(outcome.failed, VerificationFailed)
        )
        if not isinstance(bad, WeightcastError):
            return AttemptResult(report=self.report())
        return self._conclude_failed(bad, str(bad))

    @property
    def switched(self) -> bool:
        """True if any target has switched in this update."""
        return any(outcome.committed for outcome in self._outcomes.values())

    # -- failure and end

    def give_up(self, reason: str) -> None:
        """Ends every session, because the trainer or a target failed."""
        self.sessions.abort(reason)

    def break_off(self, error: BaseException) -> None:
        """Ends every session after an exception that is the trainer's own, such as an interrupt."""
        reason = f"the trainer failed: {type(error).__name__}: {error}".rstrip(": ")
        self.give_up(reason)
        if not isinstance(error, WeightcastError):  # no report follows, which would ask each target
            for url in self._outcomes:
                self._roster.broke_off(url, reason, whole=False)

    def release(self) -> None:
        """Makes every target unmap the trainer's memory."""
        leave_all(list(self._members.links.values()))

    def close(self) -> None:
        """Closes the transport on both sides; safe to call twice."""
        if not self.sessions.close() and self._mapped:  # no update, which would have made a transport
            leave_all(self._mapped)
        self._mapped = ()
        for link in self._members.links.values():
            for note in link.take_notes():  # no report comes after this
                log.warning("%s: %s", link.url, note)

    def refuse(self, error: WeightcastError) -> AttemptResult:
        """The result of an update that could not begin."""
        return self._fail(error)

    def _fail(self, error: WeightcastError) -> AttemptResult:
        """Ends every session, asks what each target serves, and decides whether another attempt follows."""
        self._failure = error
        broken = self.sessions.broken  # before all groups are aborted, which makes others fail
        with self._phase("recover"):
            self.give_up(str(error))
            culprits = self._culprits(error)
        active = [link.url for link in self.sessions.links]
        nothing_committed = not any(link.committed for link in self.sessions.links)
        repeatable = self._config.on_failure == "quarantine" and nothing_committed
        if repeatable and self.sessions.transport_failed and all(map(only_its_group, culprits.values())):
            suspects = self._suspects(culprits, broken)
            if suspects is None:
                return AttemptResult(again=True)
            culprits = suspects
        notes = self._leave_transports(culprits) if nothing_committed else {}
        failed = {url: failure for url, failure in culprits.items() if url not in notes}
        for url, failure in failed.items():
            self._outcomes[url].failed = failure
        self._excluded |= failed.keys()
        remaining = [url for url in active if url not in self._excluded]
        if notes:
            return self._choose_again(notes)
        if repeatable and culprits and remaining:
            return AttemptResult(again=True)
        # In a first attempt no target was told anything; the report says what an earlier attempt did.
        untouched = not self.sessions.links and self._attempts <= 1
        if isinstance(error, WeightsChanged) or (untouched and isinstance(error, ConfigError)):
            return AttemptResult(failure=Failure.of(error), report=self.report())
        return self._conclude_failed(error, f"update to version {self.version} failed: {error}")

    def _culprits(self, error: WeightcastError) -> dict[str, WeightcastError]:
        """Returns the targets that an error is about, each with its own failure; none if it is the trainer's own.

        If it says only that a group failed, a target that does not answer is to blame.
        """
        named = {engine_of(failure): failure for failure in failures_of(error)}
        found = {url: failure for url, failure in named.items() if url in self._outcomes}
        if not all(map(only_its_group, found.values())) or not (found or self.sessions.transport_failed):
            return found
        infos = self._members.probe([link.url for link in self.sessions.links], hasty=True)
        gone: dict[str, WeightcastError] = {
            url: error if isinstance(info, EngineInfo) else info
            for url, info in infos.items()
            # One without staging is half written, whoever is to blame.
            if not isinstance(info, EngineInfo) or (info.state == "quarantined" and info.staging != "none")
        }
        return gone or found

    def _suspects(
        self, culprits: Mapping[str, WeightcastError], broken: Sequence[Cell]
    ) -> Mapping[str, WeightcastError] | None:
        """Returns the targets to leave out after cells have failed and nobody is to blame; None to try all again.

        All targets of a cell that fails again and again are left out, if others remain.
        """
        failures = {url: cell.failure for cell in broken for url in cell.urls}
        if not failures:
            return culprits
        self._unexplained += 1
        if self._unexplained <= _REPEATS:
            for url, failure in failures.items():
                self._outcomes[url].notes.append(f"the group of its cell failed, and the update began again: {failure}")
            return None
        if self._members.divide_cells():
            log.warning(
                "a process group of %d engines failed again and again, and none of them is to blame: later groups "
                "have at most %d engine ranks: %s",
                max(len(cell.urls) for cell in broken),
                self._members.plan.cell_limit,
                next(iter(failures.values())),
            )
        if all(link.url in failures for link in self.sessions.links):
            return culprits
        return {url: failure for url, failure in failures.items() if failure is not None}

    def _leave_transports(self, culprits: Mapping[str, WeightcastError]) -> dict[str, str]:
        """Returns a remark for each target whose transport gives way to another; none if the update must fail."""
        if not self.sessions.transport_failed:
            return {}
        return self._members.give_way(culprits, if_all=self._config.on_failure == "raise")

    def _choose_again(self, notes: Mapping[str, str]) -> AttemptResult:
        """The result of an attempt that is repeated over other transports."""
        for url, note in notes.items():
            self._outcomes[url].notes.append(note)
        try:
            with self._phase("recover"):
                plan = self._members.choose_again()
        except WeightcastError as error:
            return self._conclude_failed(error, f"update to version {self.version} failed: {error}")
        return AttemptResult(again=True, plan=plan)

    def _conclude_failed(self, error: WeightcastError, text: str) -> AttemptResult:
        """Switches targets back where the caller asked for all or nothing, and reports."""
        words = ""
        if self._config.on_failure == "raise":
            with self._phase("recover"):
                words = switch_back(
                    self.sessions.links,
                    self._outcomes,
                    version=self.version,
                    reason=str(error),
                    timeout_s=self._config.timeout_s,
                )
        report = self.report()
        if self._config.on_failure == "quarantine" and any(row.status == "serving" for row in report.targets):
            return AttemptResult(report=report)
        cause = Failure.of(error)
        failure = Failure(error=UpdateFailed.__name__, text=f"{text}{words}", hint=error.hint, failures=(cause,))
        return AttemptResult(failure=failure, report=report)

    def _check_version(self, infos: Probed) -> Probed:
        """Settles the version, now that targets have said what they serve; ConfigError if it cannot be."""
        healthy = {url: info for url, info in infos.items() if isinstance(info, EngineInfo)}
        for url, info in healthy.items():
            self._outcomes[url].info = info
        if self._counts_on:
            served = [info.version for info in healthy.values() if info.version is not None]
            self.version = max((self.version, *(version + 1 for version in served)))
        check_version("version", self.version)
        if self._config.verify == "none":
            self._check_tried()
        check_not_older(self.version, healthy, self._config)
        return infos

    def _check_tried(self) -> None:
        """Raises WeightsChanged if engines may have switched to other weights under this number, however that ended."""
        tried, digest = self._roster.tried, self._verifier.digest
        if self.version not in tried or (digest is not None and digest == tried[self.version]):
            return
        words = "with other weights" if digest is not None else "and no digest says whether with these weights"
        raise WeightsChanged(
            f"version {self.version} was sent before, {words}: engines may have served it",
            hint=f"call update() without a number, which counts on, or update(version={max(tried) + 1})",
        )

    def _active(self) -> list[str]:
        # Targets that failed just now stay out: one that hangs would cost another deadline.
        return [url for url in self._outcomes if url not in self._excluded]

    def _make_links(self, infos: Mapping[str, EngineInfo | WeightcastError]) -> list[Link]:
        """Returns links to the targets that can take part in this attempt; the others' outcomes say why not."""
        links, failed = self._members.links_for(infos)
        errors = {url: error for url, error in failed.items() if isinstance(error, WeightcastError)}
        for url, error in errors.items():
            self._outcomes[url].failed = error
        if self._config.on_failure == "raise" or not links:
            raise_together(errors.values())
        self._excluded |= errors.keys()
        if not links:
            raise ConfigError("no target is active")
        return links

    def _close_all(self, sent: Sent) -> None:
        """Tells every target that everything was sent, and compares the digests of what arrived."""
        # A target that knew the number of buckets closed with the last one.
        waiting = [link for link in self.sessions.links if link.closed is None]
        run_each(self.sessions.close_one, waiting)
        self._verifier.compare_received(
            sent,
            self.sessions.links,
            self._outcomes,
            version=self.version,
            close_by_name=lambda link: self.sessions.close_one(link, by_name=True),
        )

    async def _commit_one(self, link: Link, sent: Sent) -> None:
        outcome = self._outcomes[link.url]

        async def ask_again(lost: WeightcastError) -> Ack:
            return await self.sessions.commit_again(link, outcome, lost)

        await self._verifier.commit(link, outcome, sent, ask_again)

    def report(self) -> UpdateReport:
        """Asks targets that have not switched, or have failed, what they serve, and reports the update as it is now."""
        unsure = [
            url
            for url, outcome in self._outcomes.items()
            if (outcome.committed is None or outcome.failed) and outcome.reverted is None
        ]
        now: Probed = {}
        if unsure:
            with self._phase("recover"):
                now = self._members.probe(unsure, hasty=True)
        for url, outcome in self._outcomes.items():
            link = self._members.links.get(url)
            outcome.notes += link.take_notes() if link is not None else ()
        rows = tuple(outcome.row(url, now.get(url)) for url, outcome in self._outcomes.items())
        digest = self._verifier.digest
        for link in self.sessions.links:
            if link.committed is not None:
                link.digest = digest
        moved_on = any(row.status == "serving" for row in rows)
        for row in rows:
            answer = self._outcomes[row.url].committed
            its_digest = answer.digest or None if answer is not None else None
            self._roster.ended(row, version=self.version, moved_on=moved_on, digest=its_digest)
        changed = None
        if moved_on:
            self._roster.current = Current(version=self.version, digest=digest)
            # A caller that is allowed older numbers goes back and counts again on purpose.
            kept = (self.version,) if self._config.allow_older else [n for n in self._roster.tried if n >= self.version]
            self._roster.tried = {one: self._roster.tried[one] for one in kept if one in self._roster.tried}
            changed = self._verifier.served()
        size_bytes = total_bytes(self._members.specs)
        seconds = time.monotonic() - self._started
        phases = self._phases | {"other": max(seconds - self._on_head_s, 0.0)}
        phases = {name: round(taken_s, 6) for name, taken_s in phases.items()}
        phases["stall"] = max((row.stall_s for row in rows), default=0.0)
        return UpdateReport(
            version=self.version,
            transport=self._members.label(self.sessions.links),
            bytes=min(self.sessions.sent_bytes, size_bytes) if self._failure is not None else size_bytes,
            buckets=self.sessions.num_buckets,
            seconds=seconds,
            phases=phases,
            peak_extra_bytes=0,
            digest=digest,
            targets=rows,
            unsummed=self._verifier.unsummed,
            changed_ratio=changed,
            cast={dtype: len(numbers) for dtype, numbers in self._members.plan.cast.items()},
        )

    @contextmanager
    def _phase(self, name: str, bucket: int | None = None, so_far: tuple[int, int] = (0, 0)) -> Generator[None]:
        began = time.monotonic()
        try:
            yield
        except BaseException:
            so_far = (0, 0)  # a step that failed has sent no bucket
            raise
        finally:
            ended = time.monotonic()
            self.add_phase(name, ended - began)
            self._events.step_ended(name, began, ended, bucket=bucket, so_far=so_far)
