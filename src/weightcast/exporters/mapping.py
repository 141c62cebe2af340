"""Maps the trainer's names and layouts to those of Hugging Face checkpoints, by tables.

``families.py`` has the tables.  ``arrange`` applies one to names and shapes; it reads no weights.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.errors import ConfigError
from weightcast.exporters.segments import NEW, Arranged, Segment, check_used_once
from weightcast.wire.box import Box

INDEX = "{index}"

Sizes = Callable[[Any], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a table, for the trainer's tensors whose whole name matches.

    A rule first takes dimension 0 apart (``stacked``), then cuts a dimension into parts (``names``, ``sizes``,
    ``groups``), then transposes the last two dimensions (``transposed``).  ``stack`` and ``part`` do the opposite: they
    join several of the trainer's tensors, for checkpoints that are fused where the trainer is not.

    Attributes:
        match: Regular expression for the trainer's name, without the segments of wrappers.
        names: Name of each part.  ``\\1`` stands for the match of a group, ``{index}`` for the index of a stacked
            tensor.  A tensor with a single name is not cut.
        stacked: Dimension 0 counts experts, each of which becomes a tensor of its own.
        dim: The dimension to cut, counted after ``stacked``.
        sizes: Function of the configuration: rows of each part in each group; None for equal parts.
        groups: Function of the configuration: number of groups in the cut dimension, each with all parts; None for one.
        transposed: The last two dimensions change places.
        stack: Number of the regular expression's group that has this tensor's index in the checkpoint's dimension 0,
            which the trainer does not have.
        part: (i, n): this tensor is the i-th of n equal parts, along ``dim``, of the named tensor.
        unless: Predicate of (shape, configuration); the rule skips tensors for which it is true.
    """

    match: str
    names: tuple[str, ...]
    stacked: bool = False
    dim: int = 0
    sizes: Sizes | None = None
    groups: Callable[[Any], int] | None = None
    transposed: bool = False
    stack: int | None = None
    part: tuple[int, int] | None = None
    unless: Callable[[tuple[int, ...], Any], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The table of a family of models.  A tensor that no rule matches keeps its name and layout.

    Attributes:
        name: Name in errors and in the output of ``plan``.
        model_types: ``config.model_type`` of the family's models.
        rules: Rules in order; the first that matches a name applies.
        keeps_dtype: Regular expression for names of tensors that are never cast, because engines load them as they are.
        fused: Regular expression for names that only a trainer's own, fused modules have.
        published: Rules for tensors that published checkpoints store transposed, compared with transformers' output.
            These rules transpose and do nothing else.
    """

    name: str
    model_types: frozenset[str]
    rules: tuple[Rule, ...] = ()
    keeps_dtype: str | None = None
    fused: str | None = None
    published: tuple[Rule, ...] = ()


def arrange(stored: Sequence[tuple[str, tuple[int, ...]]], family: Family, config: Any) -> list[Arranged]:
    """Applies a table: the travelling tensors, in the order of ``stored`` (name and unsharded shape of each).

    ``config`` may be None if the table's rules need no sizes.

    Raises:
        ConfigError: A tensor does not have the shape that its rule expects, or two tensors get the same name.
    """
    text = getattr(config, "text_config", None) or config
    found: list[Arranged] = []
    for number, (name, shape) in enumerate(stored):
        rule, matched = _rule_for(name, shape, family, text)
        if rule is None or matched is None:
            found.append(Arranged(name=name, shape=shape, segments=(Segment.whole(number, shape),)))
        else:
            found.extend(_apply(rule, matched, number, name, shape, family, text))
    joined = _join(found)
    check_used_once(stored, joined)
    return joined


def as_published(saved: Sequence[Arranged], family: Family, config: Any) -> list[Arranged]:
    """Transposes tensors that published checkpoints store the other way than transformers writes them."""
    text = getattr(config, "text_config", None) or config
    return [
        _turned(tensor)
        if any(re.fullmatch(rule.match, tensor.name) and not _excepted(rule, tensor, text) for rule in family.published)
        else tensor
        for tensor in saved
    ]


def _excepted(rule: Rule, tensor: Arranged, config: Any) -> bool:
    return rule.unless is not None and rule.unless(tensor.shape, config)


def _turned(tensor: Arranged) -> Arranged:
    def turn(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers[:-2], numbers[-1], numbers[-2])

    segments = tuple(
        Segment(source=part.source, box=part.box, dims=turn(part.dims), at=turn(part.at)) for part in tensor.segments
    )
    return Arranged(name=tensor.name, shape=turn(tensor.shape), segments=segments)


def wire_dtype_of(name: str, family: Family, wanted: torch.dtype | None) -> torch.dtype | None:
    """The dtype that a tensor is cast to: ``wanted``, or None if the family protects the tensor's own dtype."""
    return None if family.keeps_dtype is not None and re.fullmatch(family.keeps_dtype, name) else wanted


def _rule_for(
    name: str, shape: tuple[int, ...], family: Family, config: Any
) -> tuple[Rule | None, re.Match[str] | None]:
    for rule in family.rules:
        matched = re.fullmatch(rule.match, name)
        if matched is not None and (rule.unless is None or not rule.unless(shape, config)):
            return rule, matched
    return None, None


def _apply(
    rule: Rule,
    matched: re.Match[str],
    number: int,
    name: str,
    shape: tuple[int, ...],
    family: Family,
    config: Any,
) -> Iterable[Arranged]:
    first = 1 if rule.stacked else 0
    dims = list(range(first, len(shape)))
    cut = first + rule.dim
    if len(shape) <= first or (len(rule.names) > 1 and cut >= len(shape)) or (rule.transposed and len(dims) < 2):
        raise ConfigError(f"{name} {list(shape)} has too few dimensions for a fused tensor of the family {family.name}")
    if rule.transposed:
        dims[-1], dims[-2] = dims[-2], dims[-1]
    extent = shape[cut] if len(rule.names) > 1 else 0
    groups = rule.groups(config) if rule.groups is not None else 1
    sizes = _sizes(rule, extent, groups, name, family, config)
    starts = [0, *itertools.accumulate(sizes)]
    group_rows = starts[-1]
    for index in range(shape[0]) if rule.stacked else (None,):
        for part, template in enumerate(rule.names):
            segments: list[Segment] = []
            new: list[int] = []
            start: list[int] = []
            if rule.stack is not None:
                new, start = [NEW], [int(matched[rule.stack])]
            target = [shape[dim] for dim in dims]
            if len(rule.names) > 1:
                target[dims.index(cut)] = sizes[part] * groups
            for group in range(groups):
                offset, box = [0] * len(shape), list(shape)
                at = [0] * len(dims)
                if rule.part is not None:
                    at[dims.index(cut)] = rule.part[0] * shape[cut]
                if index is not None:
                    offset[0], box[0] = index, 1
                if len(rule.names) > 1:
                    offset[cut] = group * group_rows + starts[part]
                    box[cut] = sizes[part]
                    at[dims.index(cut)] = group * sizes[part]
                segments.append(
                    Segment(
                        source=number,
                        box=Box(offset=tuple(offset), shape=tuple(box)),
                        dims=(*new, *dims),
                        at=(*start, *at),
                    )
                )
            if rule.part is not None:
                target[dims.index(cut)] = rule.part[1] * shape[cut]
            yield Arranged(
                name=matched.expand(template).replace(INDEX, str(index)),
                shape=(*(place + 1 for place in start), *target),
                segments=tuple(segments),
            )


def _sizes(rule: Rule, extent: int, groups: int, name: str, family: Family, config: Any) -> list[int]:
    parts = len(rule.names)
    if parts == 1:
        return [0]
    sizes = list(rule.sizes(config)) if rule.sizes is not None else [extent // (parts * groups)] * parts
    if len(sizes) != parts or sum(sizes) * groups != extent:
        raise ConfigError(
            f"{name}: dimension {rule.dim} of a fused tensor of the family {family.name} should be "
            f"{' + '.join(map(str, sizes))}{f' for each of {groups} groups' if groups > 1 else ''}, and is {extent}",
            hint="pass family= with a table that describes this trainer's layout",
        )
    return sizes


def _join(found: Sequence[Arranged]) -> list[Arranged]:
    """Joins tensors of one name, at the place of the first."""
    by_name: dict[str, list[Arranged]] = {}
    for tensor in found:
        by_name.setdefault(tensor.name, []).append(tensor)
    return [
        parts[0]
        if len(parts) == 1
        else Arranged(
            name=name,
            shape=tuple(max(extents) for extents in zip(*(part.shape for part in parts), strict=True)),
            segments=tuple(segment for part in parts for segment in part.segments),
        )
        for name, parts in by_name.items()
    ]
