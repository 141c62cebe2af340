"""Writes pickles opcode by opcode, for engines that accept no other format.

A pickle from here has only the names that its caller wrote.  No class is imported to be pickled, and no installed
package can add a name.  This package has no reader of pickles.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

_PROTOCOL = b"\x80\x04"
_MARK, _TUPLE, _EMPTY_TUPLE = b"(", b"t", b")"
_EMPTY_DICT, _SETITEMS, _EMPTY_LIST, _APPENDS = b"}", b"u", b"]", b"e"
_REDUCE, _BUILD, _STOP = b"R", b"b", b"."

NONE = b"N"


def pickled(content: bytes) -> bytes:
    """Makes a whole pickle of the opcodes that one of the functions below returned."""
    return _PROTOCOL + content + _STOP


def pickled_base64(content: bytes) -> str:
    """Makes a whole pickle as base64, for JSON."""
    return base64.b64encode(pickled(content)).decode()


def name(module: str, attribute: str) -> bytes:
    """A class or function that the reader looks up by its name; also a torch dtype."""
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    """The result of calling a ``name``, which the reader does."""
    return function + sequence(arguments) + _REDUCE


def namespace(fields: Sequence[tuple[str, bytes]]) -> bytes:
    """A ``types.SimpleNamespace``."""
    return call(name("types", "SimpleNamespace")) + mapping(fields) + _BUILD


def mapping(items: Iterable[tuple[str, bytes]]) -> bytes:
    """A dict with text as keys."""
    return _EMPTY_DICT + _MARK + b"".join(text(key) + value for key, value in items) + _SETITEMS


def sequence(items: Sequence[bytes]) -> bytes:
    """A tuple."""
    return _MARK + b"".join(items) + _TUPLE if items else _EMPTY_TUPLE


def listing(items: Sequence[bytes]) -> bytes:
    """A list."""
    return _EMPTY_LIST + (_MARK + b"".join(items) + _APPENDS if items else b"")


def integers(values: Sequence[int]) -> bytes:
    """A tuple of whole numbers."""
    return sequence([integer(value) for value in values])


def integer(value: int) -> bytes:
    """A whole number."""
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def boolean(value: bool) -> bytes:
    """True or False."""
    return b"\x88" if value else b"\x89"


def text(value: str) -> bytes:
    """A string."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def raw(value: bytes) -> bytes:
    """Bytes."""
    return b"B" + len(value).to_bytes(4, "little") + value
