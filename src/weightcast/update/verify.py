"""Compares digests and log-probabilities of the trainer with those of the engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightcast.comm.run_steps import converse_on_loop
from weightcast.digest.definition import unequal
from weightcast.digest.sent import Sent, SentDigests, gathered_otherwise
from weightcast.digest.source_sums import AllSums
from weightcast.errors import ConfigError, TargetRejected, TargetUnreachable, VerificationFailed, WeightcastError
from weightcast.protocols import Exporter
from weightcast.transports.blame import raise_together, run_each, try_each
from weightcast.transports.link import Link
from weightcast.update.finite import FiniteCheck, checks_finite
from weightcast.update.members import Members
from weightcast.update.prepare import SendPlan
from weightcast.update.roster import Roster
from weightcast.update.sessions import commit_again
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec


class WeightsChanged(ConfigError):
    """The weights are not those that engines were to be brought to."""


class Verifier:
    """The digests of one update, and the comparisons with each target's answers."""

    def __init__(self, members: Members, exporter: Exporter) -> None:
        self._members = members
        self._config = members.config
        self._exporter = exporter
        self._unsummed = tuple(exporter.unsummed())
        self._unsummed_names = frozenset(self._unsummed)
        self._finite = FiniteCheck()
        self._digests = SentDigests()
        self._sources: Sequence[torch.Tensor] = ()
        self._sent = Sent()
        self._served = Sent()
        self._must_be: str | None = None

    @property
    def _wants_resident(self) -> bool:
        return self._config.verify in ("resident", "behaviour")

    @property
    def unsummed(self) -> tuple[str, ...]:
        """Names of tensors whose sources the trainer ranks cannot sum; empty without verification."""
        return self._unsummed if self._config.verify != "none" else ()

    @property
    def digest(self) -> str | None:
        """Model digest of everything sent; None before ``compare_received``.

        It is computed on demand.  The engines would wait for it if it were computed before they switch.
        """
        return self._sent.digest if self._sent else None

    def served(self) -> float | None:
        """Notes that targets serve what was sent; returns ``UpdateReport.changed_ratio``."""
        changed, self._served = self._sent.changed_from(self._served), self._sent
        return changed

    def prepare(self, plan: SendPlan, links: Sequence[Link]) -> None:
        """Works out what checking updates by this plan takes."""
        device, kept = self._exporter.device, _kept(links)
        if not self._members.plan.scattered and checks_finite(self._config, device):
            for layout in plan.tables.layouts:
                plan.finite.prepare(layout)
        if self._config.verify == "none":
            return
        casts = plan.casts(kept)
        casts.prepare(plan.tables.layouts, device)
        if casts or self._unsummed or _mute(links):
            plan.sums.prepare(device)
        totals = plan.sums.prepare_totals()
        for table in {id(table): table for table in kept}.values():
            totals.digest_of_sent(table)

    def begin(self, must_be: str | None = None) -> None:
        """Starts a new update; ``must_be`` is the model digest that the weights must have, if they must."""
        self._sent, self._must_be = Sent(), must_be

    def open(self, plan: SendPlan, links: Sequence[Link]) -> bool:
        """Prepares an attempt; True if ranks with a bucket must sum it, as an engine cannot say what it received."""
        mute = _mute(links)
        self._finite = plan.finite
        self._digests = SentDigests(
            plan.casts(_kept(links)) if self._config.verify != "none" else None,
            sums=plan.sums,
            unsummed=self._unsummed_names,
            every=mute,
        )
        self._sources = ()
        return mute and self._config.verify != "none"

    def add(self, bucket: Bucket) -> None:
        """Digests a bucket before it is sent, so a bit that flips later cannot go unseen; may raise NotFinite."""
        if not self._members.plan.scattered and checks_finite(self._config, bucket.data.device):
            self._finite.check(bucket)
        if self._config.verify != "none":
            self._digests.add(bucket)

    def expect(self, layouts: Sequence[BucketLayout]) -> None:
        """Takes buckets that trainer ranks send by themselves, in the place of ``add``."""
        if self._config.verify != "none":
            self._digests.expect(layouts)

    def finish(self, sums: AllSums) -> Sent:
        """Compares the buckets with the trainer ranks' shards; returns the digests of what was sent, if it verifies."""
        self._sources = sums.sources
        return self._digests.finish(self._sources, sums.buckets) if self._config.verify != "none" else Sent()

    def release(self) -> None:
        """Frees the memory that the digests took."""
        self._digests.release()

    def check_tried(self, version: int, tried: Mapping[int, str | None]) -> None:
        """Raises WeightsChanged if engines may have switched to other weights under this number, however that ended."""
        digest = self.digest
        if version not in tried or (digest is not None and digest == tried[version]):
            return
        words = "with other weights" if digest is not None else "and no digest says whether with these weights"
        raise WeightsChanged(
            f"version {version} was sent before, {words}: engines may have served it",
            hint=f"call update() without a number, which counts on, or update(version={max(tried) + 1})",
        )

    def close_all(self, sent: Sent, links: Sequence[Link], version: int) -> None:
        """Tells every target that everything was sent, and compares what each has received.

        It raises ConfigError if the weights are not those of the version that targets were to be brought to, else the
        errors of targets that received something else.
        """
        told: dict[str, Any] = {"buckets": self._members.carriers.num_buckets, "timeout_s": self._config.timeout_s}
        # A target that knew the number of buckets closed with the last one.
        run_each(lambda link: link.close(**told), [link for link in links if link.session.closed is None])
        self._sent = sent
        # One version with two sets of weights is what versions are there to prevent.
        if self._must_be is not None and self.digest != self._must_be:
            raise WeightsChanged(
                f"the weights are no longer those of version {version}: no engine can be brought in at it",
                hint="call retarget() before training goes on, or leave it to the next update()",
            )
        asked = [link for link in links if sent and "received" in link.adapter.proves]
        wrong: list[Link] = []
        for link in asked:
            ack = _closed(link)
            if ack.digest == sent.digest_arrived(link.info.specs) and not ack.mismatched:
                link.outcome.received(ack, sent)
            else:
                wrong.append(link)
        if wrong:
            unanswered = try_each(lambda link: link.close(**told, by_name=True), wrong)
            raise_together(self._blame(dict(zip(wrong, unanswered, strict=True)), asked, sent))

    def _blame(
        self, wrong: Mapping[Link, BaseException | None], asked: Sequence[Link], sent: Sent
    ) -> Sequence[BaseException]:
        """Returns one error for the gather if the gather is at fault, else one error for each target.

        Those that are ``wrong`` were asked again, by name; they have what kept them from answering.
        """
        unanswered = [error for error in wrong.values() if error is not None]
        gathers, scattered = self._members.gathers, self._members.plan.scattered
        acks = {link: _closed(link) for link, error in wrong.items() if error is None}
        differing = [_received_otherwise(link, ack, sent, gathers=gathers) for link, ack in acks.items()]
        if differing:
            names = differing[0].names
            lying = [] if scattered else self._digests.lying_otherwise(names, self._sources)  # no buffer is whole then
            if lying:
                return [gathered_otherwise(lying, "the bucket of trainer rank 0")]
            received = [ack.received.get(name) for ack in acks.values() for name in names]
            alike = received == received[: len(names)] * len(acks) and None not in received
            mismatched = any(ack.mismatched for ack in acks.values())
            if alike and not mismatched and len(acks) == len(asked) > 1 and len(self._members.plan.receivers) == 1:
                return [gathered_otherwise(names, f"what all {len(acks)} engines received alike")]
        return [*unanswered, *differing]

    async def commit(self, link: Link, sent: Sent, roster: Roster) -> None:
        """Commits one target, and compares the weights that it keeps with those that were sent."""
        if link.adapter.sees_change:
            before = link.start.digest
            link.adapter.expect_change(before is not None and bool(sent) and before != self.digest)
        proves = self._wants_resident and "resident" in link.adapter.proves
        digest = sent.digest_kept(link.info.specs) if proves else ""
        try:
            ack = await link.commit(digest, timeout_s=self._config.timeout_s)
        except (TargetRejected, TargetUnreachable):
            raise  # the target has not switched
        except WeightcastError as error:
            ack = await commit_again(link, roster, error, timeout_s=self._config.timeout_s)
        self.compare_kept(link, ack, digest)

    def compare_kept(self, link: Link, ack: Ack, digest: str) -> None:
        """Compares the weights that a target keeps with those that were sent; VerificationFailed if they differ.

        ``ack`` answers Commit.  ``digest`` is that of all tensors together; empty for no proof.
        """
        outcome = link.outcome
        outcome.message = ack.message
        if digest and ack.digest != digest:
            raise VerificationFailed(
                f"{link.url} keeps something else than was sent: the digest of all is {ack.digest or 'missing'} there, "
                f"and {digest} here",
                url=link.url,
                names=(),
            )
        if digest:
            outcome.resident(ack, digest)
        level = "resident" if self._wants_resident else self._config.verify
        if level != "none" and level not in link.adapter.proves and self._config.verify != "behaviour":
            can = 'it answers with log-probabilities: verify="behaviour"'
            outcome.add(f"{link.info.engine} cannot prove that the new weights are {level}; {can}")

    def not_compared(self, link: Link, why: str) -> None:
        """Notes why a target's behaviour could not be compared; where the caller is ``strict``, the target fails."""
        outcome = link.outcome
        if not self._config.strict:
            outcome.add(why)
            return
        outcome.uncompared = True
        outcome.failed = VerificationFailed(
            f"{link.url} has no proof of behaviour, and strict=True asks for it: {why}",
            url=link.url,
            names=(),
            hint='mend what it names, or leave strict out (--strict), or write verify="resident"',
        )

    def wants_score(self, links: Sequence[Link]) -> bool:
        """True if log-probabilities are to be compared; notes it where they should be and cannot."""
        if self._config.verify != "behaviour":
            return False
        for link in () if self._exporter.scores else links:
            link.outcome.add("this exporter has no forward pass, so behaviour could not be compared")
        return self._exporter.scores

    def compare(self, links: Sequence[Link], tokens: Sequence[int], mine: Sequence[float], why_not: str) -> None:
        """Compares the targets' log-probabilities with the trainer's; ``why_not`` says why it has none, else empty."""
        if not why_not:
            run_each(lambda link: self.compare_scores(link, tokens, mine), links)
        for link in links if why_not else ():
            self.not_compared(link, why_not)

    async def compare_scores(self, link: Link, tokens: Sequence[int], mine: Sequence[float]) -> None:
        """Compares a target's log-probabilities with the trainer's; its outcome takes the result."""
        outcome, tolerance = link.outcome, self._config.behaviour_tolerance
        try:
            theirs = await converse_on_loop(link.client, link.adapter.score(tokens), timeout_s=self._config.timeout_s)
            apart = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        except (WeightcastError, ValueError) as error:
            self.not_compared(link, f"could not compare behaviour: {error}")
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


