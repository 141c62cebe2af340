"""One update of all targets is one transaction.  The only module that knows which classes exist.

Every trainer rank has a ``WeightUpdater`` and calls its methods in step.  Rank 0, the *head*, talks to the engines and
decides; the others give what they hold and hear what was decided.  So every rank returns the same report or raises
the same error.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import msgspec
from torch import nn

from weightcast import errors
from weightcast.comm.group import local_address_towards
from weightcast.comm.http import Client
from weightcast.comm.ipc import SharedBuffer, device_uuid, host_id
from weightcast.comm.local import TrainerGroup
from weightcast.comm.memory import PeakMemory
from weightcast.config import Target, UpdateConfig
from weightcast.engines.native.adapter import NativeAdapter
from weightcast.errors import (
    ConfigError,
    DeadlineExceeded,
    TargetError,
    UpdateFailed,
    VerificationFailed,
    WeightcastError,
)
from weightcast.exporters.module import ModuleExporter
from weightcast.fleet.probe import probe
from weightcast.protocols import Exporter, Scorer
from weightcast.report import TargetReport, TargetStatus, UpdateReport
from weightcast.transports.broadcast import BroadcastTransport
from weightcast.transports.digests import SentDigests
from weightcast.transports.ipc import IpcTransport
from weightcast.transports.link import Link
from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import model_digest
from weightcast.wire.layout import DTYPES, TensorSpec, plan_buckets, total_bytes
from weightcast.wire.messages import EngineInfo, MemoryHandle, Open, Owner

Progress = Callable[[int, int], None]

_NUM_SLOTS = 2
_PATIENCE = 4.0  # followers wait this many deadlines for a head that is itself waiting for engines
_PROBE_TOKENS = tuple(range(5, 37))


class _Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the head decided, as all ranks hear it.

    Attributes:
        report: The report of a finished update, if it finished.
        error: Class name of the error to raise, if any.
        text: Its text.
        hint: Its hint.
        again: The update starts over without the targets that failed.
        transport: After connecting: the transport chosen.
        receivers: After connecting: trainer ranks that fill a bucket.
        score: The trainer's forward pass is wanted next.
    """

    report: UpdateReport | None = None
    error: str = ""
    text: str = ""
    hint: str | None = None
    again: bool = False
    transport: str = ""
    receivers: tuple[int, ...] = (0,)
    score: bool = False


