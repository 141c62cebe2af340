"""Checks before an update: the weights fit the engines, and a transport reaches every engine.

The checks read the engines' descriptions of themselves.  They send nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from weightcast.config import PauseChoice, PauseMode, UpdateConfig
from weightcast.errors import ConfigError, some
from weightcast.protocols import Exporter
from weightcast.transports.broadcast import BY_RANK
from weightcast.transports.link import Link
from weightcast.transports.registry import TRANSPORTS, spec_of
from weightcast.transports.spec import SpecName, TransportSpec
from weightcast.transports.topology import Topology
from weightcast.wire.casts import why_no_cast
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import DRAFT_PREFIX, TensorSpec

log = logging.getLogger("weightcast.transports.preflight")

_BEST_PAUSES: tuple[PauseMode, ...] = ("retract", "abort", "in_place", "wait")  # as ``pause="auto"`` takes them


def check_fits(links: Sequence[Link], specs: Sequence[TensorSpec]) -> None:
    """Raises ConfigError unless these tensors are, in shape and kind, what each engine expects in a full update.

    Engines of one kind have one table, which is compared once.
    """
    ours = {spec.name: spec for spec in specs}
    fitting: dict[tuple[int, int], object] = {}  # the values keep the tables, so that no other one gets their ids
    for link in links:
        tables = link.info.specs, link.info.optional
        key = id(tables[0]), id(tables[1])
        if key not in fitting:
            _check_tables(link, ours, *tables)
            fitting[key] = tables


def _check_tables(
    link: Link, ours: Mapping[str, TensorSpec], required: Sequence[TensorSpec], optional: Sequence[TensorSpec]
) -> None:
    theirs = {spec.name: spec for spec in required}
    missing = [name for name in theirs if name not in ours]
    theirs |= {spec.name: spec for spec in optional}
    if not any(name.startswith(DRAFT_PREFIX) for name in theirs):
        _check_no_draft(link, ours)
    if not required:
        return
    problems: list[str] = []
    if missing:
        problems.append(f"missing {some(missing)}")
    if unknown := [name for name in ours if name not in theirs]:
        problems.append(f"unknown to the engine: {some(unknown)}")
    for name, spec in ours.items():
        want = theirs.get(name)
        if want is not None and want.shape != spec.shape:
            problems.append(f"{name} has shape {spec.shape}, the engine's has {want.shape}")
        elif want is not None and (why := why_no_cast(name, spec.torch_dtype, want.torch_dtype)):
            problems.append(why)
    if problems:
        raise ConfigError(
            f"these weights do not fit {link.url} ({link.info.model}): {some(problems, 6, joint='; ')}",
            hint="this engine updates its draft model too: connect(model, ..., draft=draft_model), or push --draft"
            if any(name.startswith(DRAFT_PREFIX) and name not in ours for name in theirs)
            else "is it the model that this engine serves? If the trainer renames or fuses weights: "
            "ModuleExporter(model, family=..., names=...)",
        )


def _check_no_draft(link: Link, ours: Mapping[str, TensorSpec]) -> None:
    """Refuses a draft's tensors for an engine that lists none.  Stock engines would skip them without a word."""
    draft = next((name for name in ours if name.startswith(DRAFT_PREFIX)), None)
    if draft is not None:
        raise ConfigError(
            f"{link.url} ({link.info.engine}) takes no draft model, and {draft} belongs to one",
            hint="leave draft= out; vLLM, SGLang and LMDeploy with weightcast's plug-in update draft models if told so",
        )


def check_scattered(link: Link, specs: Sequence[TensorSpec], exporter: Exporter) -> None:
    """Raises ConfigError unless an engine can read shards that no rank has gathered, and they can be proven."""
    way = "shards that are not gathered"
    hint = 'use another transport: transport="auto", --via auto'
    if not exporter.scatters or exporter.unsummed():
        raise ConfigError(f"{type(exporter).__name__} cannot send {way}", hint=hint)
    sent = {spec.name: spec.dtype for spec in specs}
    for spec in link.info.specs:
        if sent.get(spec.name, spec.dtype) != spec.dtype:
            raise ConfigError(
                f"{link.url} keeps {spec.name} in {spec.dtype}, and it travels in {sent[spec.name]}: a cast of {way} "
                "cannot be proven",
                hint=f"set wire_dtype={spec.dtype!r}, or use another transport",
            )


