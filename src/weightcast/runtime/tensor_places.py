"""Notices that one of many tensors has moved or changed its form.  Nothing for each tensor runs in Python."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import attrgetter

import torch

_dtype_of = attrgetter("dtype")
_device_of = attrgetter("device")


def addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Address of the first element of each tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  calls of subclasses take longer
        return tuple(map(torch.Tensor.data_ptr, tensors))


class TensorPlaces:
    """Address, device, dtype, shape and strides of some tensors at one moment.  It keeps none of them alive.

    Attributes:
        addresses: Address of the first element of each, in order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, like: TensorPlaces | None = None) -> None:
        """Reads each tensor; ``like`` has places of the same tensors in the same form."""
        self._devices = list(map(_device_of, tensors))
        self.addresses = addresses_of(tensors)
        if like is not None:
            self._dtypes, self._shapes, self._strides = like._dtypes, like._shapes, like._strides
            return
        self._dtypes = list(map(_dtype_of, tensors))
        shapes: dict[torch.Size, torch.Size] = {}
        self._shapes = [shapes.setdefault(shape, shape) for shape in map(torch.Tensor.size, tensors)]
        whole = all(map(torch.Tensor.is_contiguous, tensors))
        self._strides = None if whole else list(map(torch.Tensor.stride, tensors))

    def compare(self, tensors: Sequence[torch.Tensor], *, forms: bool = True) -> tuple[bool, bool]:
        """Whether the tensors lie where they lay, and whether their forms are the same: dtypes, shapes and strides.

        If forms differ, both may be False.  Without ``forms``, a difference may go unnoticed while nothing moves.
        """
        if len(tensors) != len(self.addresses):
            return False, False
        # Not by lists of what all tensors have, which take longer to make.  No two devices have the same addresses.
        lies = all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), self.addresses))
        return lies, not forms or self._alike(tensors)

    def same_devices(self, other: TensorPlaces) -> bool:
        """True if each tensor is on the device on which it is in ``other``."""
        return self._devices == other._devices

    def _alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        if not all(map(operator.is_, map(_dtype_of, tensors), self._dtypes)):
            return False
        # For a parameter ``shape`` takes twice as long as ``size``.
        if not all(map(operator.eq, map(torch.Tensor.size, tensors), self._shapes)):
            return False
        if self._strides is None:
            return all(map(torch.Tensor.is_contiguous, tensors))
        return all(map(operator.eq, map(torch.Tensor.stride, tensors), self._strides))
