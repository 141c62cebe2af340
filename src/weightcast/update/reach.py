"""The transport that reaches each target: chosen at connect, for a target that comes late, and after one failed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError, TargetRejected, WeightcastError
from weightcast.protocols import Exporter, Scattering
from weightcast.transports.blame import is_the_transports
from weightcast.transports.broadcast import BY_RANK
from weightcast.transports.link import Link
from weightcast.transports.mixed import join_names
from weightcast.transports.preflight import check_scattered, choose_transport
from weightcast.transports.registry import TRANSPORTS, spec_of
from weightcast.transports.spec import Placement, TransportSpec
from weightcast.wire.answers import MAPPING_FAILED
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.nccl_settings import NcclSettings

log = logging.getLogger("weightcast.update.reach")


class Reach:
    """The transports of one membership's targets, and those that failed for them."""

    def __init__(
        self,
        config: UpdateConfig,
        exporter: Exporter,
        specs: Sequence[TensorSpec],
        places: Sequence[str],
        hosts: Sequence[str],
        nccl: Sequence[NcclSettings | None] = (),
    ) -> None:
        """Nothing is chosen yet; ``places``, ``hosts`` and ``nccl`` are those of ``Placement``."""
        self._config = config
        self._exporter = exporter
        self._own = self.specs = tuple(specs)  # ``specs``: in the dtypes in which they travel
        self._places = tuple(places)
        self._hosts = tuple(hosts)
        self._nccl = tuple(nccl)
        self._best: TransportSpec | None = None
        self._chosen: dict[str, TransportSpec] = {}  # by URL; an absent target gets its own when it comes
        self._left: dict[str, set[str]] = {}  # by URL: names of transports that failed for the target
        self._unmapped: set[str] = set()  # URLs of targets that could not map memory, and get messages

    @property
    def best(self) -> TransportSpec:
        """The best chosen transport; ``choose`` comes first.  All targets take it if it leaves shards in place."""
        assert self._best is not None, "choose() comes first"
        return self._best

    def of(self, url: str) -> TransportSpec:
        """The transport that reaches a target."""
        return self._chosen.get(url, self.best)

    def of_each(self, links: Sequence[Link]) -> list[TransportSpec]:
        """The transports that reach these targets, each once, best first."""
        return _in_order(self.of(link.url) for link in links)

    def label(self, links: Sequence[Link]) -> str:
        """Names of the transports that reach these targets: ``"ipc"``, or ``"ipc+broadcast"`` for a mixed update."""
        specs = self.of_each(links) if links else _in_order(self._chosen.values())
        return join_names(spec.name for spec in specs) or self.best.name

    def placement(self, infos: Mapping[str, EngineInfo], *, unmapped: Collection[str] = ()) -> Placement:
        """Where the trainer ranks and these targets are; ``unmapped`` has more URLs of those that cannot map memory."""
        return Placement(
            infos=infos,
            device=self._exporter.device,
            places=self._places,
            hosts=self._hosts,
            nccl=self._nccl,
            whole_on=self._whole_on,
            shared_folder=self._config.disk_folder is not None,
            primitive=self._config.direct_by,
            unmapped=frozenset([*self._unmapped, *unmapped]),
            keep_mapped=self._config.keep_mapped,
        )

    def choose(self, links: Sequence[Link], placement: Placement) -> dict[TransportSpec, list[str]]:
        """Chooses each target's transport; returns the URLs by transport, best first.

        ``"auto"`` takes one that leaves shards where they are only if it suits all targets.  Otherwise each target gets
        the best of those that send gathered buckets.  It raises ConfigError if none reaches a target.
        """
        asked = self._config.transport
        if asked != "auto":
            self._check_keeps(spec_of(asked))
        left = set[str]().union(*(self._left.get(link.url, ()) for link in links))
        whole = (
            choose_transport(asked, placement) if asked != "auto" else self._choose_scattered(links, placement, left)
        )
        if whole is not None:
            self._chosen = dict.fromkeys(placement.infos, whole)
        else:
            self._chosen = {url: self._best_for(url, info) for url, info in placement.infos.items()}
        specs = _in_order(self._chosen.values())
        if whole is not None and (slow := whole.slow(placement)):
            log.warning("%s: %s", ", ".join(placement.infos), slow)
        self._best = specs[0]
        return {spec: [url for url, by in self._chosen.items() if by is spec] for spec in specs}

    def _check_keeps(self, spec: TransportSpec) -> None:
        if self._config.keep_mapped and not any(one.mapped for one in (spec, *spec.primitives)):
            raise ConfigError(
                f"keep_mapped=True: {spec.name} does not read weights where the trainer keeps them",
                hint='write transport="direct" or transport="auto", or leave keep_mapped out',
            )

    def choose_late(self, link: Link, *, planned: bool) -> None:
        """Chooses the transport of a target that was away, or was another engine, when the others were chosen.

        ``planned`` is True if buckets were planned for its host.  ConfigError says that it needs what was not planned.
        """
        self._chosen[link.url] = self._late(link, planned=planned)

    def leave(self, link: Link | None, error: WeightcastError) -> str | None:
        """Leaves a target's transport, which failed for it, for the next best one; ``choose`` must follow.

        Only ``transport="auto"`` does so, and ``direct`` from memory to messages.  It is done only if the engine says
        that the transport failed: an engine that is gone is gone for every transport, and another one would not change
        what the engine thinks of the weights.

        Returns a remark for the report with the engine's words; None if the target must fail.
        """
        spec = self._way_out(link, error)
        if link is None or spec is None:
            return None
        url, failed = link.url, self.of(link.url)
        if spec.name == failed.name:
            self._unmapped.add(url)
            log.warning("%s: memory gives way to messages: %s", url, error)
            return f"memory gave way to messages, which stay until retarget(): {error}"
        self._left.setdefault(url, set()).add(failed.name)
        log.warning("%s: %s gives way to %s: %s", url, failed.name, spec.name, error)
        return f"{failed.name} gave way to {spec.name}, which stays until retarget(): {error}"

    def _way_out(self, link: Link | None, error: WeightcastError) -> TransportSpec | None:
        """The transport to which ``leave`` changes; None if the target must fail.  Changes nothing."""
        if link is None:
            return None
        url, info, failed = link.url, link.info, self.of(link.url)
        try:
            if self._config.transport == failed.name:
                if not self._may_send_messages(failed, error):
                    return None
                return choose_transport(failed.name, self.placement({url: info}, unmapped=[url]))
            if self._config.transport == "auto" and is_the_transports(error, link):
                return self._best_for(url, info, {failed.name})
        except ConfigError as why:
            log.info("%s stays with %s: %s", url, failed.name, why)
        return None

    def _may_send_messages(self, failed: TransportSpec, error: WeightcastError) -> bool:
        """True if a target cannot map memory, and its transport has messages too."""
        refused = isinstance(error, TargetRejected) and error.status == MAPPING_FAILED
        many = bool(spec_of(failed.name).primitives) and self._config.direct_by == "auto"
        return refused and many and failed.shares_memory

    def _choose_scattered(
        self, links: Sequence[Link], placement: Placement, without: Collection[str]
    ) -> TransportSpec | None:
        """The transport that leaves shards where they are and suits all targets; None if none does."""
        others = {spec.name for spec in TRANSPORTS if not spec.scattered}
        try:
            spec = choose_transport("auto", placement, without={*without, *others})
            specs = self._own if spec.mapped else self.specs  # what is read in place is not cast
            for link in links:
                check_scattered(link, specs, self._config, self._exporter)
        except ConfigError as error:
            log.debug("shards are gathered: %s", error)
            return None
        return spec

    def _best_for(self, url: str, info: EngineInfo, without: Collection[str] = ()) -> TransportSpec:
        """The best transport for one target that may be mixed with others; raises ``ConfigError`` if there is none."""
        unmixed = {spec.name for spec in TRANSPORTS if not spec.mixes}
        placement, left = self.placement({url: info}), {*self._left.get(url, ()), *without}
        if not left & {BY_RANK.name, "ipc"} and BY_RANK.suits(placement):
            return BY_RANK
        spec = choose_transport("auto", placement, without={*unmixed, *left})
        if not spec.shares_memory and placement.beyond("trainers") is None:
            try:
                placement.check_seen()
            except ConfigError as why:
                log.info("auto takes %s: %s", spec.name, why)
        return spec

    def _late(self, link: Link, *, planned: bool) -> TransportSpec:
        """The transport of a target that was away: its best one if that needs no buffers that were not planned."""
        if self._config.transport == "auto" and self.best.mixes:
            unplanned = {one.name for one in TRANSPORTS if one.shares_memory and not planned}
            spec = self._best_for(link.url, link.info, unplanned)
            if spec in self._chosen.values() or not spec.shares_memory:
                return spec
        if self.best.legs and planned and self.best.offered_by(link.info):
            self.best.check(self.placement({link.url: link.info}))
            return self.best
        if not planned and self.best.shares_memory:
            raise ConfigError(
                f"{link.url} runs on host {link.info.host_id}, for which no trainer rank fills buckets",
                hint="call retarget() with the targets as they are now",
            )
        if self.best is BY_RANK:
            raise ConfigError(
                f"{link.url} would be reached by {', '.join(link.info.transports)}, and the update goes over "
                f"{BY_RANK.name}",
                hint="call retarget() with the targets as they are now",
            )
        spec = choose_transport(self.best.name, self.placement({link.url: link.info}))
        if spec is not self.best:
            raise ConfigError(
                f"{link.url} would be reached by {spec.name} over {spec.primitive}, and the update goes over "
                f"{self.best.primitive}",
                hint="call retarget() with the targets as they are now",
            )
        return spec

    def _whole_on(self) -> Collection[str]:
        exporter = self._exporter
        # An exporter that cannot leave shards where they are is refused for that reason.
        return exporter.whole_on(self._hosts) if isinstance(exporter, Scattering) else self._hosts


def _in_order(specs: Iterable[TransportSpec]) -> list[TransportSpec]:
    """Each transport once, best first."""
    names = [spec.name for spec in (*TRANSPORTS, BY_RANK)]
    return sorted(dict.fromkeys(specs), key=lambda spec: names.index(spec.name))