def choose_pause(link: Link, pause: PauseChoice) -> PauseMode:
    """Returns the pause of a target's updates: the named one, or for ``"auto"`` the best that the engine can have.

    It raises ConfigError, with the engine's reason, if it cannot be updated so as it was started.
    """
    refused, who = link.info.no_pause, f"{link.url} ({link.info.engine})"
    if pause != "auto":
        if pause in refused:
            raise ConfigError(f"{who} cannot be updated with pause={pause!r}: {refused[pause]}")
        return pause
    left: list[PauseMode] = [mode for mode in _BEST_PAUSES if mode not in refused]
    if not left:
        raise ConfigError(f"{who} can be updated with no pause: {'; '.join(dict.fromkeys(refused.values()))}")
    found = left[0]
    if found != _BEST_PAUSES[0] and link.start.pause != found:
        fate = "requests that run end at each update" if found == "abort" else "requests that run are paused by it"
        log.warning('%s: pause="auto" is %s here, so %s: %s', who, found, fate, refused[_BEST_PAUSES[0]])
    return found


def warn_hazards(link: Link) -> None:
    """Logs what an update of this engine leaves as it is, or cannot prove."""
    for hazard in link.info.hazards:
        log.warning("%s (%s): %s", link.url, link.info.engine, hazard)


def check_scores(config: UpdateConfig, exporter: Exporter) -> None:
    """Raises ConfigError, or warns where the caller is not ``strict``, if behaviour has nothing to be compared with."""
    if config.verify != "behaviour" or exporter.scores:
        return
    words = 'verify="behaviour" needs a forward pass, and this exporter has none'
    if config.strict:
        raise ConfigError(words, hint='update from a trainer that holds the model, or write verify="resident"')
    log.warning("%s: no answer is compared with the trainer's", words)


def check_proof(links: Sequence[Link], config: UpdateConfig) -> None:
    """Raises ConfigError, or warns where the caller is not ``strict``, if targets cannot prove the level asked for."""
    level = config.verify
    short = [link for link in links if level in ("received", "resident") and level not in link.adapter.proves]
    words = [f"{link.url} ({link.info.engine}) cannot prove that weights are {level}" for link in short]
    hint = 'install the plug-in where there is one (docs/engines), or prove with verify="behaviour"'
    if words and config.strict:
        raise ConfigError(f"{'; '.join(words)}, and strict=True asks for it", hint=hint)
    for link, line in zip(short, words, strict=True):
        _warn_once(link, f"{line}: {hint}")


def _warn_once(link: Link, words: str) -> None:
    """Logs what a target cannot prove, unless that was the last that was said about it."""
    if link.start.short != words:
        link.start.short = words
        log.warning("%s", words)


def tell_served(infos: Mapping[str, EngineInfo], config: UpdateConfig) -> None:
    """Logs which numbers the engines will refuse.

    It is a warning only if they serve different versions, since their answers differ then until the first update.
    """
    served = [(info.version, url) for url, info in infos.items() if info.version]
    if not served or config.allow_older:
        return
    version, url = max(served)
    others = [f"{other} serves {info.version}" for other, info in infos.items() if info.version not in (None, version)]
    log.log(
        logging.WARNING if others else logging.INFO,
        "%s serves version %d%s: update() counts on from there, and update(version=N) with a lower N is refused "
        "unless connected with allow_older=True",
        url,
        version,
        f" ({', '.join(others)})" if others else "",
    )


def check_not_older(version: int, infos: Mapping[str, EngineInfo], config: UpdateConfig) -> None:
    """Raises ConfigError if engines serve a higher version, unless the caller allows an older one.

    With ``on_failure="quarantine"`` it does if all of them do.
    """
    ahead = [(info.version, url) for url, info in infos.items() if info.version is not None and version < info.version]
    if config.allow_older or not ahead:
        return
    if len(ahead) == len(infos) or config.on_failure == "raise":
        served, url = max(ahead, key=itemgetter(0))
        raise ConfigError(
            f"version {version} is older than {served}, which {url} serves",
            hint="send a higher version (update() without a number counts on by itself), or allow an older one on "
            "purpose (allow_older, --allow-older)",
        )


def check_places(transport: TransportSpec, topology: Topology) -> None:
    """Raises ConfigError, with the setting, unless it is clear where every engine rank finds a buffer on its own GPU.

    An engine that does not name its GPUs is assumed to sit where the trainer's ranks do, in the same order.  That is
    clear only for one engine with as many ranks as the trainer has, or where the trainer has one GPU.
    """
    if not transport.reads_memory or (transport.divides and not transport.gathers) or topology.device.type != "cuda":
        return
    silent = {url: info for url, info in topology.infos.items() if "cuda" in info.devices}
    for url, info in silent.items():
        places = [topology.places[rank] for rank in topology.ranks_on(info.host_id)]
        gpus = list(dict.fromkeys(places))
        alone = len(silent) == 1 and info.tp_size == len(places)
        if not alone and not (len(gpus) == 1 and info.tp_size == 1):
            raise ConfigError(
                f"{url} ({info.engine}, {info.sizes}) does not say on which GPUs it runs, and {transport.name} hands "
                f"each of its ranks the buffer on its own GPU; the trainer has {len(places)} ranks on {len(gpus)} "
                f"GPUs, and {len(silent)} engines do not say",
                hint="name them: Target(url, devices=(UUID of the GPU of rank 0, ...)); nvidia-smi -L lists UUIDs",
            )


