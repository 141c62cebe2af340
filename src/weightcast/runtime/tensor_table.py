# An intrinsic of numba is called without its first argument.
# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportPrivateImportUsage=false
"""Reads address and form of many tensors in compiled code, through the C functions that torch exports for DLPack.

By Python's attributes that takes a few tenths of a microsecond for each attribute of each tensor.

Tensors, torch's objects behind them and their storages lie all over the memory, and the processor would wait for one
after the other.  So each is fetched into the cache while the tensors before it are read.

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

# So many tensors later the object of torch is read, twice as many the storage's, three times as many the tensor.
_AHEAD = 4
_LINE_BYTES = 64

_i8, _i32, _i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


@intrinsic
def _item(typingctx, function, listing, number):
    """Calls ``PyList_GetItem``, which lends the item."""

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(_i64, [_i64, _i64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def _fetch(typingctx, address):
    """Fetches a line of memory into the cache.  No address is wrong."""

    def emit(context, builder, signature, arguments):
        byte = _i8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(fetch, [builder.inttoptr(arguments[0], byte), _i32(0), _i32(3), _i32(1)])
        return context.get_constant(types.int64, 0)

    return types.int64(types.int64), emit


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


def _read(listing, item, tensors, rows, words, at, function, clear, inside, writes):
    """Compares each tensor of a list with its row, or writes the row; returns the sum of what was found.

    ``tensors`` is scratch memory, one word for each.  ``inside`` has the places of torch's object in a tensor's, and of
    the storage's in that; 0 where they are not known.
    """
    found = 0
    num = len(tensors)
    for number in range(num):
        tensors[number] = _item(item, listing, number)
    for number in range(num):
        if inside[0] != 0:
            last = min(number + 3 * _AHEAD, num - 1)
            _fetch(tensors[last])
            _fetch(tensors[last] + inside[0])
            middle = _word(tensors[min(number + 2 * _AHEAD, num - 1)] + inside[0])
            for line in range(3):
                _fetch(middle + line * _LINE_BYTES)
            near = _word(tensors[min(number + _AHEAD, num - 1)] + inside[0])
            if near != 0:
                _fetch(_word(near + inside[1]))
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


# It keeps the lock of Python, which reading a tensor needs.
_compiled = njit(_read, cache=True)


def _address_of(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, _NAME) or 0


def _places_inside(tensor: torch.Tensor) -> tuple[int, int]:
    """First bytes of the address of torch's object in a tensor's, and of its storage's in that; 0 if not found."""
    own = _find(id(tensor), tensor._cdata, tensor.__sizeof__())
    return own, _find(tensor._cdata, tensor.untyped_storage()._cdata, 4 * 8) if own else 0


def _find(start: int, word: int, size_bytes: int) -> int:
    places = range(0, size_bytes, 8)
    return next((place for place in places if ctypes.c_uint64.from_address(start + place).value == word), 0)


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
    keeps_code = True  # numba's machine code, in a file

    @classmethod
    def keep_no_code(cls) -> None:
        """Compiles at every start, and reads and writes no file."""
        global _compiled
        cls.keeps_code, _compiled = False, njit(_read)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reads each tensor; raises ``LookupError`` if that is not possible here."""
        self._function = _function()
        self._clear, self._item = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (ctypes.pythonapi.PyErr_Clear, ctypes.pythonapi.PyList_GetItem)
        )
        self._inside = np.zeros(2, dtype=np.int64)
        self._words = np.zeros(_WORDS, dtype=np.int64)
        dims = max(map(torch.Tensor.dim, tensors), default=0)
        self._rows = np.zeros((len(tensors), _HEAD + 2 * dims), dtype=np.int64)
        if self._run(tensors, writes=True):
            raise LookupError("a tensor cannot be exported")
        if len(tensors):
            self._inside[:] = _places_inside(tensors[0])
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
        listing = tensors if type(tensors) is list else list(tensors)
        scratch, words = np.empty(len(listing), dtype=np.int64), self._words
        at, inside = words.ctypes.data, self._inside
        functions = self._function, self._clear
        return _compiled(id(listing), self._item, scratch, self._rows, words, at, *functions, inside, writes)
