"""The head's side of an update: which engines take part, by which transport, and what happens when one fails.

Only trainer rank 0 has a ``Head``.  It never raises for what the world did during an update: it returns a ``Decision``,
which ``updater.py`` tells to every rank.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from weightcast.comm.converse import converse
from weightcast.comm.group import local_address_towards
from weightcast.comm.share import Shared
from weightcast.config import Target, TransportName, UpdateConfig
from weightcast.errors import ConfigError, VerificationFailed, WeightcastError
from weightcast.fleet.roster import Current, Roster
from weightcast.kinds import adapter_for
from weightcast.protocols import Exporter, Sharing, Transport
from weightcast.report import UpdateReport
from weightcast.transports.broadcast import BroadcastTransport
from weightcast.transports.checkpoint_engine import CheckpointEngineTransport
from weightcast.transports.digests import Repeated, Sent, SentDigests
from weightcast.transports.disk import DiskTransport
from weightcast.transports.ipc import IpcTransport
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.outcome import Outcome, arrived, check_alike, received_otherwise
from weightcast.transports.preflight import SHARED_MEMORY, check_fits, choose_receivers, choose_transport
from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import model_digest
from weightcast.wire.layout import Packing, TensorSpec, total_bytes
from weightcast.wire.messages import Ack, EngineInfo, Open, Owner

LEASE_DEADLINES = 4  # a session lasts this many deadlines of one wait without a word
FOLLOW_DEADLINES = 6  # and this many the patience of the other trainer ranks, who cannot see what the head waits for


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the head decided, as every rank hears it.

    Attributes:
        report: The report of an update that is over.
        error: Class name of the error to raise; empty for none.
        text: Its text.
        hint: Its hint.
        url: The engine that it is about, if it is about one.
        again: The update starts over without the targets that failed.
        transport: After connecting: the transport chosen.
        receivers: After connecting: the trainer ranks that fill a bucket.
        packing: After connecting: what all targets can read.
        ways: After connecting: how buffers are shared over ``ipc``.
        opens: After connecting: how many processes will open a buffer in torch's way.
        ring_opens: After connecting: how many will open the storage of all buffers.
        score: The trainer's forward pass is wanted next.
        lends: After connecting: large tensors are sent from where they lie.
    """

    report: UpdateReport | None = None
    error: str = ""
    text: str = ""
    hint: str | None = None
    url: str = ""
    again: bool = False
    transport: str = ""
    receivers: tuple[int, ...] = (0,)
    packing: Packing = Packing()
    ways: tuple[str, ...] = ()
    opens: int = 0
    ring_opens: int = 0
    score: bool = False
    lends: bool = False

    @staticmethod
    def of(error: WeightcastError) -> Decision:
        """Raise this."""
        name = next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_"))
        return Decision(error=name, text=str(error), hint=error.hint, url=str(getattr(error, "url", "")))


class _WeightsChanged(ConfigError):
    """The weights are not those that engines were to be brought to."""


