# An intrinsic of numba is called without its first argument.
# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportPrivateImportUsage=false
"""Reads address and form of many tensors in compiled code, through the C functions that torch exports for DLPack.

By Python's attributes that takes a few tenths of a microsecond for each attribute of each tensor.

Importing this needs numba, and compiles nothing.  numba keeps machine code under the hash of this file alone.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Words of a row: address, device, number of dimensions with the dtype, and offset in bytes; then sizes and strides.
_HEAD = 4
# Words of a ``DLTensor``: the same first three, then pointers to sizes and strides, and the offset.
_SIZES, _STRIDES, _OFFSET, _WORDS = 3, 4, 5, 6
_NAME = b"dlpack_exchange_api"
_MAJOR = 1
# Words of a ``DLPackExchangeAPI``: version, the version before, and functions.
_FUNCTION = 5

_MOVED, _CHANGED, _UNREADABLE = 1, 2, 4

_i64 = ir.IntType(64)


@intrinsic
def _export(typingctx, function, tensor, words):
    """Calls ``dltensor_from_py_object_no_sync``, which borrows and allocates nothing; 0 if it worked."""

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [_i64, _i64])
        call = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.sext(builder.call(call, arguments[1:]), _i64)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def _clear(typingctx, function):
    """Calls ``PyErr_Clear``."""

    def emit(context, builder, signature, arguments):
        call = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer())
        builder.call(call, [])
        return context.get_constant(types.int64, 0)

    return types.int64(types.int64), emit


@intrinsic
def _word(typingctx, address):
    def emit(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _i64.as_pointer()), align=8)

    return types.int64(types.int64), emit


# It keeps the lock of Python, which reading a tensor needs.
@njit(cache=True)
def _read(tensors, rows, words, at, function, clear, writes):
    """Compares each tensor with its row, or writes the row; returns _MOVED, _CHANGED and _UNREADABLE, added up."""
    found = 0
    for number in range(len(tensors)):
        if _export(function, tensors[number], at) != 0:
            _clear(clear)
            return _UNREADABLE
        dims = words[2] & 0xFFFFFFFF
        if _HEAD + 2 * dims > rows.shape[1]:
            return found | _CHANGED
        if writes:
            rows[number, 0], rows[number, 1] = words[0], words[1]
            rows[number, 2], rows[number, 3] = words[2], words[_OFFSET]
        elif rows[number, 2] != words[2]:
            return found | _CHANGED
        elif rows[number, 0] != words[0] or rows[number, 1] != words[1] or rows[number, 3] != words[_OFFSET]:
            found |= _MOVED
        for dim in range(dims):
            place = _HEAD + 2 * dim
            size, stride = _word(words[_SIZES] + 8 * dim), _word(words[_STRIDES] + 8 * dim)
            if writes:
                rows[number, place], rows[number, place + 1] = size, stride
            elif rows[number, place] != size or rows[number, place + 1] != stride:
                return found | _CHANGED
    return found


def _address_of(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, _NAME) or 0


def _function() -> int:
    """Address of torch's function; raises ``LookupError`` if this torch has none that is known here."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        raise LookupError("torch does not export it")
    address = _address_of(capsule)
    if ctypes.c_uint32.from_address(address).value != _MAJOR:
        raise LookupError("torch exports another version")
    function = ctypes.c_uint64.from_address(address + 8 * _FUNCTION).value
    if not function:
        raise LookupError("torch exports no function that borrows")
    return function


class TensorTable:
    """Address and form of some tensors at one moment, one row for each.  It keeps none of them alive.

    Attributes:
        addresses: Address of the first element of each.
    """

    _checked = False

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reads each tensor; raises ``LookupError`` if that is not possible here."""
        self._function = _function()
        self._clear = ctypes.cast(ctypes.pythonapi.PyErr_Clear, ctypes.c_void_p).value
        self._words = np.zeros(_WORDS, dtype=np.int64)
        dims = max(map(torch.Tensor.dim, tensors), default=0)
        self._rows = np.zeros((len(tensors), _HEAD + 2 * dims), dtype=np.int64)
        if self._run(tensors, writes=True):
            raise LookupError("a tensor cannot be exported")
        rows = self._rows
        self.addresses: tuple[int, ...] = tuple(rows[:, 0].tolist())
        if rows[:, 3].any():
            raise LookupError("torch exports offsets")
        if not TensorTable._checked:
            self._check(tensors)
            TensorTable._checked = True

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compares what torch exports with what Python shows, once in a process."""
        if self.addresses != tuple(map(torch.Tensor.data_ptr, tensors)):
            raise LookupError("what torch exports are not addresses of elements")
        for tensor, row in zip(tensors, self._rows.tolist(), strict=True):
            if row[_HEAD : _HEAD + 2 * tensor.dim()] != [
                *itertools.chain(*zip(tensor.shape, tensor.stride(), strict=True))
            ]:
                raise LookupError("what torch exports are not sizes and strides")

    def compare(self, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
        """Whether one of as many tensors has moved, and whether one has another form.

        Both are True if the form of one is different, or if one cannot be exported.
        """
        found = self._run(tensors, writes=False)
        changed = bool(found & (_CHANGED | _UNREADABLE))
        return changed or bool(found & _MOVED), changed

    def _run(self, tensors: Sequence[torch.Tensor], *, writes: bool) -> int:
        objects = np.fromiter(map(id, tensors), dtype=np.int64, count=len(tensors))
        words = self._words
        return _read(objects, self._rows, words, words.ctypes.data, self._function, self._clear, writes)
