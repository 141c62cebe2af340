"""Copies the weights that one engine serves into another engine, which came late or back, without the trainer.

The ranks of the late engine read from the ranks of the peer.  This process sends the messages and moves no weights.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec

from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.config import PauseChoice, Target
from weightcast.digest.definition import unequal
from weightcast.errors import (
    ConfigError,
    DeadlineExceeded,
    TargetLost,
    TargetsFailed,
    TargetUnreachable,
    VerificationFailed,
    WeightcastError,
)
from weightcast.transports.link import Link
from weightcast.transports.preflight import choose_pause
from weightcast.update.recognise import recognise
from weightcast.wire.answers import Ack
from weightcast.wire.codec import decode_ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Fetch, Open, Owner, PeerEngine
from weightcast.wire.plans import UpdateTables

log = logging.getLogger("weightcast.update.peer_copy")

_LEASE_TIMES = 4
_NAMES = 8


class PeerCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a copy from a peer.

    Attributes:
        url: The engine that was brought to the version.
        peer: The engine that the weights came from.
        engine: Kind and version of both.
        version_before: Version before; None if unknown.
        version: Version that the engine serves now.
        digest: Model digest that the engine's weights have and the peer's had.
        chunks: Number of chunks of the largest rank; 0 if the engine served the version already.
        proven: Number of tensors that were read back.
        ranks: Number of the engine's ranks.
        not_updated: Names of the engine's tensors that a copy does not write.
        seconds: Wall time.
        stall_s: Time in which the engine generated nothing, in seconds.
        attempts: Number of attempts; more than one if the peer was updated meanwhile.
        passed_over: The reason why each peer that was tried before gave nothing.
    """

    url: str
    peer: str
    engine: str
    version_before: int | None
    version: int
    digest: str
    chunks: int = 0
    proven: int = 0
    ranks: int = 0
    not_updated: tuple[str, ...] = ()
    seconds: float = 0.0
    stall_s: float = 0.0
    attempts: int = 1
    passed_over: tuple[str, ...] = ()


def copy_from_peer(
    target: Target,
    peer: Target | Sequence[Target],
    *,
    pause: PauseChoice = "auto",
    timeout_s: float = 120.0,
    attempts: int = 3,
) -> PeerCopy:
    """Brings an engine to the version that a peer serves, and proves it.  The peer keeps generating.

    Of several peers, the next one is tried if one dies in the middle of a copy, refuses, or does not fit.

    The engine's ranks must reach the peer's URL.  An engine with staging serves its old version until the switch.

    Args:
        target: The engine that came late or back.
        peer: An engine of the same kind, version, model and sizes, whose weights are proven; or several, in the order
            in which they are tried.
        pause: Fate of the requests that run on ``target`` at the switch; as ``UpdateConfig.pause``.
        timeout_s: Deadline of each wait, in seconds.
        attempts: How often to start; a new attempt follows if the peer was updated during a copy.

    Raises:
        ConfigError: The two engines do not fit together, or the peer's weights are not proven.  Nothing has moved.
        TargetUnreachable, TargetRejected, TargetLost, DeadlineExceeded: An engine failed or refused; the text names
            it.  An engine with staging still serves its old version.
        VerificationFailed: What was copied differs from the peer's weights; nothing was switched.
        TargetsFailed: Each of several peers failed; ``failures`` has one of these errors for each.
    """
    if attempts < 1:
        raise ConfigError(f"attempts={attempts}: at least one is needed")
    peers = (peer,) if isinstance(peer, Target) else tuple(peer)
    if not peers:
        raise ConfigError(f"no peer of {target.url} was named", hint="name an engine of its kind, model and size")
    failures: list[WeightcastError] = []
    for one in peers:
        try:
            done = _from_one(target, one, pause, timeout_s, attempts)
            return msgspec.structs.replace(done, passed_over=tuple(map(str, failures)))
        except WeightcastError as error:
            if len(peers) == 1 or _is_gone(target, error):
                raise
            log.warning("%s got nothing from its peer %s: %s", target.url, one.url, error)
            failures.append(error)
    raise TargetsFailed(failures)


