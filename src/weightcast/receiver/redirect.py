"""Lets a loader write into other memory than the parameters that it thinks it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weightcast.digest.copies import bits
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece
from weightcast.errors import EngineFailure
from weightcast.receiver.recorder import is_view, tensors_in, with_originals, written_tensors
from weightcast.receiver.resident_sums import region_of
from weightcast.receiver.write_log import storage_id
from weightcast.wire.box import Span, span_of
from weightcast.wire.routes import Route

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of a parameter's storage, and the other memory that stands for them."""

    span: Span
    data: torch.Tensor

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other memory as a tensor in the storage sees its own."""
        first = tensor.storage_offset() * tensor.element_size() - self.span.first
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = first // tensor.element_size()
        return made.set_(self.data.untyped_storage(), offset, tuple(tensor.shape), tensor.stride())  # pyright: ignore[reportArgumentType]


class Redirected(TorchDispatchMode):
    """While it is entered, a loader's operations on some places of parameters go to other memory.

    The other memory begins with every bit of those places flipped, so that a place that the loader does not write, or
    writes by what was there, comes out different.  Live memory is read, and never written.
    """

    def __init__(self, places: Sequence[Route], residents: Mapping[str, torch.Tensor]) -> None:
        """Takes the places that may be written, and all parameters by name as they lie now."""
        super().__init__()
        self._residents = residents
        self._live = [region_of(residents[place.parameter], place) for place in places]
        self._runs: dict[int, list[_Run]] = {}
        for number, spans in _spans(self._live).items():
            storage = next(view for view in self._live if storage_id(view) == number).untyped_storage()
            self._runs[number] = [_Run(span, _bytes_of(storage, span).clone()) for span in spans]
        self.places = [self._run_of(view).view(view) if view.numel() else view for view in self._live]
        for place in self.places:
            bits(place).bitwise_not_()  # nothing happens to one without elements

    def differs(self) -> list[bool]:
        """For each place, whether other bits were written than the live parameter has.  Waits for the device."""
        return [not torch.equal(bits(one), bits(other)) for one, other in zip(self._live, self.places, strict=True)]

    def equals(self, other: Redirected) -> bool:
        """True if the same bits were written in both.  Waits for the device."""
        return all(map(torch.equal, map(bits, self.places), map(bits, other.places)))

    def sums(self) -> torch.Tensor:
        """The digest sum of each place as a tensor of its own: int64 ``[places]``, on the device."""
        return partial_sums([TensorPiece(tensor=place, full_shape=tuple(place.shape)) for place in self.places])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_view(func):
            found = func(*args, **kwargs)
            known = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
            if all(storage_id(tensor) in known for tensor in tensors_in(found)):
                return found  # a view; the others are copies after all, which must be of the other memory
        for tensor in written_tensors(func, args, kwargs):
            if tensor.numel() and not self._lies_in_a_run(tensor) and storage_id(tensor) in self._storages:
                raise EngineFailure(f"load_weights writes another place than when it was watched ({func})")
        originals: dict[int, torch.Tensor] = {}

        def elsewhere(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.numel() or not self._touches_a_run(value):
                return value
            made = self._run_of(value).view(value)
            originals[id(made)] = value
            return made

        found = func(*tree_map(elsewhere, args), **tree_map(elsewhere, kwargs))
        return with_originals(found, originals)

    @cached_property
    def _storages(self) -> frozenset[int]:
        """Those of all parameters; most loaders write nothing else that would have to be looked up here."""
        return frozenset(map(storage_id, self._residents.values()))

    def _touches_a_run(self, tensor: torch.Tensor) -> bool:
        span = _span(tensor)
        return any(run.span.overlaps(span) for run in self._runs.get(storage_id(tensor), ()))

    def _lies_in_a_run(self, tensor: torch.Tensor) -> bool:
        span = _span(tensor)
        return any(_within(span, run.span) for run in self._runs.get(storage_id(tensor), ()))

    def _run_of(self, tensor: torch.Tensor) -> _Run:
        span = _span(tensor)
        for run in self._runs[storage_id(tensor)]:
            if _within(span, run.span):
                return run
        raise EngineFailure("load_weights computes with more of a parameter than the places that it writes")


def _spans(views: Sequence[torch.Tensor]) -> dict[int, list[Span]]:
    """The bytes of each storage that the views lie in; those that overlap are one."""
    by_storage: dict[int, list[Span]] = {}
    for view in (view for view in views if view.numel()):
        first, end = _span(view)
        by_storage.setdefault(storage_id(view), []).append(Span(first // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, end))
    for number, spans in by_storage.items():
        apart: list[Span] = []
        for span in sorted(spans):
            if apart and span.first < apart[-1].end:
                apart[-1] = Span(apart[-1].first, max(apart[-1].end, span.end))
            else:
                apart.append(span)
        by_storage[number] = apart
    return by_storage


def _span(tensor: torch.Tensor) -> Span:
    """The bytes of its storage from a tensor's first to its last."""
    first, end = span_of(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
    return Span(first * tensor.element_size(), end * tensor.element_size())


def _within(inner: Span, outer: Span) -> bool:
    return outer.first <= inner.first and inner.end <= outer.end


def _bytes_of(storage: torch.UntypedStorage, span: Span) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, span.first, (span.end - span.first,), (1,))  # pyright: ignore[reportArgumentType]
