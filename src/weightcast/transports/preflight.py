"""Before anything moves: do the weights fit the engines, and by which transport can they be reached?

Looks at what engines said of themselves; asks nobody and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightcast.comm.ipc import host_id
from weightcast.config import TransportName
from weightcast.errors import ConfigError
from weightcast.transports.link import Link
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import EngineInfo

SHARED_MEMORY: tuple[TransportName, ...] = ("ipc", "checkpoint-engine")
_SHOWN = 6


def check_fits(link: Link, specs: Sequence[TensorSpec]) -> None:
    """Is this what the engine expects in a full update?

    Raises:
        ConfigError: A tensor is missing, unknown to the engine, of another shape or of another family of dtypes.
    """
    theirs = {spec.name: spec for spec in link.adapter.specs()}
    if not theirs:
        return
    ours = {spec.name: spec for spec in specs}
    problems = [f"missing {name}" for name in theirs if name not in ours]
    problems += [f"unknown to the engine: {name}" for name in ours if name not in theirs]
    for name, spec in ours.items():
        want = theirs.get(name)
        if want is not None and want.shape != spec.shape:
            problems.append(f"{name} has shape {spec.shape}, the engine's has {want.shape}")
        elif want is not None and want.torch_dtype.is_floating_point != spec.torch_dtype.is_floating_point:
            problems.append(f"{name} is {spec.dtype}, the engine's is {want.dtype}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"these weights do not fit {link.url} ({link.info.model}): {'; '.join(problems[:_SHOWN])}{more}",
            hint="is it a checkpoint of the model that this engine serves?",
        )


def choose_transport(
    infos: Mapping[str, EngineInfo],
    asked: TransportName,
    *,
    device: torch.device,
    places: Sequence[str],
    shared_folder: bool = False,
) -> TransportName:
    """The transport that was asked for, or the best that reaches every engine.

    Args:
        infos: What each engine said, by URL.
        asked: What the caller wants.
        device: Where the trainer's weights are.
        places: UUID of each trainer rank's device, the head's first.
        shared_folder: The caller named a folder for ``disk``.

    Raises:
        ConfigError: An engine cannot be reached that way.
    """
    here = host_id()
    same_host = all(info.host_id == here for info in infos.values())
    devices = {rank.device for info in infos.values() for rank in info.ranks}
    name = asked
    if asked == "auto":
        # An engine that does not tell its GPUs ("cuda") is taken to be colocated only if the caller says so.
        by_ipc = same_host and "cuda" not in devices and all("ipc" in info.transports for info in infos.values())
        name = "ipc" if by_ipc else "broadcast"
    for url, info in infos.items():
        if name not in info.transports:
            raise ConfigError(
                f"{url} ({info.engine}) takes no update by {name}, only by {', '.join(info.transports) or 'none'}",
                hint=info.message or "see docs/engines for the flags that it needs; say which way with --via",
            )
    if name in SHARED_MEMORY and not same_host:
        far = next(url for url, info in infos.items() if info.host_id != here)
        raise ConfigError(
            f"{far} runs on another host; {name} needs one host",
            hint='use broadcast: transport="broadcast", --via broadcast',
        )
    if name == "disk" and not same_host and not shared_folder:
        raise ConfigError(
            "an engine runs on another host, and would not find a folder among this host's temporary files",
            hint="name one that all hosts see under the same path: disk_folder, --disk-folder",
        )
    on_gpu = device.type == "cuda"
    if name == "broadcast" and any((there != "cpu") != on_gpu for there in devices):
        raise ConfigError(
            f"broadcast needs weights of one kind of device; the trainer's are on {device}, "
            f"an engine's on {next(there for there in devices if (there != 'cpu') != on_gpu)}",
            hint='use ipc on one host (transport="ipc", --via ipc), or weights on the engines\' kind of device',
        )
    if name == "broadcast" and on_gpu and places[0] in devices:
        raise ConfigError(
            f"trainer and engine share GPU {places[0]}, and nccl wants a GPU for each rank",
            hint='use ipc for engines on the trainer\'s GPUs: transport="ipc", --via ipc',
        )
    return name


def choose_receivers(
    infos: Mapping[str, EngineInfo], transport: TransportName, *, device: torch.device, places: Sequence[str]
) -> tuple[int, ...]:
    """The trainer ranks that fill a bucket: the head alone, or all where others sit on the engines' GPUs."""
    devices = {rank.device for info in infos.values() for rank in info.ranks}
    colocated = "cuda" in devices or any(place in devices for place in places[1:])
    if transport in SHARED_MEMORY and device.type == "cuda" and colocated:
        return tuple(range(len(places)))
    return (0,)
