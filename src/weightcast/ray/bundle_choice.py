"""Chooses the bundle of each rank from the resources of a placement group and the addresses of its nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from weightcast.errors import ConfigError


def choose_bundles(
    specs: Sequence[Mapping[str, float]],
    count: int,
    *,
    indices: Sequence[int] | None,
    order: Sequence[int],
    resource: str,
    share: float = 1.0,
) -> tuple[int, ...]:
    """Returns the bundle of each rank: the caller's ``indices``, or else bundles with the resource, in ``order``.

    Raises:
        ConfigError: An index is wrong, or too few bundles have the resource; the message says which or how many.
    """
    if count < 1:
        raise ConfigError(f"{count} ranks were asked for, and at least one is needed")
    if indices is None:
        fit = [index for index in order if specs[index].get(resource, 0.0) >= share]
        if len(fit) < count:
            raise ConfigError(
                f"{count} ranks need a bundle with {share:g} {resource} each, and {len(fit)} of {len(specs)} have that"
            )
        return tuple(fit[:count])
    if len(indices) != count:
        raise ConfigError(f"{len(indices)} bundle indices for {count} ranks", hint="name one bundle for each rank")
    for place, index in enumerate(indices):
        if isinstance(index, bool) or not 0 <= index < len(specs):
            raise ConfigError(f"bundle index {index} for rank {place}: the group has bundles 0 to {len(specs) - 1}")
        if index in indices[:place]:
            raise ConfigError(f"bundle index {index} is given for rank {indices.index(index)} and for rank {place}")
        if specs[index].get(resource, 0.0) < share:
            raise ConfigError(
                f"bundle {index} for rank {place} holds {dict(specs[index])}, and a rank takes {share:g} {resource}"
            )
    return tuple(indices)


def by_address(addresses: Sequence[str]) -> list[int]:
    """Returns the order of these addresses, compared as numbers; bundles of one node keep their order."""
    return sorted(range(len(addresses)), key=lambda place: (_address_key(addresses[place]), place))


def _address_key(address: str) -> tuple[int, int, str]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (99, 0, address)  # a name; after all numbers
    return (parsed.version, int(parsed), "")