def _mute(links: Sequence[Link]) -> bool:
    """True if one of the engines cannot say what it received."""
    return any("received" not in link.adapter.proves for link in links)


def _closed(link: Link) -> Ack:
    """A target's answer to Close."""
    ack = link.session.closed
    assert ack is not None
    return ack


def _kept(links: Sequence[Link]) -> list[Sequence[TensorSpec]]:
    """The tensors of each engine that can prove something, with the dtypes that it keeps."""
    return [link.info.specs for link in links if link.adapter.proves]


def _received_otherwise(link: Link, ack: Ack, sent: Sent, *, gathers: bool) -> VerificationFailed:
    """Returns the error for a target that received something else; no target has switched.

    ``ack`` answers Close by name.  ``gathers`` says that buckets are gathered from several trainer ranks, so that the
    gather may be at fault.
    """
    names = unequal(sent.arrived(link.info.specs), ack.received) or list(ack.mismatched)
    ranks = sorted({rank for name in names for rank in ack.suspects.get(name, range(ack.ranks))})
    some_ranks = f"rank {', '.join(map(str, ranks))} of {ack.ranks}"
    whom = some_ranks if len(ranks) < ack.ranks else f"any of {ack.ranks} ranks"
    what = "the trainer ranks hold" if gathers else "was sent"
    where = "; the gather among trainer ranks or the transfer to this engine is at fault" if gathers else ""
    return VerificationFailed(
        f"{link.url} received something else than {what}: {', '.join(names[:6])} (on {whom}){where}",
        url=link.url,
        names=names,
        hint="no engine has switched; a bit flipped in the transfer, or a buffer was reused too early",
    )


def check_alike(links: Sequence[Link]) -> None:
    """Checks that engines with the same weights before the update have the same weights after it.

    It compares the engines' own checksums, which are comparable only among engines of one kind, version and size.  So
    it finds an engine that has not loaded what the others have, but no error that all of them share.  It raises
    VerificationFailed, or TargetsFailed for several.
    """
    alike: dict[tuple[str, int, str], tuple[Link, str]] = {}
    wrong = list[VerificationFailed]()
    for link in links:
        opened, committed = link.session.opened, link.session.committed
        if opened is None or committed is None or not opened.checksum or not committed.checksum:
            continue
        first, after = alike.setdefault(
            (link.info.engine, link.info.tp_size, opened.checksum), (link, committed.checksum)
        )
        if committed.checksum != after:
            words = f"{link.url} and {first.url} had the same weights before this update and have different ones now"
            hint = "one of the two has not loaded what was sent: their own checksums of all weights differ"
            wrong.append(VerificationFailed(words, url=link.url, names=(), hint=hint))
    raise_together(wrong)