def _is_gone(target: Target, error: WeightcastError) -> bool:
    """True if the late engine itself does not answer, so that no other peer would help."""
    if isinstance(error, DeadlineExceeded):
        return error.who == target.url
    return isinstance(error, TargetUnreachable | TargetLost) and error.url == target.url


def _from_one(
    target: Target,
    peer: Target,
    pause: PauseChoice,
    timeout_s: float,
    attempts: int,
) -> PeerCopy:
    """Copies from one peer; raises as ``copy_from_peer``."""
    began = time.monotonic()
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(one, timeout_s=timeout_s))) for one in (target, peer)]
        for attempt in range(1, attempts + 1):
            late, giver = (recognise(client) for client in clients)
            digest, version = _check(target.url, late, peer.url, giver)
            found = PeerCopy(
                url=target.url,
                peer=peer.url,
                engine=late.engine,
                version_before=late.version,
                version=version,
                digest=digest,
                ranks=late.tp_size,
                seconds=time.monotonic() - began,
                attempts=attempt,
            )
            if (late.state, late.version, late.digest) == ("serving", version, digest):
                return found
            copy = _CopyAttempt(clients[0], clients[1], late, version, digest, timeout_s)
            try:
                copy.transfer(pause)
                committed = copy.commit()
            except WeightcastError as error:
                copy.abort(error)
                if attempt == attempts or not copy.peer_moved_on():
                    raise
                continue
            return msgspec.structs.replace(
                found,
                chunks=copy.chunks,
                proven=len(late.specs),
                not_updated=committed.not_updated,
                seconds=time.monotonic() - began,
                stall_s=committed.stall_s,
            )
    raise AssertionError("unreachable")


class _CopyAttempt:
    """One attempt."""

    def __init__(
        self,
        client: Client,
        peer: Client,
        late: EngineInfo,
        version: int,
        digest: str,
        timeout_s: float,
    ) -> None:
        self.chunks = 0
        self._adapter = NativeAdapter(late)
        self._link = Link(client=client)
        self._link.meet(late, lambda _: self._adapter)
        self._peer = peer
        self._late = late
        self._version, self._digest = version, digest
        self._timeout_s = timeout_s

    def transfer(self, pause: PauseChoice) -> None:
        """Copies every chunk and compares what waits with what the peer proved."""
        opening = self._link.open(
            Open(
                session=secrets.token_hex(16),
                owner=Owner(host=socket.gethostname(), pid=os.getpid()),
                version=self._version,
                timeout_s=self._timeout_s,
                lease_s=_LEASE_TIMES * self._timeout_s,
                pause=choose_pause(self._link, pause),
                verify="resident",
                plan=UpdateTables(self._late.specs, ()),
            )
        )
        event_loop.run(opening)
        source = PeerEngine(url=self._peer.target.url, api_key=self._peer.target.api_key or "")
        while True:
            message = Fetch(
                session=self._link.session.id,
                index=self.chunks,
                peer=source,
                version=self._version,
                digest=self._digest,
            )
            ack = event_loop.run(self._link.ask("fetch", self._adapter.fetch(message), timeout_s=self._timeout_s))
            self.chunks += 1
            if ack.closed:
                self._compare(ack)
                return

    def commit(self) -> Ack:
        """Makes the copy live.  A lost answer is asked for again: the engine switches once."""
        try:
            ack = event_loop.run(self._link.commit(self._digest, timeout_s=self._timeout_s))
        except (TargetLost, DeadlineExceeded):
            ack = event_loop.run(self._link.commit_again(timeout_s=self._timeout_s))
        if (ack.version, ack.digest) != (self._version, self._digest):
            raise VerificationFailed(
                f"{self._link.url} says that it serves version {ack.version} with the digest {ack.digest}, after a "
                f"copy of version {self._version} with the digest {self._digest}",
                url=self._link.url,
                names=(),
                hint="send it a full update",
            )
        return ack

    def abort(self, error: WeightcastError) -> None:
        """Ends the session, if it is open."""
        event_loop.run(self._link.abort(str(error)))

    def peer_moved_on(self) -> bool:
        """True if the peer serves another proven version now than the one that this attempt copied."""
        try:
            now = recognise(self._peer)
        except WeightcastError:
            return False
        return now.state != "quarantined" and (now.version, now.digest) != (self._version, self._digest)

    def _compare(self, ack: Ack) -> None:
        """Refuses what waits unless it has the peer's digest."""
        if ack.digest == self._digest:
            return
        ack = event_loop.run(self._link.close(buckets=self.chunks, timeout_s=self._timeout_s, by_name=True))
        waiting = ack.received
        wrong = [*ack.mismatched, *(name for name in self._differing(waiting) if name not in ack.mismatched)]
        shown = ", ".join(wrong[:_NAMES]) or "its digest is another one"
        raise VerificationFailed(
            f"{self._link.url}: what was copied from {self._peer.target.url} differs from version {self._version} "
            f"there: {shown}; nothing was switched",
            url=self._link.url,
            names=wrong,
            hint="copy again; if it differs again, check the memory and the network of both hosts",
        )

    def _differing(self, waiting: dict[str, str]) -> list[str]:
        """Names of tensors that the peer keeps otherwise; all whose digest is missing if the peer cannot say."""
        try:
            served = decode_ack(self._peer.get_json("/weightcast/digests")).resident
        except WeightcastError:
            served = {}
        return unequal(served, waiting) if served else [s.name for s in self._late.specs if s.name not in waiting]


