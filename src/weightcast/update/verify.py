"""Compares digests and log-probabilities of the trainer with those of the engines."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch

from weightcast.comm.run_steps import converse_on_loop
from weightcast.config import UpdateConfig
from weightcast.digest.sent import Sent, SentDigests, gathered_otherwise
from weightcast.digest.source_sums import Folded
from weightcast.errors import ConfigError, TargetRejected, TargetUnreachable, VerificationFailed, WeightcastError
from weightcast.protocols import Exporter
from weightcast.transports.blame import raise_together, try_each
from weightcast.transports.link import Link
from weightcast.transports.outcome import Outcome, arrived, received_otherwise
from weightcast.transports.preflight import check_read_back
from weightcast.update.finite import FiniteCheck, checks_finite
from weightcast.update.members import Members
from weightcast.update.prepare import SendPlan
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import TensorSpec


class WeightsChanged(ConfigError):
    """The weights are not those that engines were to be brought to."""


class Verifier:
    """The digests of one update, and the comparisons with each target's answers."""

    def __init__(self, members: Members, config: UpdateConfig, exporter: Exporter, specs: Sequence[TensorSpec]) -> None:
        self._members = members
        self._config = config
        self._exporter = exporter
        self._unsummed = tuple(exporter.unsummed())
        self._unsummed_names = frozenset(self._unsummed)
        self._finite = FiniteCheck()
        self._digests = SentDigests()
        self._sources: Sequence[Folded] = ()
        self._sent = Sent()
        self._served = Sent()
        self._must_be: str | None = None

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
        device, kept = self._exporter.device, [link.info.specs for link in links]
        if not self._members.plan.scattered and checks_finite(self._config, device):
            for layout in plan.tables.layouts:
                plan.finite.prepare(layout)
        if self._config.verify == "none":
            return
        casts = plan.casts(kept)
        if self._config.verify in ("resident", "behaviour"):
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
        proven = self._config.verify in ("resident", "behaviour")
        mute = _mute(links)
        self._finite = plan.finite
        self._digests = SentDigests(
            plan.casts([link.info.specs for link in links]) if proven else None,
            sums=plan.sums,
            unsummed=None if mute else self._unsummed_names,
        )
        self._sources = ()
        return mute and self._config.verify != "none"

    def add(self, bucket: Bucket) -> None:
        """Digests a bucket before it is sent, so a bit that flips later cannot go unseen; may raise NotFinite."""
        if not self._members.plan.scattered and checks_finite(self._config, bucket.data.device):
            self._finite.check(bucket)
        if self._config.verify != "none":
            self._digests.add(bucket)

    def finish(self, sources: Sequence[Folded], buckets: Mapping[int, Sequence[torch.Tensor]]) -> Sent:
        """Compares the buckets with the trainer ranks' shards; returns the digests of everything sent, if it verifies.

        ``sources`` and ``buckets`` are those of ``SentDigests.finish``.
        """
        self._sources = sources
        return self._digests.finish(sources, buckets) if self._config.verify != "none" else Sent()

    def release(self) -> None:
        """Frees the memory that the digests took."""
        self._digests.release()

    def compare_received(
        self,
        sent: Sent,
        links: Sequence[Link],
        outcomes: Mapping[str, Outcome],
        *,
        version: int,
        close_by_name: Callable[[Link], Coroutine[Any, Any, Ack]],
    ) -> None:
        """Compares each target's answer to Close, which all have given, with what was sent.

        ``close_by_name`` asks a target again, for the digest of each tensor.  It raises ConfigError if the weights are
        not those of the version that targets were to be brought to, else the errors of targets that received something
        else.
        """
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
            ack = link.closed
            assert ack is not None
            if arrived(link, ack, sent, kept_only=self._members.plan.scattered):
                outcomes[link.url].received(ack, sent)
            else:
                wrong.append(link)
        if wrong:
            raise_together(self._blame(wrong, asked, sent, close_by_name))

    def _blame(
        self,
        wrong: Sequence[Link],
        asked: Sequence[Link],
        sent: Sent,
        close_by_name: Callable[[Link], Coroutine[Any, Any, Ack]],
    ) -> Sequence[BaseException]:
        """Returns one error for the gather if the gather is at fault, else one error for each target."""
        unanswered: list[BaseException] = []
        acks: list[Ack] = []
        differing: list[VerificationFailed] = []
        for link, error in zip(wrong, try_each(close_by_name, wrong), strict=True):
            if error is not None:
                unanswered.append(error)
                continue
            ack = link.closed
            assert ack is not None
            acks.append(ack)
            gathers = self._members.gathers
            differing.append(received_otherwise(link, ack, sent, gathers=gathers))
        if differing:
            names = differing[0].names
            scattered = self._members.plan.scattered  # then no buffer has whole tensors
            lying = [] if scattered else self._digests.lying_otherwise(names, self._sources)
            if lying:
                return [gathered_otherwise(lying, "the bucket of trainer rank 0")]
            received = [ack.received.get(name) for ack in acks for name in names]
            alike = received == received[: len(names)] * len(acks) and None not in received
            ranks = sum(ack.received_ranks for ack in acks)
            everybody = sum(link.info.tp_size for link in asked)
            if alike and ranks == everybody > 1 and len(self._members.plan.receivers) == 1:
                return [gathered_otherwise(names, f"what all {ranks} engine ranks received alike")]
        return [*unanswered, *differing]

    def check_opened(self, link: Link, ack: Ack) -> None:
        """Checks a target's answer to Open, or to the plan at ``connect``: as ``check_read_back``."""
        check_read_back(link, ack.unproven, self._config)

    async def commit(
        self, link: Link, outcome: Outcome, sent: Sent, ask_again: Callable[[WeightcastError], Awaitable[Ack]]
    ) -> None:
        """Commits one target, and compares the weights that it keeps with those that were sent.

        ``ask_again`` returns the answer of a target whose answer was lost, or raises.
        """
        wanted = self._config.verify in ("resident", "behaviour")
        proves = wanted and "resident" in link.adapter.proves
        if link.adapter.sees_change:
            link.adapter.expect_change(link.digest is not None and bool(sent) and link.digest != self.digest)
        specs, unproven = link.info.specs, frozenset[str](link.closed.unproven if link.closed is not None else ())
        proven = sum(spec.name not in unproven for spec in specs) if unproven else len(specs)
        digest = sent.digest_kept(specs, without=unproven) if proves and proven else ""
        try:
            ack = await link.commit(digest, timeout_s=self._config.timeout_s)
        except (TargetRejected, TargetUnreachable):
            raise  # the target has not switched
        except WeightcastError as error:
            ack = await ask_again(error)
        outcome.resident(link, ack, digest, proven)
        level = "resident" if wanted else self._config.verify
        if level != "none" and level not in link.adapter.proves and self._config.verify != "behaviour":
            can = 'it answers with log-probabilities: verify="behaviour"'
            outcome.add(f"{link.info.engine} cannot prove that the new weights are {level}; {can}")

    def not_compared(self, link: Link, outcome: Outcome, why: str) -> None:
        """Notes why a target's behaviour could not be compared; where the caller is ``strict``, the target fails."""
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

    async def compare_scores(self, link: Link, outcome: Outcome, tokens: Sequence[int], mine: Sequence[float]) -> None:
        """Compares a target's log-probabilities with the trainer's; the outcome takes the result."""
        tolerance = self._config.behaviour_tolerance
        try:
            theirs = await converse_on_loop(link.client, link.adapter.score(tokens), timeout_s=self._config.timeout_s)
            apart = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        except (WeightcastError, ValueError) as error:
            self.not_compared(link, outcome, f"could not compare behaviour: {error}")
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
