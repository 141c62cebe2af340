"""Notices that a model is made of other modules, or has other names, than when an exporter planned for it.

There may be tens of thousands of modules, and every update asks, so nothing for each of them runs in Python.  When
the model is looked at again, the same tensors must travel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import nn

from weightcast.errors import ConfigError, some
from weightcast.exporters.module_tensors import Tie
from weightcast.exporters.segments import Arranged
from weightcast.wire.layout import TensorSpec

_parameters_of = itemgetter("_parameters")


class Structure:
    """The modules below some roots, and the names of their tensors, at one moment.

    It keeps these modules alive, and no tensor.

    Args:
        names: False for trainers whose parameters come and go between two steps, so that names say nothing.
    """

    def __init__(self, roots: Iterable[nn.Module], *, names: bool = True) -> None:
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        attributes = [module.__dict__ for module in modules]
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._parents: list[dict[str, Any]] = [own["_modules"] for own in attributes if own["_modules"]]
        self._children = list(map(list, map(dict.items, self._parents)))
        self._empty: list[dict[str, Any]] = [own["_modules"] for own in attributes if not own["_modules"]]
        self._owners: list[dict[str, Any]] = []
        self._buffered: list[nn.Module] = []
        if names:
            self._empty += [own[kind] for own in attributes for kind in ("_parameters", "_buffers") if not own[kind]]
            self._owners = [own for own in attributes if own["_parameters"]]
            self._buffered = [module for module in modules if module.__dict__["_buffers"]]
        self._types = self._types_now()
        self._buffers = list(map(_buffers_of, self._buffered))

    def holds(self) -> bool:
        """True if the modules and names are still those."""
        return (
            not any(self._empty)
            and list(map(type, self._modules)) == self._kinds
            and all(map(operator.eq, map(list, map(dict.items, self._parents)), self._children))
            and (self._types_now() == self._types)
            and list(map(_buffers_of, self._buffered)) == self._buffers
        )

    def _types_now(self) -> list[type]:
        """Types of all parameters; that of None stands for one that is registered and not there."""
        return list(map(type, chain.from_iterable(map(dict.values, map(_parameters_of, self._owners)))))


def _buffers_of(module: nn.Module) -> list[tuple[str, bool]]:
    """A module's persistent buffers by name, and whether each is there."""
    own = module.__dict__
    hidden: set[str] = own["_non_persistent_buffers_set"]
    return [(name, tensor is None) for name, tensor in own["_buffers"].items() if name not in hidden]


def in_planned_order(
    planned: Sequence[TensorSpec],
    found: Sequence[TensorSpec],
    arranged: Sequence[Arranged],
    ties_before: Sequence[Tie] = (),
) -> tuple[list[TensorSpec], list[Arranged]]:
    """Puts what would travel now, and how it is arranged, into the order that was planned.

    ``ties_before`` are the ties when that was planned.

    Raises:
        ConfigError: Other tensors would travel than were planned for; the text names them.
    """
    now = {spec.name: number for number, spec in enumerate(found)}
    check_same(planned, found, tied=[tie.place.name for tie in ties_before])
    order = [now[spec.name] for spec in planned]
    return [found[number] for number in order], [arranged[number] for number in order]


def check_same(
    planned: Sequence[TensorSpec], found: Sequence[TensorSpec], *, what: str = "the model", tied: Sequence[str] = ()
) -> None:
    """Refuses, with ``ConfigError``, other tensors than were planned for; ``tied`` are names that shared a tensor."""
    before, now = {spec.name: spec for spec in planned}, {spec.name: spec for spec in found}
    words = [
        f"{name} was tied to another tensor and is one of its own" if name in tied else f"{name} is new"
        for name in now
        if name not in before
    ]
    words += [f"{name} is gone" for name in before if name not in now]
    words += [
        f"{name} is {now[name].dtype} {list(now[name].shape)} and was {spec.dtype} {list(spec.shape)}"
        for name, spec in before.items()
        if name in now and now[name] != spec
    ]
    if words:
        raise ConfigError(
            f"{what} has changed since it was connected, and other tensors would travel: {some(words, joint='; ')}. "
            "Nothing has been sent, and the engines serve what they served",
            hint="undo the change before the update, or close this updater and connect again",
        )