class Head:
    """The engines, the transport and the decisions."""

    def __init__(
        self,
        targets: Sequence[Target],
        roster: Roster,
        config: UpdateConfig,
        exporter: Exporter,
        specs: Sequence[TensorSpec],
        places: Sequence[str],
        before: Head | None = None,
    ) -> None:
        self._urls = tuple(target.url for target in targets)
        self._config = config
        self._exporter = exporter
        self._specs = tuple(specs)
        self._bytes = total_bytes(self._specs)
        self._places = tuple(places)
        self._roster = roster
        self._transport: Transport | None = None
        self._signature: tuple[object, ...] = ()
        self._name: TransportName = "auto"
        self._known: dict[str, Link] = before.kept(roster) if before is not None else {}
        self._links: list[Link] = []
        self._excluded: set[str] = set()
        self._attempts = 0
        self._outcomes: dict[str, Outcome] = {}
        self._phases: dict[str, float] = {}
        self._repeated = Repeated()
        self._digests = SentDigests()
        self._started = 0.0
        self._version = 0
        self._sent = Sent()
        self._must_be: str | None = None
        self._asked_at: float | None = None
        self._num_buckets = 0
        self._failure: WeightcastError | None = None
        self._receivers: tuple[int, ...] = (0,)
        self._packing = Packing()
        self._lends = False

    # -- before anything moves

    def choose(self) -> Decision:
        """Probe every target; choose the transport and what it takes."""
        infos = self._probe(self._urls)
        healthy = {url: info for url, info in infos.items() if isinstance(info, EngineInfo)}
        for info in infos.values():
            if not isinstance(info, EngineInfo) and (self._config.on_failure == "raise" or not healthy):
                raise info
        for link in self._known.values():
            link.planned = False
        links = [self._link(url, info) for url, info in healthy.items()]
        for link in links:
            check_fits(link, self._specs)
        device = self._exporter.device
        self._name = choose_transport(
            healthy,
            self._config.transport,
            device=device,
            places=self._places,
            shared_folder=self._config.disk_folder is not None,
        )
        self._receivers = choose_receivers(healthy, self._name, device=device, places=self._places)
        self._packing = links[0].adapter.packing
        opens: dict[Sharing, int] = {"weightcast": 0, "torch": 0, "ring": 0}
        for link in links:
            self._plan(link)
            self._packing = self._packing.also(link.adapter.packing)
            first = opens[link.sharing]
            opens[link.sharing] += link.info.tp_size
            link.opens = slice(first, opens[link.sharing])
        shares = self._name in SHARED_MEMORY
        # A copy hides behind the link of a GPU; on the host it takes the cores and the memory that the sending needs.
        on_host = self._name == "broadcast" and device.type == "cpu" and len(self._places) == 1
        self._lends = on_host and hasattr(self._exporter, "lend") and in_flight_to(links) > 1
        return Decision(
            lends=self._lends,
            transport=self._name,
            receivers=self._receivers,
            packing=self._packing,
            ways=tuple({link.sharing for link in links}) if shares else (),
            opens=opens["torch"] if shares else 0,
            ring_opens=opens["ring"] if shares else 0,
        )

    def begin(self, version: int) -> None:
        """A new update: all targets take part again."""
        self._version = version
        for url in self._urls:
            self._roster.broke_off(url, "the update before this one did not end", whole=False)
        self._excluded.clear()
        self._attempts = 0
        self._outcomes = {url: Outcome() for url in self._urls}
        self._phases = {}
        self._started = time.monotonic()
        self._sent, self._must_be = Sent(), None

    def begin_catch_up(self) -> Decision:
        """An update of those alone that are not at the current version; ``again`` if there are any."""
        behind = [row.url for row in self._roster.health() if not row.active and row.state != "gone"]
        current = self._roster.current
        if current is None or not behind:
            return Decision()
        if current.digest is None or self._config.verify == "none":
            return Decision.of(
                ConfigError(
                    f"nobody can be brought in at version {current.version}: "
                    "no digest says whether the weights are still those",
                    hint='connect with verify="received" or more, or leave it to the next update()',
                )
            )
        self.begin(current.version)
        self._outcomes = {url: Outcome() for url in behind}
        self._must_be = current.digest
        return Decision(again=True)

    @property
    def version(self) -> int:
        """Of the update that was begun last."""
        return self._version

    def kept(self, roster: Roster) -> dict[str, Link]:
        """What is remembered of those that stay when the membership changes."""
        return {url: replace(link) for url, link in self._known.items() if roster.knows(url, link.client)}

    def look_ahead(self) -> None:
        """Ask the targets what they are, for ``open``; the trainer can do something else until they have answered."""
        self._asked_at = self._roster.ask(self._active())

    def open(self, version: int, specs: tuple[TensorSpec, ...], bucket_runs: tuple[tuple[int, ...], ...]) -> Decision:
        """Probe, open a session on every active target, make the group.

        Args:
            version: The version to be.
            specs: What will be sent.
            bucket_runs: In buckets of runs of so many bytes.
        """
        self._failure = None
        self._links = []
        self._attempts += 1
        self._num_buckets = 0
        with self._phase("open"):
            try:
                active = self._active()
                self._links = self._make_links(self._probe(active, since=self._asked_at))
                self._connect_transport()
                message = self._open_message(version, specs, bucket_runs)
                try:
                    self._each(lambda link: link.open(message))
                finally:
                    for link in self._links:
                        if link.session:
                            self._roster.opened(link.url)
                assert self._transport is not None
                self._transport.connect()
            except WeightcastError as error:
                return self._fail(error)
        proven = self._config.verify in ("resident", "behaviour")
        self._digests = SentDigests(
            self._repeated.casts(specs, [link.info.specs for link in self._links]) if proven else {},
            sha256=self._config.digest == "sha256",
            repeated=self._repeated,
        )
        return Decision()

    # -- transfer

    @property
    def failed(self) -> bool:
        """True once a bucket could not be sent."""
        return self._failure is not None

    def add_phase(self, name: str, seconds: float) -> None:
        """Count time."""
        self._phases[name] = self._phases.get(name, 0.0) + seconds

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """Digest and send; a failure is kept for ``finish``."""
        assert self._transport is not None
        try:
            if self._config.verify != "none":
                # Before it is sent: of a bit that flips later, both ends would digest the same.
                with self._phase("pack"):
                    self._digests.add(bucket)
            with self._phase("send"):
                self._transport.send(bucket, shared)
            self._num_buckets += 1
        except WeightcastError as error:
            self._failure = error

    # -- verify, commit

    def finish(self) -> Decision:
        """Drain, verify, commit."""
        assert self._transport is not None
        try:
            if self._failure is not None:
                raise self._failure
            with self._phase("pack"):
                sent = self._digests.finish() if self._config.verify != "none" else Sent()
            with self._phase("send"):
                self._transport.drain()
            with self._phase("verify"):
                self._close_all(sent)
            with self._phase("commit"):
                self._each(lambda link: self._commit_one(link, sent))
                check_alike(self._links)
        except WeightcastError as error:
            return self._fail(error)
        self._phases["load"] = max(link.load_s for link in self._links)
        self._phases["verify"] = self._phases.get("verify", 0.0) + max(link.verify_s for link in self._links)
        wants_score = self._config.verify == "behaviour"
        if wants_score and hasattr(self._exporter, "logprobs"):
            return Decision(score=True)
        if wants_score:
            for link in self._links:
                self._outcomes[link.url].add("this exporter has no forward pass, so behaviour could not be compared")
        return Decision(report=self._report())

    def compare(self, tokens: Sequence[int], mine: Sequence[float], why_not: str = "") -> Decision:
        """Do the engines' log-probabilities agree with the trainer's?  If it has none, ``why_not`` says why."""
        if why_not:
            for link in self._links:
                self._outcomes[link.url].add(why_not)
        else:
            self._each(lambda link: self._compare_one(link, tokens, mine))
        bad = [outcome.failed for outcome in self._outcomes.values() if isinstance(outcome.failed, VerificationFailed)]
        report = self._report()
        if bad and (self._config.on_failure == "raise" or not any(row.status == "serving" for row in report.targets)):
            return Decision(error="UpdateFailed", text=str(bad[0]), hint=bad[0].hint, report=report)
        return Decision(report=report)

    def _compare_one(self, link: Link, tokens: Sequence[int], mine: Sequence[float]) -> None:
        outcome, tolerance = self._outcomes[link.url], self._config.behaviour_tolerance
        try:
            theirs = converse(link.client, link.adapter.score(tokens), timeout_s=self._config.timeout_s)
            apart = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        except (WeightcastError, ValueError) as error:
            outcome.add(f"could not compare behaviour: {error}")
            return
        # ``max`` passes over a NaN.
        off = max(apart) if all(map(math.isfinite, apart)) else math.inf
        if off <= tolerance:
            outcome.proof = "behaviour"
            outcome.add(f"log-probabilities agree within {off:.2g}")
            return
        outcome.failed = VerificationFailed(
            f"{link.url} keeps what was sent, but answers otherwise: log-probabilities are off by {off:.3g} "
            f"(tolerance {tolerance:g})",
            url=link.url,
            names=(),
            hint="the engine computes with something else than its parameters (packed copies, a stale graph), "
            "or one of the two forward passes is not finite",
        )

    def switched(self) -> UpdateReport | None:
        """What became of the targets, if any of them has switched in this update."""
        if not any(outcome.committed for outcome in self._outcomes.values()):
            return None
        return self._report()

    def _check_unchanged(self) -> None:
        """Two engines with one version and other weights are what a version is there to prevent."""
        if self._must_be is not None and self._sent_digest() != self._must_be:
            raise _WeightsChanged(
                f"the weights are no longer those of version {self._version}: nobody can be brought in at it",
                hint="retarget() before training goes on, or leave it to the next update()",
            )

    def _sent_digest(self) -> str | None:
        """Of all that was sent; not asked for before engines have switched, since they would wait."""
        return model_digest(self._sent.received) if self._sent else None

    # -- failure and end

    def give_up(self, reason: str) -> None:
        """The trainer itself failed: end every session."""
        if self._transport is not None:
            self._transport.abort(reason)
        self._abort_all(reason)
        if self._transport is not None:
            self._transport.settle()

    def close(self) -> None:
        """Let go of everything; safe to call twice."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _fail(self, error: WeightcastError) -> Decision:
        """End every session, find out what each target serves, decide how to go on."""
        self._failure = error
        self.give_up(str(error))
        culprits = set[str]() if isinstance(error, _WeightsChanged) else self._culprits(error)
        for url in culprits:
            self._outcomes[url].failed = error
        active = [link.url for link in self._links]
        self._excluded |= culprits
        remaining = [url for url in active if url not in self._excluded]
        nothing_committed = not any(link.committed for link in self._links)
        if self._config.on_failure == "quarantine" and culprits and remaining and nothing_committed:
            return Decision(again=True)
        # In a first attempt nobody was told anything; what an earlier one did must be said.
        untouched = not self._links and self._attempts <= 1
        if untouched or isinstance(error, _WeightsChanged):
            return Decision.of(error)
        report = self._report()
        text = f"update to version {self._version} failed: {error}"
        if self._config.on_failure == "quarantine" and any(row.status == "serving" for row in report.targets):
            return Decision(report=report)
        return Decision(error="UpdateFailed", text=text, hint=error.hint, report=report)

    def _culprits(self, error: WeightcastError) -> set[str]:
        url = getattr(error, "url", None) or getattr(error, "who", None)
        if isinstance(url, str) and url in self._outcomes:
            return {url, *self._outcomes.keys() & getattr(error, "also", ())}
        infos = self._probe([link.url for link in self._links], hasty=True)
        gone = {url for url, info in infos.items() if not isinstance(info, EngineInfo) or info.state == "quarantined"}
        return gone

    def _abort_all(self, reason: str) -> None:
        links = [link for link in self._links if link.session]
        if not links:
            return
        with ThreadPoolExecutor(max_workers=len(links)) as pool:
            answers = list(pool.map(Link.abort, links, [reason] * len(links)))
        for link, answer in zip(links, answers, strict=True):
            if link.silent:
                self._roster.fell_silent(link.url, reason)
            whole = answer is not None and answer.state == "serving" and not link.mixed
            self._roster.broke_off(link.url, reason, whole=whole)

    def _active(self) -> list[str]:
        """Not those that failed just now: one that stands still would take another deadline to say nothing."""
        return [url for url in self._outcomes if url not in self._excluded]

    def _probe(
        self, urls: Sequence[str], *, hasty: bool = False, since: float | None = None
    ) -> dict[str, EngineInfo | WeightcastError]:
        found = self._roster.look(urls, hasty=hasty, since=since)
        return {
            url: self._remembered(url, info) if isinstance(info, EngineInfo) else info for url, info in found.items()
        }

    def _make_links(self, infos: Mapping[str, EngineInfo | WeightcastError]) -> list[Link]:
        links: list[Link] = []
        first: WeightcastError | None = None
        for url, info in infos.items():
            outcome = self._outcomes[url]
            if not isinstance(info, EngineInfo):
                if self._config.on_failure == "raise":
                    raise info
                self._excluded.add(url)
                outcome.failed = info
                first = first or info
                continue
            outcome.info = info
            link = self._link(url, info)
            try:
                if not link.planned:
                    self._plan_late(link)
                self._check_still_fits(link)
            except WeightcastError as error:
                if self._config.on_failure == "raise":
                    raise
                self._excluded.add(url)
                outcome.failed = error
                first = first or error
                continue
            links.append(link)
        if not links:
            raise first or ConfigError("no target is active")
        return links

    def _link(self, url: str, info: EngineInfo) -> Link:
        """The target's link; a new one if it is of another kind than it was."""
        link = self._known.get(url)
        if link is None or link.info.kind != info.kind:
            link = self._known[url] = Link(client=self._roster.client(url), adapter=adapter_for(info), info=info)
        link.info = info
        return link

    def _plan(self, link: Link) -> None:
        """Can this be sent to it so?"""
        link.adapter.check(self._specs, transport=self._name, bucket_bytes=self._config.bucket_bytes)
        link.sharing = "ring" if self._name == "checkpoint-engine" else link.adapter.sharing
        link.planned = True

    def _plan_late(self, link: Link) -> None:
        """The same for one that was away when the transport was chosen, or was another."""
        check_fits(link, self._specs)
        choose_transport(
            {link.url: link.info},
            self._name,
            device=self._exporter.device,
            places=self._places,
            shared_folder=self._config.disk_folder is not None,
        )
        link.opens = slice(0, 0)  # of the handles to buffers none is for it
        self._plan(link)

    def _remembered(self, url: str, info: EngineInfo) -> EngineInfo:
        """What an engine says of itself, and what it cannot know: that an update of it broke off."""
        link = self._known.get(url)
        if link is None or link.info.kind != info.kind or not link.mixed:
            return info
        return msgspec.structs.replace(
            info,
            state="quarantined",
            message="an update of it broke off: it may hold parts of two versions; send it a full update",
        )

    def _check_still_fits(self, link: Link) -> None:
        """Is an engine that was away, or restarted, one that the buckets were planned for?"""
        opens = len(range(1 << 30)[link.opens])
        shares = self._name in SHARED_MEMORY and link.sharing != "weightcast"
        other = self._packing.also(link.adapter.packing) != self._packing
        other = other or (self._lends and link.adapter.in_flight < 2)
        if other or (shares and opens != link.info.tp_size):
            raise ConfigError(
                f"{link.url} is another engine than the buckets were planned for: {link.info.engine}, "
                f"{link.info.tp_size} ranks",
                hint="call retarget() with the targets as they are now",
            )

    def _connect_transport(self) -> None:
        """Groups and buffers live as long as the membership; an engine that came back is another member."""
        signature = tuple(
            (link.url, tuple((rank.pid, rank.device) for rank in link.info.ranks)) for link in self._links
        )
        if self._transport is not None and signature == self._signature:
            return
        if self._transport is not None:
            self._transport.close()
        if self._name == "ipc":
            self._transport = IpcTransport(self._links, timeout_s=self._config.timeout_s)
        elif self._name == "checkpoint-engine":
            self._transport = CheckpointEngineTransport(self._links, timeout_s=self._config.timeout_s)
        elif self._name == "disk":
            folder = self._config.disk_folder
            self._transport = DiskTransport(
                self._links, specs=self._specs, folder=folder, timeout_s=self._config.timeout_s
            )
        else:
            host = self._config.rendezvous_host or self._address()
            self._transport = BroadcastTransport(
                self._links,
                device=self._exporter.device,
                host=host,
                bucket_bytes=self._config.bucket_bytes,
                timeout_s=self._config.timeout_s,
            )
        self._signature = signature

    def _address(self) -> str:
        """Address under which every target can reach this process."""
        addresses = {local_address_towards(link.client.target.host, 80) for link in self._links}
        outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
        return sorted(outside or addresses)[0]

    def _open_message(
        self, version: int, specs: tuple[TensorSpec, ...], bucket_runs: tuple[tuple[int, ...], ...]
    ) -> Open:
        config = self._config
        return Open(
            session=secrets.token_hex(16),
            owner=Owner(host=socket.gethostname(), pid=os.getpid()),
            version=version,
            allow_older=config.allow_older,
            timeout_s=config.timeout_s,
            lease_s=config.timeout_s * LEASE_DEADLINES,
            pause=config.pause,
            verify=config.verify,
            digest=config.digest,
            specs=specs,
            # Who is told may wait on its device for a bucket before it has answered to the one before: then that answer
            # must not be waited for.
            bucket_runs=bucket_runs if in_flight_to(self._links) > 1 else (),
        )

    def _each(self, do: Callable[[Link], object]) -> None:
        """The same on every link at once; the first failure, after all have ended."""
        if len(self._links) == 1:  # without a thread, which takes longer than the engine's part of the message
            do(self._links[0])
            return
        with ThreadPoolExecutor(max_workers=len(self._links)) as pool:
            futures = [pool.submit(do, link) for link in self._links]
        for future in futures:
            future.result()

    def _close_all(self, sent: Sent) -> None:
        """Tell every target that everything was sent, and compare what arrived."""
        # SHA-256 is taken tensor by tensor.
        by_name = self._config.digest == "sha256" and bool(sent)

        def close(link: Link) -> None:
            if by_name or link.closed is None:  # one that knew how many buckets would come closed with the last
                self._close_one(link, by_name=by_name)

        self._each(close)
        self._sent = sent
        self._check_unchanged()
        for link in self._links:
            ack = link.closed
            assert ack is not None
            if sent and "received" in link.adapter.proves:
                if not arrived(link, ack, sent):
                    raise received_otherwise(link, ack if by_name else self._close_one(link, by_name=True), sent)
                self._outcomes[link.url].received(ack, sent)

    def _close_one(self, link: Link, *, by_name: bool) -> Ack:
        return link.close(buckets=self._num_buckets, timeout_s=self._config.timeout_s, by_name=by_name)

    def _commit_one(self, link: Link, sent: Sent) -> None:
        wanted = self._config.verify in ("resident", "behaviour")
        proves = wanted and "resident" in link.adapter.proves
        specs, unproven = link.info.specs, frozenset[str](link.closed.unproven if link.closed is not None else ())
        otherwise = sent.kept_otherwise(specs, without=unproven) if proves else {}
        as_received = proves and len(otherwise) + len(unproven) < len(specs)
        ack = link.commit(otherwise, as_received=as_received, timeout_s=self._config.timeout_s)
        outcome = self._outcomes[link.url]
        outcome.resident(link, ack, sent.kept(specs, without=unproven) if proves else {})
        level = "resident" if wanted else self._config.verify
        if level != "none" and level not in link.adapter.proves and self._config.verify != "behaviour":
            can = 'it answers with log-probabilities: verify="behaviour"'
            outcome.add(f"{link.info.engine} cannot prove that the new weights are {level}; {can}")

    def _report(self) -> UpdateReport:
        unsure = [url for url, outcome in self._outcomes.items() if outcome.committed is None or outcome.failed]
        now = self._probe(unsure, hasty=True)
        rows = tuple(outcome.row(url, now.get(url)) for url, outcome in self._outcomes.items())
        sent_digest = self._sent_digest()
        moved_on = any(row.status == "serving" for row in rows)
        for row in rows:
            self._roster.ended(row, version=self._version, moved_on=moved_on)
        if moved_on:
            self._roster.current = Current(version=self._version, digest=sent_digest)
        phases = {name: round(seconds, 6) for name, seconds in self._phases.items()}
        phases["stall"] = max((row.stall_s for row in rows), default=0.0)
        return UpdateReport(
            version=self._version,
            transport=self._name,
            bytes=self._bytes,
            buckets=self._num_buckets,
            seconds=time.monotonic() - self._started,
            phases=phases,
            peak_extra_bytes=0,
            digest=sent_digest,
            targets=rows,
        )

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_phase(name, time.monotonic() - started)