def choose_transport(asked: SpecName, topology: Topology, *, without: Collection[str] = ()) -> TransportSpec:
    """Returns the transport asked for; for ``"auto"``, the first, but those in ``without``, that suits every engine.

    It raises ConfigError if an engine cannot be reached that way.
    """
    if asked == "auto":
        spec = next((spec for spec in TRANSPORTS if spec.name not in without and spec.suits(topology)), None)
        if spec is None:
            raise ConfigError(
                f"no transport is left for {', '.join(topology.infos)}: {', '.join(sorted(without))} failed or cannot "
                "be mixed with others",
                hint="weightcast doctor URL says which transports can work",
            )
    else:
        spec = spec_of(asked)
    spec = _choose_variant(spec, topology)
    for url, info in topology.infos.items():
        if not spec.offered_by(info):
            ways = ", ".join(info.transports)
            raise ConfigError(
                f"{url} ({info.engine}) "
                + (f"takes no update by {spec.name}, only by {ways}" if ways else "takes no update as it was started"),
                hint=info.message
                or "docs/engines/matrix.md lists the transports of each engine; choose one with transport= or --via",
            )
    _check_reach(spec, topology)
    spec.check(topology)
    return spec


def choose_scattered(topology: Topology, *, without: Collection[str] = ()) -> TransportSpec:
    """As ``choose_transport`` for ``"auto"``, of the transports that leave shards where they are."""
    return choose_transport("auto", topology, without={*without, *(spec.name for spec in TRANSPORTS if spec.gathers)})


def choose_gathered(topology: Topology, *, without: Collection[str] = ()) -> TransportSpec:
    """As ``choose_transport`` for ``"auto"``, of those that may send the same gathered buckets to other targets."""
    if not {BY_RANK.name, "ipc"} & set(without) and BY_RANK.suits(topology):
        return BY_RANK
    return choose_transport("auto", topology, without={*without, *(spec.name for spec in TRANSPORTS if not spec.mixes)})


def _check_reach(spec: TransportSpec, topology: Topology) -> None:
    far = topology.beyond(spec.reach)
    if far is None:
        return
    many = topology.on_many_hosts
    if spec.reach == "replicas" and many and topology.ranks_on(topology.infos[far].host_id):
        raise ConfigError(
            f"the trainer ranks on the host of {far} do not hold all weights together, and {spec.name} by "
            f"{spec.variant} reads them there",
            hint='shard within each host and replicate between hosts (HSDP), or gather: transport="ipc", --via ipc',
        )
    needs = "one host"
    if many:
        needs = "the host of trainer rank 0" if spec.reach == "head" else "a trainer rank on the engine's host"
    info = topology.infos[far]
    where = "runs on another host"
    if info.on_several_hosts:
        where = f"runs on several hosts ({', '.join(info.named(rank.rank) for rank in info.ranks)})"
    raise ConfigError(
        f"{far} {where}; {spec.name} needs {needs}", hint='use broadcast: transport="broadcast", --via broadcast'
    )


def _choose_variant(spec: TransportSpec, topology: Topology) -> TransportSpec:
    """The variant of a transport: the one that a test has asked for, or the first that suits every engine."""
    if not spec.variants:
        return spec
    if topology.variant == "auto":
        return next((one for one in spec.variants if one.suits(topology)), spec.variants[-1])
    return next(one for one in spec.variants if one.variant == topology.variant)


def choose_receivers(transport: TransportSpec, topology: Topology) -> tuple[int, ...]:
    """Returns the trainer ranks that fill a bucket.

    All ranks do if shards are not gathered.  Otherwise the head does, and for engines that map buffers one rank on each
    host that has such engines, or all ranks of the host if others than that one share the engines' GPUs.
    """
    if not transport.gathers:
        return tuple(range(len(topology.places)))
    chosen = {0}
    if transport.reads_memory:
        infos = topology.infos.values()
        hosts = (host for info in infos for host in topology.near_hosts(info) or (info.host_id,))
        for host in dict.fromkeys(hosts):
            chosen.update(topology.fillers_on(host))
    return tuple(sorted(chosen))
