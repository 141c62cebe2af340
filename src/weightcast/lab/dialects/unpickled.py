"""Reads a pickle without executing it: names stay names, and calls stay descriptions of calls.

The dialects use it for payloads that stock engines would unpickle.  No payload can make it import or call anything.  It
understands the opcodes of torch's own pickles and refuses all others.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from weightcast.errors import WireError
from weightcast.wire.layout import DTYPES

_MARK = object()
_NUMBERS = frozenset({"INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "BINFLOAT"})
_PLAIN = _NUMBERS | {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_EMPTY: dict[str, Any] = {"EMPTY_TUPLE": (), "NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FEW = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class Named:
    """Name of a class or function of a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True)
class Called:
    """Description of a call: the name, its arguments, and the state to set on the result."""

    function: Named
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict[str, Any])


def read(payload: bytes) -> Any:
    """Returns the description of a pickle's content.

    Raises:
        WireError: The payload is not a pickle, or has an opcode that torch's pickles do not use.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(payload):
            if opcode.name == "STOP":
                return stack.pop()
            _step(opcode.name, argument, stack, memo)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise WireError(f"not a payload that can be read: {error}") from None
    raise WireError("not a payload that can be read: it has no end")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match name:
        case "PROTO" | "FRAME":
            pass
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_LIST":
            stack.append([])
        case "EMPTY_DICT":
            stack.append({})
        case "TUPLE":
            stack.append(tuple(_to_mark(stack)))
        case "APPENDS":
            items = _to_mark(stack)
            cast(list[Any], stack[-1]).extend(items)
        case "APPEND":
            item = stack.pop()
            cast(list[Any], stack[-1]).append(item)
        case "SETITEMS":
            items = _to_mark(stack)
            cast(dict[Any, Any], stack[-1]).update(zip(items[::2], items[1::2], strict=True))
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        case "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            stack.append(Named(module, attribute))
        case "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Named(str(module), str(attribute)))
        case "REDUCE" | "NEWOBJ":
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, Named):
                raise ValueError("it calls an object that is not a name")
            stack.append(Called(function, tuple(arguments)))
        case "BUILD":
            state = stack.pop()
            cast(Called, stack[-1]).state.update(state)
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINPUT" | "LONG_BINPUT":
            memo[int(argument)] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[int(argument)])
        case _ if name in _PLAIN:
            stack.append(argument)
        case _ if name in _EMPTY:
            stack.append(_EMPTY[name])
        case _ if name in _FEW:
            count = _FEW[name]
            items = stack[-count:]
            del stack[-count:]
            stack.append(tuple(items))
        case _:
            raise ValueError(f"it uses the opcode {name}")


def _to_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1 - next(index for index, item in enumerate(reversed(stack)) if item is _MARK)
    items = stack[place + 1 :]
    del stack[place:]
    return items


def dtype_named(name: Any) -> torch.dtype:
    """Returns the dtype that a payload names; raises ``WireError`` if it names something else."""
    if not isinstance(name, Named) or name.module != "torch" or name.name not in DTYPES:
        raise WireError(f"{name} is not a dtype")
    return DTYPES[name.name]
