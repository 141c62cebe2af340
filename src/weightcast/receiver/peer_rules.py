"""Rules for copies from a peer engine: what may be read, what may be fetched, and what may be switched to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weightcast.digest.definition import model_digest
from weightcast.errors import Refused, some
from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.open_session import OpenSession
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Fetch, ReadChunk


def check_readable(message: ReadChunk, engine: EngineState, ranks: int, *, writing: bool) -> None:
    """Refuses to give weights that the engine does not serve, never proved or may be writing, or of a rank it lacks."""
    if message.rank >= ranks:
        raise Refused(
            f"there is no rank {message.rank}: this engine has {ranks}", hint="copy from an engine of its size"
        )
    if engine.state == "quarantined":
        raise Refused(f"this engine is quarantined: {engine.message}", hint="copy from another engine")
    if writing:
        raise Refused("an update writes into the live weights", hint="try again when it has finished")
    if (engine.version, engine.digest) != (message.version, message.digest):
        raise Refused(
            f"this engine serves version {engine.version} with the digest {engine.digest or 'not proven'}, "
            f"not version {message.version} with the digest {message.digest}",
            hint="start again with the version that it serves now",
        )


def check_fetch(message: Fetch, session: OpenSession) -> None:
    """Refuses a chunk that is not the session's next one, or whose session gets its weights otherwise."""
    opened = session.open
    if session.fetched is None and session.buckets:
        raise Refused("this session gets its weights from a trainer, not from a peer")
    if opened.verify not in ("resident", "behaviour"):
        raise Refused(f"a copy from a peer must be proven, and this session asks for verify={opened.verify!r}")
    first = session.fetched or message
    if (message.peer, message.version, message.digest) != (first.peer, opened.version, first.digest):
        raise Refused(f"this session copies version {opened.version} from {first.peer.url} only")
    if session.closed or message.index != session.buckets:
        raise Refused(f"chunk {message.index} came where chunk {session.buckets} was due")


def check_fetched(session: OpenSession, asked: str, specs: Sequence[TensorSpec], unproven: Collection[str]) -> None:
    """Refuses to switch to fetched weights whose digests do not add up to the peer's.  Fine for other sessions.

    ``asked`` is the model digest in Commit; ``unproven`` names the tensors that this engine cannot read back.
    """
    fetched = session.fetched
    if fetched is None:
        return
    waiting = digest_of(session.received, specs)
    if unproven or not waiting == asked == fetched.digest:
        raise Refused(
            f"what was copied from {fetched.peer.url} has the digest {waiting or 'of an incomplete model'}, and the "
            f"peer proved {fetched.digest} for version {fetched.version}",
            hint="nothing was switched; copy again",
        )


def check_computed(computed: Collection[str]) -> None:
    """Refuses a rank whose model computes with weights, and names them: parameters alone do not prove those."""
    if computed:
        raise Refused(
            f"this model computes with {some(sorted(computed))} while it loads, so a copy of them cannot be proven",
            hint="send the engine a full update from the trainer",
        )


def digest_of(digests: Mapping[str, str], specs: Sequence[TensorSpec]) -> str:
    """Model digest of an engine's tensors; empty if the digest of one is unknown."""
    names = [spec.name for spec in specs]
    if any(name not in digests for name in names):
        return ""
    return model_digest({name: digests[name] for name in names})
