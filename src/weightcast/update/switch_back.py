"""Switches targets back to the version before, after an update that fails once some of them have switched."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors import TargetError, TargetRejected, VerificationFailed, WeightcastError
from weightcast.transports.blame import try_each
from weightcast.transports.link import Link


def switch_back(links: Sequence[Link], *, version: int, reason: str, timeout_s: float) -> str:
    """Switches back every target that has switched, and notes in its outcome what came of it.

    ``version`` is the one that the update was to bring; ``timeout_s`` limits one answer.  Returns a clause for the
    error's text; empty if no target had switched.
    """
    # Old weights would not mend an engine that computes otherwise than the trainer.
    switched = [link for link in links if link.session.committed is not None and not link.outcome.answers_otherwise]
    if not switched:
        return ""
    errors = try_each(lambda link: _revert(link, version, reason, timeout_s), switched)
    back = [link.url for link, error in zip(switched, errors, strict=True) if error is None]
    stay = [link.url for link, error in zip(switched, errors, strict=True) if error is not None]
    if not back:
        return f"; {', '.join(stay)} had switched by then and could not be switched back"
    for link, error in zip(switched, errors, strict=True):
        if error is None:
            continue
        if not isinstance(error, WeightcastError):
            raise error
        outcome = link.outcome
        outcome.ahead = not outcome.in_doubt
        outcome.failed = outcome.failed or error
    words = f"; switched back to the version before: {', '.join(back)}"
    return f"{words}; could not be switched back: {', '.join(stay)}" if stay else words


async def _revert(link: Link, version: int, reason: str, timeout_s: float) -> None:
    """Switches one target back and compares its weights with those that it served before."""
    before, outcome = link.info, link.outcome
    if not link.can_revert:
        raise TargetError(
            f"{link.url} serves version {version} and cannot go back: {before.engine} keeps no second set of weights",
            url=link.url,
            hint="send it a full update",
        )
    try:
        ack = await link.revert(reason, timeout_s=timeout_s)
    except TargetRejected as error:
        raise TargetError(
            f"{link.url} could not be switched back from version {version}: {error}",
            url=link.url,
            hint="send it a full update",
        ) from error
    except WeightcastError as error:
        outcome.in_doubt = True
        outcome.failed = outcome.failed or error
        raise
    digest = ack.digest or None
    if ack.version != before.version or (before.digest is not None and digest != before.digest):
        raise VerificationFailed(
            f"{link.url} was switched back and has version {ack.version} with the digest {digest}; before the "
            f"update it had version {before.version} with the digest {before.digest}",
            url=link.url,
            names=(),
            hint="send it a full update",
        )
    outcome.reverted = ack
    proof = f"its digest is {digest} again" if before.digest is not None else "no digest of it was known before"
    outcome.add(f"switched back to version {before.version}; {proof}")
