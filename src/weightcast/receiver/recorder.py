"""Learn what a model's ``load_weights`` does, by watching it once.

The loader is run on weights without memory (meta tensors) under a dispatch mode that sees every operation.  A copy from
a view of a source tensor into a resident parameter becomes a ``Route`` and is not carried out.  Whatever else
is written into a parameter is *computed*: those sources stay with the loader.  So slicing, fusing and stacking of any
engine is learnt from its own code, and can then be staged, replayed and read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.wire.layout import TensorSpec
from weightcast.wire.routes import Region, Route

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(slots=True)
class Recording:
    """What was seen.

    Attributes:
        routes: By source name, in the order of the copies.
        computed: Sources that no route describes completely, by name.
        why: For each computed source, what was seen instead.
    """

    routes: dict[str, list[Route]] = field(default_factory=dict[str, list[Route]])
    computed: list[str] = field(default_factory=list[str])
    why: dict[str, str] = field(default_factory=dict[str, str])


def record_routes(
    load_weights: LoadWeights, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor]
) -> Recording:
    """Run ``load_weights`` once without changing anything, and write down its copies.

    Args:
        load_weights: Takes ``(name, tensor)`` pairs, as vLLM's and SGLang's models do.
        specs: The sources, whole.
        residents: Parameters and buffers by name.

    Returns:
        Routes where everything is a pure copy; names of the sources where it is not.
    """
    mode = _Recorder(specs, residents)
    try:
        with torch.no_grad(), mode:
            load_weights(mode.sources())
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        # A loader that looks at values cannot run on tensors without any: everything stays with it.
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Recording(computed=[spec.name for spec in specs], why={spec.name: reason for spec in specs})
    return mode.recording()


class _Recorder(TorchDispatchMode):
    def __init__(self, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._specs = {spec.name: spec for spec in specs}
        self._residents: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in residents.items():
            self._residents.setdefault(_storage(tensor), (name, tensor))
        self._source_of: dict[int, str] = {}
        self._keep: list[torch.Tensor] = []
        self._routes: dict[str, list[Route]] = {spec.name: [] for spec in specs}
        self._why: dict[str, str] = {}
        self._current = ""

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs.values():
            tensor = torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")
            self._keep.append(tensor)  # a freed storage's address would be given to the next one
            self._source_of[_storage(tensor)] = spec.name
            self._current = spec.name
            yield spec.name, tensor

    def recording(self) -> Recording:
        computed = [name for name in self._specs if name in self._why]
        routes = {name: found for name, found in self._routes.items() if name not in self._why}
        return Recording(routes=routes, computed=computed, why=self._why)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            resident = self._residents.get(_storage(target))
            if resident is not None:
                self._copy(resident, target, source)
                return target
        elif func._schema.is_mutable:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and _storage(value) in self._residents:
                    name = self._residents[_storage(value)][0]
                    self._why[self._current] = f"{func} writes {name}"
                    return value
        return func(*args, **kwargs)

    def _copy(self, resident: tuple[str, torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> None:
        parameter, whole = resident
        name = self._source_of.get(_storage(source))
        if name is None:
            self._why[self._current] = f"{parameter} gets values computed from the source"
            return
        spec = self._specs[name]
        if target.shape != source.shape:
            self._why[name] = f"{parameter} gets a broadcast of the source"
            return
        box = box_of(spec.shape, int(source.storage_offset()), tuple(source.shape), source.stride())
        if box is None:
            self._why[name] = f"{parameter} gets a part of the source that is not a box"
            return
        offset, shape, dims = box
        stride = tuple(target.stride(dim) if dim is not None else 0 for dim in dims)
        region = Region(offset=int(target.storage_offset()) - int(whole.storage_offset()), shape=shape, stride=stride)
        self._routes[name].append(
            Route(source=name, box_offset=offset, box_shape=shape, parameter=parameter, region=region)
        )


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, which its views share; meta tensors have one although they have no memory."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def box_of(
    full: Sequence[int], offset: int, shape: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]] | None:
    """Which box of a contiguous tensor a strided view is.

    Args:
        full: Shape of the contiguous tensor.
        offset: First element of the view.
        shape: Extents of the view.
        stride: Strides of the view, in elements.

    Returns:
        Offset and extent of the box in the tensor's own dimensions, and for each of these the dimension of the view
        that runs along it (None where the extent is 1); None if the view is no box.
    """
    strides = [math.prod(full[dim + 1 :]) for dim in range(len(full))]
    along: list[int | None] = [None] * len(full)
    extent = [1] * len(full)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        if size == 1:
            continue
        fits = [k for k in range(len(full)) if along[k] is None and full[k] > 1 and strides[k] == step]
        if not fits:
            return None
        along[fits[0]] = dim
        extent[fits[0]] = size
    start: list[int] = []
    for step in strides:
        start.append(offset // step if step else 0)
        offset -= start[-1] * step
    if offset or any(first + size > whole for first, size, whole in zip(start, extent, full, strict=True)):
        return None
    if math.prod(full) == 0:
        return tuple(0 for _ in full), tuple(full), tuple(along)
    return tuple(start), tuple(extent), tuple(along)