class WeightUpdater:
    """Keeps rollout engines at the trainer's weights.  Made by ``connect``; a context manager."""

    def __init__(
        self, exporter: Exporter, targets: Sequence[Target], config: UpdateConfig, progress: Progress | None = None
    ) -> None:
        self._exporter = exporter
        self._config = config
        self._progress = progress
        self._targets = tuple(targets)
        self._group = TrainerGroup.connect(exporter.device, timeout_s=config.timeout_s)
        self._clients: dict[Target, Client] = {}
        self._slots: list[SharedBuffer] = []
        self._head: _Head | None = None
        self._closed = False
        self._specs = tuple(exporter.specs())
        self._layouts = plan_buckets(self._specs, bucket_bytes=config.bucket_bytes, packing=NativeAdapter.packing)
        self._choose()

    @classmethod
    def connect(
        cls,
        model: nn.Module | Exporter,
        targets: Sequence[Target | str],
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Meet the engines and check that an update can work.  Collective: every trainer rank calls it.

        Args:
            model: A plain or FSDP2 module, or any ``Exporter``.
            targets: The engines; plain URLs will do.
            progress: Called on the head with (bytes sent, bytes in all) after each bucket.
            **options: The fields of ``UpdateConfig``: transport, bucket_bytes, pause, verify, digest, timeout_s,
                on_failure, wire_dtype, allow_older, rendezvous_host.

        Raises:
            ConfigError: It cannot work as asked; nothing has moved.
            TargetUnreachable, TargetRejected: An engine does not answer, or refuses.
            TrainerRankFailed: Another trainer rank did not take part.
        """
        try:
            config = UpdateConfig(**options)
        except TypeError as error:
            raise ConfigError(f"{error}".replace("UpdateConfig.__init__()", "WeightUpdater.connect()")) from None
        if not targets:
            raise ConfigError("no targets: an update of nothing is an error", hint="pass at least one Target(url)")
        known = [Target(target) if isinstance(target, str) else target for target in targets]
        if len({target.url for target in known}) != len(known):
            raise ConfigError("a target is listed twice")
        if config.wire_dtype is not None and config.wire_dtype not in DTYPES:
            raise ConfigError(f"wire_dtype={config.wire_dtype!r}: choose one of {', '.join(DTYPES)}")
        if isinstance(model, nn.Module):
            dtype = DTYPES[config.wire_dtype] if config.wire_dtype else None
            exporter: Exporter = ModuleExporter(model, wire_dtype=dtype)
        else:
            exporter = model
        return cls(exporter, known, config, progress)

    @property
    def transport(self) -> str:
        """``"ipc"`` or ``"broadcast"``, as asked or as chosen."""
        return self._transport

    def update(self, *, version: int) -> UpdateReport:
        """Put the weights as they are now into every target.  Collective: every trainer rank calls it.

        Args:
            version: What the engines will call these weights; counts up.

        Returns:
            The report, the same on every rank.

        Raises:
            UpdateFailed: A target failed (``on_failure="raise"``), or all did.  ``report`` says what each serves now.
            ConfigError, TargetUnreachable, TargetRejected: It failed before anything moved.
            TrainerRankFailed: Another trainer rank failed; the engines keep what they serve.
        """
        if self._closed:
            raise ConfigError("this updater is closed")
        if isinstance(version, bool) or version < 0:
            raise ConfigError(f"version={version!r}: a version is a whole number from 0")
        if self._head is not None:
            self._head.begin(version)
        while True:
            decision = self._attempt(version)
            if not decision.again:
                break
        if decision.error:
            raise _rebuild(decision)
        assert decision.report is not None
        return decision.report

    def retarget(self, targets: Sequence[Target | str]) -> None:
        """Membership changed: let go of the old targets and meet the new ones.  Collective.

        Raises:
            ConfigError, TargetUnreachable, TargetRejected: As ``connect``.
        """
        if not targets:
            raise ConfigError("no targets: an update of nothing is an error", hint="pass at least one Target(url)")
        self._targets = tuple(Target(target) if isinstance(target, str) else target for target in targets)
        if self._head is not None:
            self._head.close()
        self._choose()

    def close(self) -> None:
        """Let go of groups, buffers and connections, here and in the engines.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._head is not None:
            self._head.close()
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose(self) -> None:
        """Probe, check, choose the transport; every rank hears the result."""
        places = self._group.gather_bytes(device_uuid(self._exporter.device).encode())
        decision = _Decision()
        if self._group.is_head:
            assert places is not None
            head = _Head(self._targets, self._config, self._exporter, self._specs, [place.decode() for place in places])
            try:
                decision = _Decision(transport=head.choose(), receivers=head.receivers)
                self._head = head
            except WeightcastError as error:
                head.close()
                decision = _decide_error(error)
        decision = self._hear(decision)
        if decision.error:
            raise _rebuild(decision)
        self._transport = decision.transport
        self._group.receivers = decision.receivers

    def _hear(self, decision: _Decision) -> _Decision:
        payload = msgspec.json.encode(decision) if self._group.is_head else None
        heard = self._group.broadcast_bytes(payload, timeout_s=self._config.timeout_s * _PATIENCE)
        return msgspec.json.decode(heard, type=_Decision)

    def _attempt(self, version: int) -> _Decision:
        """One try at the transaction; every rank returns the same decision."""
        head = self._head
        with PeakMemory(self._exporter.device) as peak:
            decision = _Decision()
            if head is not None:
                decision = head.open(version, self._specs)
            decision = self._hear(decision)
            if decision.error or decision.again:
                return decision
            try:
                self._stream()
                if head is not None:
                    decision = head.finish()
            except BaseException as error:
                if head is not None:
                    head.give_up(f"the trainer failed: {error}")
                raise
            decision = self._hear(decision)
        if decision.score:
            decision = self._score()
        if decision.report is not None:
            extra = self._group.gather_bytes(str(peak.extra_bytes).encode())
            if head is not None:
                assert extra is not None
                most = max(int(value) for value in extra)
                decision = msgspec.structs.replace(
                    decision, report=msgspec.structs.replace(decision.report, peak_extra_bytes=most)
                )
            decision = self._hear(decision)
        return decision

    def _stream(self) -> None:
        """Fill one bucket while the one before it is under way."""
        head = self._head
        receives = self._group.rank in self._group.receivers
        if receives and not self._slots:
            size = max(layout.size_bytes for layout in self._layouts)
            count = min(_NUM_SLOTS, len(self._layouts))
            self._slots = [SharedBuffer(max(size, 1), self._exporter.device) for _ in range(count)]
        for layout in self._layouts:
            go = b"go" if head is None or not head.failed else b"stop"
            if self._group.broadcast_bytes(go, timeout_s=self._config.timeout_s * _PATIENCE) != b"go":
                return
            slot = self._slots[layout.index % len(self._slots)] if receives else None
            bucket = Bucket(layout, slot.data) if slot is not None else None
            started = time.monotonic()
            self._exporter.fill(bucket, layout, self._group)
            if head is not None:
                head.add_phase("gather", time.monotonic() - started)
            handles = self._gather_handles(slot)
            if head is not None:
                assert bucket is not None
                head.send(bucket, handles)
                if self._progress is not None and not head.failed:
                    self._progress(head.sent_bytes, total_bytes(self._specs))

    def _gather_handles(self, slot: SharedBuffer | None) -> list[MemoryHandle]:
        """Handles of all filled buffers, on the head."""
        if self._transport != "ipc":
            return []
        handle = msgspec.json.encode(slot.handle()) if slot is not None else b""
        gathered = self._group.gather_bytes(handle) or []
        return [msgspec.json.decode(item, type=MemoryHandle) for item in gathered if item]

    def _score(self) -> _Decision:
        """The trainer's own forward pass beside the engines'."""
        scorer = cast(Scorer, self._exporter)
        mine = scorer.logprobs(_PROBE_TOKENS)
        decision = _Decision()
        if self._head is not None:
            decision = self._head.compare(_PROBE_TOKENS, mine)
        return self._hear(decision)


@dataclass(slots=True)
class _Outcome:
    """What happened to one target in this update, across attempts."""

    before: int | None = None
    info: EngineInfo | None = None
    failed: WeightcastError | None = None
    stall_s: float = 0.0
    proof: Literal["none", "received", "resident", "behaviour"] = "none"
    message: str = ""
    digest: str | None = None
    matched: int = 0
    status: TargetStatus = "untouched"
    version_after: int | None = None
    not_updated: tuple[str, ...] = ()
    peak_extra_bytes: int = 0


class _Head:
    """The head's side of an update: the engines, the transport and the decisions."""

    def __init__(
        self,
        targets: Sequence[Target],
        config: UpdateConfig,
        exporter: Exporter,
        specs: Sequence[TensorSpec],
        places: Sequence[str],
    ) -> None:
        self._targets = tuple(targets)
        self._config = config
        self._exporter = exporter
        self._specs = tuple(specs)
        self._places = tuple(places)
        self._clients = {target.url: Client(target, timeout_s=config.timeout_s) for target in targets}
        self._transport: IpcTransport | BroadcastTransport | None = None
        self._signature: tuple[object, ...] = ()
        self._name = ""
        self._links: list[Link] = []
        self._excluded: set[str] = set()
        self._outcomes: dict[str, _Outcome] = {}
        self._phases: dict[str, float] = {}
        self._digests = SentDigests()
        self._started = 0.0
        self._version = 0
        self._sent_digest: str | None = None
        self._num_buckets = 0
        self._failure: WeightcastError | None = None
        self.receivers: tuple[int, ...] = (0,)
        self.sent_bytes = 0

    # -- before anything moves

    def choose(self) -> str:
        """Probe every target and choose the transport."""
        infos = self._probe_all()
        healthy = {url: info for url, info in infos.items() if isinstance(info, EngineInfo)}
        for info in infos.values():
            if not isinstance(info, EngineInfo) and (self._config.on_failure == "raise" or not healthy):
                raise info
        for url, info in healthy.items():
            self._check_fits(url, info)
        here = host_id()
        same_host = all(info.host_id == here for info in healthy.values())
        asked = self._config.transport
        if asked == "ipc" and not same_host:
            far = next(url for url, info in healthy.items() if info.host_id != here)
            raise ConfigError(f"{far} runs on another host; ipc needs one host", hint='use transport="broadcast"')
        self._name = ("ipc" if same_host else "broadcast") if asked == "auto" else asked
        engine_devices = {rank.device for info in healthy.values() for rank in info.ranks}
        on_gpu = self._exporter.device.type == "cuda"
        if self._name == "broadcast" and any((device != "cpu") != on_gpu for device in engine_devices):
            raise ConfigError(
                f"broadcast needs weights of one kind of device; the trainer's are on {self._exporter.device}, "
                f"an engine's on {next(d for d in engine_devices if (d != 'cpu') != on_gpu)}",
                hint='use transport="ipc" on one host, or an exporter on the engines\' kind of device',
            )
        if self._name == "broadcast" and on_gpu and self._places[0] in engine_devices:
            raise ConfigError(
                f"trainer and engine share GPU {self._places[0]}, and nccl wants a GPU for each rank",
                hint='use transport="ipc" for engines on the trainer\'s GPUs',
            )
        if self._name == "ipc" and on_gpu and any(place in engine_devices for place in self._places[1:]):
            self.receivers = tuple(range(len(self._places)))
        return self._name

    def begin(self, version: int) -> None:
        """A new update: all targets take part again."""
        self._version = version
        self._excluded.clear()
        self._outcomes = {target.url: _Outcome() for target in self._targets}
        self._phases = {}
        self._started = time.monotonic()
        self._sent_digest = None

    def open(self, version: int, specs: tuple[TensorSpec, ...]) -> _Decision:
        """Probe, open a session on every active target, make the group."""
        self._failure = None
        self.sent_bytes = self._num_buckets = 0
        with self._phase("open"):
            try:
                infos = self._probe_all()
                self._links = self._make_links(infos)
                self._connect_transport()
                message = self._open_message(version, specs)
                self._each(lambda link: link.open(message))
                assert self._transport is not None
                self._transport.connect()
            except WeightcastError as error:
                return self._fail(error)
        kept = [{spec.name: spec.dtype for spec in link.info.specs} for link in self._links]
        self._digests = SentDigests(
            kept if self._config.verify in ("resident", "behaviour") else (), sha256=self._config.digest == "sha256"
        )
        return _Decision()

    # -- transfer

    @property
    def failed(self) -> bool:
        """True once a bucket could not be sent."""
        return self._failure is not None

    def add_phase(self, name: str, seconds: float) -> None:
        """Count time."""
        self._phases[name] = self._phases.get(name, 0.0) + seconds

    def send(self, bucket: Bucket, handles: Sequence[MemoryHandle]) -> None:
        """Digest and send; a failure is kept for ``finish``."""
        assert self._transport is not None
        try:
            if self._config.verify != "none":
                with self._phase("pack"):
                    self._digests.add(bucket)
            with self._phase("send"):
                self._transport.send(bucket, handles)
            self._num_buckets += 1
            self.sent_bytes += sum(slot.size_bytes for slot in bucket.layout.slots)
        except WeightcastError as error:
            self._failure = error

    # -- verify, commit

    def finish(self) -> _Decision:
        """Drain, verify, commit."""
        assert self._transport is not None
        try:
            if self._failure is not None:
                raise self._failure
            with self._phase("send"):
                self._transport.drain()
            with self._phase("verify"):
                received, kept = self._digests.finish() if self._config.verify != "none" else ({}, {})
                self._each(lambda link: self._close_one(link, received))
            self._sent_digest = model_digest(received) if received else None
            with self._phase("commit"):
                self._each(lambda link: self._commit_one(link, kept))
        except WeightcastError as error:
            return self._fail(error)
        self._phases["load"] = max(link.load_s for link in self._links)
        self._phases["verify"] = self._phases.get("verify", 0.0) + max(link.verify_s for link in self._links)
        wants_score = self._config.verify == "behaviour"
        if wants_score and hasattr(self._exporter, "logprobs"):
            return _Decision(score=True)
        if wants_score:
            for link in self._links:
                self._outcomes[link.url].message = "this exporter has no forward pass; proof stops at resident"
        return _Decision(report=self._report())

    def compare(self, tokens: Sequence[int], mine: Sequence[float]) -> _Decision:
        """Do the engines' log-probabilities agree with the trainer's?"""
        tolerance = self._config.behaviour_tolerance
        for link in self._links:
            outcome = self._outcomes[link.url]
            try:
                request = link.adapter.score_request(tokens)
                reply = link.client.post_json(request.path, request.body, timeout_s=self._config.timeout_s)
                theirs = msgspec.json.decode(reply, type=dict[str, list[float]])["logprobs"]
                off = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
            except (WeightcastError, msgspec.MsgspecError, KeyError, ValueError) as error:
                outcome.message = f"could not compare behaviour: {error}"
                continue
            if off <= tolerance:
                outcome.proof = "behaviour"
                outcome.message = f"log-probabilities agree within {off:.2g}"
            else:
                failed = VerificationFailed(
                    f"{link.url} keeps what was sent, but answers otherwise: log-probabilities are off by {off:.3g} "
                    f"(tolerance {tolerance:g})",
                    url=link.url,
                    names=(),
                    hint="the engine computes with something else than its parameters: packed copies, a stale graph",
                )
                outcome.failed = failed
                outcome.message = str(failed)
        bad = [outcome.failed for outcome in self._outcomes.values() if isinstance(outcome.failed, VerificationFailed)]
        report = self._report()
        if bad and self._config.on_failure == "raise":
            return _Decision(error="UpdateFailed", text=str(bad[0]), hint=bad[0].hint, report=report)
        return _Decision(report=report)

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
        for client in self._clients.values():
            client.close()

    def _fail(self, error: WeightcastError) -> _Decision:
        """End every session, find out what each target serves, decide how to go on."""
        self._failure = error
        self.give_up(str(error))
        culprits = self._culprits(error)
        for url in culprits:
            self._outcomes[url].failed = error
        active = [link.url for link in self._links]
        self._excluded |= culprits
        remaining = [url for url in active if url not in self._excluded]
        nothing_committed = not any(link.committed for link in self._links)
        if self._config.on_failure == "quarantine" and culprits and remaining and nothing_committed:
            return _Decision(again=True)
        if not self._links:
            return _decide_error(error)
        report = self._report()
        text = f"update to version {self._version} failed: {error}"
        if self._config.on_failure == "quarantine" and any(row.status == "serving" for row in report.targets):
            return _Decision(report=report)
        return _Decision(error="UpdateFailed", text=text, hint=error.hint, report=report)

    def _culprits(self, error: WeightcastError) -> set[str]:
        url = getattr(error, "url", None) or getattr(error, "who", None)
        if isinstance(url, str) and url in self._outcomes:
            return {url}
        infos = self._probe_all(only=[link.url for link in self._links])
        gone = {url for url, info in infos.items() if not isinstance(info, EngineInfo) or info.state == "quarantined"}
        return gone

    def _abort_all(self, reason: str) -> None:
        open_links = [link for link in self._links if link.session]
        if not open_links:
            return
        with ThreadPoolExecutor(max_workers=len(open_links)) as pool:
            list(pool.map(Link.abort, open_links, [reason] * len(open_links)))

    def _probe_all(self, only: Sequence[str] | None = None) -> dict[str, EngineInfo | WeightcastError]:
        urls = [target.url for target in self._targets if only is None or target.url in only]

        def ask(url: str) -> EngineInfo | WeightcastError:
            try:
                return probe(self._clients[url])
            except WeightcastError as error:
                return error

        with ThreadPoolExecutor(max_workers=max(1, len(urls))) as pool:
            return dict(zip(urls, pool.map(ask, urls), strict=True))

    def _make_links(self, infos: Mapping[str, EngineInfo | WeightcastError]) -> list[Link]:
        links: list[Link] = []
        first: WeightcastError | None = None
        for url, info in infos.items():
            if url in self._excluded:
                continue
            outcome = self._outcomes[url]
            if not isinstance(info, EngineInfo):
                if self._config.on_failure == "raise":
                    raise info
                self._excluded.add(url)
                outcome.failed = first = info
                outcome.status = "quarantined"
                continue
            outcome.info = info
            outcome.before = info.version
            links.append(Link(client=self._clients[url], adapter=NativeAdapter(), info=info))
        if not links:
            raise first or ConfigError("no target is active")
        return links

    def _connect_transport(self) -> None:
        """Groups and buffers live as long as the membership; an engine that came back is another member."""
        signature = tuple(
            (link.url, tuple((rank.pid, rank.device) for rank in link.info.ranks)) for link in self._links
        )
        if self._transport is not None and signature == self._signature:
            self._transport.use(self._links)
            return
        if self._transport is not None:
            self._transport.close()
        if self._name == "ipc":
            self._transport = IpcTransport(self._links, timeout_s=self._config.timeout_s)
        else:
            host = self._config.rendezvous_host or self._address()
            self._transport = BroadcastTransport(
                self._links, device=self._exporter.device, host=host, timeout_s=self._config.timeout_s
            )
        self._signature = signature

    def _address(self) -> str:
        """Address under which every target can reach this process."""
        addresses = {local_address_towards(link.client.target.host, 80) for link in self._links}
        outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
        return sorted(outside or addresses)[0]

    def _open_message(self, version: int, specs: tuple[TensorSpec, ...]) -> Open:
        config = self._config
        return Open(
            session=secrets.token_hex(16),
            owner=Owner(host=socket.gethostname(), pid=os.getpid()),
            version=version,
            allow_older=config.allow_older,
            timeout_s=config.timeout_s,
            lease_s=config.timeout_s * _PATIENCE,
            pause=config.pause,
            verify=config.verify,
            digest=config.digest,
            specs=specs,
        )

    def _check_fits(self, url: str, info: EngineInfo) -> None:
        theirs = {spec.name: spec for spec in NativeAdapter().specs(info)}
        if not theirs:
            return
        ours = {spec.name: spec for spec in self._specs}
        problems = [f"missing {name}" for name in theirs if name not in ours]
        problems += [f"unknown to the engine: {name}" for name in ours if name not in theirs]
        for name, spec in ours.items():
            want = theirs.get(name)
            if want is not None and want.shape != spec.shape:
                problems.append(f"{name} has shape {spec.shape}, the engine's has {want.shape}")
            elif want is not None and want.torch_dtype.is_floating_point != spec.torch_dtype.is_floating_point:
                problems.append(f"{name} is {spec.dtype}, the engine's is {want.dtype}")
        if problems:
            more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
            raise ConfigError(
                f"these weights do not fit {url} ({info.model}): {'; '.join(problems[:6])}{more}",
                hint="is it a checkpoint of the model that this engine serves?",
            )

    def _each(self, do: Callable[[Link], object]) -> None:
        """The same on every link at once; the first failure, after all have ended."""
        with ThreadPoolExecutor(max_workers=len(self._links)) as pool:
            futures = [pool.submit(do, link) for link in self._links]
        for future in futures:
            future.result()

    def _close_one(self, link: Link, received: Mapping[str, str]) -> None:
        ack = link.close(buckets=self._num_buckets, timeout_s=self._config.timeout_s)
        outcome = self._outcomes[link.url]
        if self._config.verify == "none":
            return
        wrong = [name for name, digest in received.items() if ack.received.get(name) != digest]
        if wrong or ack.mismatched or ack.received_ranks != link.info.tp_size:
            names = wrong or list(ack.mismatched)
            raise VerificationFailed(
                f"{link.url} received something else than was sent: {', '.join(names[:6])} "
                f"({ack.received_ranks} of {link.info.tp_size} ranks agree)",
                url=link.url,
                names=names,
                hint="nothing was switched; a bit flipped on the way, or a buffer was reused too early",
            )
        outcome.proof = "received"
        outcome.matched = ack.received_ranks
        outcome.digest = model_digest(ack.received)

    def _commit_one(self, link: Link, kept: Mapping[str, Mapping[str, str]]) -> None:
        outcome = self._outcomes[link.url]
        expected: dict[str, str] = {}
        if self._config.verify in ("resident", "behaviour"):
            assert link.closed is not None
            unproven = set(link.closed.unproven)
            expected = {spec.name: kept[spec.name][spec.dtype] for spec in link.info.specs if spec.name not in unproven}
        ack = link.commit(expected, timeout_s=self._config.timeout_s + 10.0)
        outcome.status = "serving"
        outcome.version_after = ack.version
        outcome.stall_s = ack.stall_s
        outcome.not_updated = ack.not_updated
        outcome.peak_extra_bytes = link.peak_extra_bytes
        if expected:
            wrong = [name for name, digest in expected.items() if ack.resident.get(name) != digest]
            if wrong:
                outcome.status = "quarantined"
                raise VerificationFailed(
                    f"{link.url} keeps something else than was sent: {', '.join(wrong[:6])}", url=link.url, names=wrong
                )
            outcome.proof = "resident"
            outcome.matched = ack.resident_ranks
            outcome.digest = model_digest(ack.resident)
            if ack.unproven:
                outcome.message = f"{len(ack.unproven)} tensors cannot be read back, {ack.unproven[0]} among them"

    def _report(self) -> UpdateReport:
        rows = tuple(self._row(url, outcome) for url, outcome in self._outcomes.items())
        phases = {name: round(seconds, 6) for name, seconds in self._phases.items()}
        phases["stall"] = max((row.stall_s for row in rows), default=0.0)
        return UpdateReport(
            version=self._version,
            transport=self._name,
            bytes=total_bytes(self._specs),
            buckets=self._num_buckets,
            seconds=time.monotonic() - self._started,
            phases=phases,
            peak_extra_bytes=0,
            digest=self._sent_digest,
            targets=rows,
        )

    def _row(self, url: str, outcome: _Outcome) -> TargetReport:
        info = outcome.info
        status, after, message = outcome.status, outcome.version_after, outcome.message
        if status != "serving":
            now = self._probe_all(only=[url])[url]
            if isinstance(now, EngineInfo):
                status = "quarantined" if now.state == "quarantined" else status
                after = now.version
                message = message or now.message
            else:
                status = "quarantined"
                message = message or str(now)
            if outcome.failed is not None:
                message = str(outcome.failed)
        return TargetReport(
            url=url,
            engine=info.engine if info is not None else "unknown",
            version_before=outcome.before,
            version_after=after,
            digest=outcome.digest if status == "serving" else None,
            status=status,
            proof=outcome.proof if status == "serving" else "none",
            ranks=info.tp_size if info is not None else 0,
            digests_matched=outcome.matched if status == "serving" else 0,
            stall_s=outcome.stall_s,
            peak_extra_bytes=outcome.peak_extra_bytes,
            not_updated=outcome.not_updated,
            message=message,
        )

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_phase(name, time.monotonic() - started)


def _decide_error(error: WeightcastError) -> _Decision:
    return _Decision(error=type(error).__name__, text=str(error), hint=error.hint)


def _rebuild(decision: _Decision) -> WeightcastError:
    """The head's error, on every rank."""
    if decision.error == "UpdateFailed":
        assert decision.report is not None
        return UpdateFailed(decision.text, report=decision.report, hint=decision.hint)
    kind = getattr(errors, decision.error)
    if issubclass(kind, TargetError):
        return kind(decision.text, url=decision.text.split(" ", 1)[0].rstrip(":"), hint=decision.hint)
    if issubclass(kind, (DeadlineExceeded, VerificationFailed)):
        return WeightcastError(decision.text, hint=decision.hint)
    return cast(WeightcastError, kind(decision.text, hint=decision.hint))