def _check(url: str, late: EngineInfo, peer_url: str, peer: EngineInfo) -> tuple[str, int]:
    """Returns the digest and version to copy; raises ``ConfigError`` if engines do not fit or nothing is proven."""
    for where, info in ((url, late), (peer_url, peer)):
        if not info.has_receiver:
            raise ConfigError(
                f"{where} is {info.engine} without our receiver, and only engines with it copy from each other",
                hint="send it a full update from the trainer",
            )
    if late.incarnation == peer.incarnation:
        raise ConfigError(f"{url} and {peer_url} are the same engine", hint="name another engine as the peer")
    if peer.state == "quarantined":
        raise ConfigError(f"the peer {peer_url} is quarantined: {peer.message}", hint="name another engine as the peer")
    if peer.version is None or not peer.digest:
        raise ConfigError(
            f"the peer {peer_url} has never proven what it serves",
            hint='copy from an engine that was updated with verify="resident"',
        )
    differences = _differences(late, peer)
    if differences:
        raise ConfigError(
            f"{url} cannot copy from {peer_url}, whose layout differs: {'; '.join(differences)}",
            hint="copy between engines of one kind, version, model and size, or send a full update from the trainer",
        )
    return peer.digest, peer.version


def _differences(late: EngineInfo, peer: EngineInfo) -> list[str]:
    """The differences between two engines by which their weights lie otherwise, in words."""
    found: list[str] = []
    if late.engine != peer.engine:
        found.append(f"it is {late.engine}, the peer is {peer.engine}")
    if late.sizes != peer.sizes:
        found.append(f"it has {late.sizes}, the peer has {peer.sizes}")
    ours, theirs = ({spec.name: spec for spec in info.specs} for info in (late, peer))
    names = [name for name in (*ours, *(n for n in theirs if n not in ours)) if ours.get(name) != theirs.get(name)]
    for name in names[:_NAMES]:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            found.append(f"only {'the peer' if one is None else 'it'} has {name}")
        else:
            found.append(f"{name} is {one.dtype} {list(one.shape)}, the peer's is {other.dtype} {list(other.shape)}")
    if len(names) > _NAMES:
        found.append(f"{len(names) - _NAMES} more tensors differ")
    return found
