"""Words that members of a group tell each other through its store: each distinct text lies there once, by its hash.

Thousands of engine ranks say one of a few things.  So a member reads one list, and each distinct text once, however
many members there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import torch.distributed as dist

_LIST = "told"


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """The distinct names, and the number of the name that each member told, in order of rank."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]


_list = msgspec.json.Decoder(_Told)


def tell(store: dist.Store, rank: int, words: bytes) -> None:
    """Puts a member's words into the store, before the rendezvous; raises torch's RuntimeError if it is gone."""
    name = _name(words)
    if words and not store.check([_text(name)]):
        store.set(_text(name), words)  # type: ignore[arg-type]  # it takes bytes
    store.set(_member(rank), name)


def publish(store: dist.Store, world_size: int) -> None:
    """Makes the list that all members read; called by one of them, after all have told their words."""
    found = store.multi_get([_member(rank) for rank in range(world_size)])
    told = [bytes(one).decode() for one in found]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(told))}
    store.set(_LIST, msgspec.json.encode(_Told(tuple(numbers), tuple(numbers[name] for name in told))).decode())


def read(store: dist.Store, ranks: Iterable[int]) -> Sequence[bytes]:
    """The words of these members, in order; equal ones are one object.  ValueError if the store has others."""
    told = _list.decode(bytes(store.get(_LIST)))
    numbers = [told.numbers[rank] for rank in ranks]
    texts = {number: _read(store, told.names[number]) for number in dict.fromkeys(numbers)}
    return [texts[number] for number in numbers]


def _read(store: dist.Store, name: str) -> bytes:
    words = bytes(store.get(_text(name))) if name else b""
    if _name(words) != name:
        raise ValueError(f"the store has other words under the name {name}")
    return words


def _name(words: bytes) -> str:
    return hashlib.blake2b(words, digest_size=16).hexdigest() if words else ""


def _member(rank: int) -> str:
    return f"words/{rank}"


def _text(name: str) -> str:
    return f"text/{name}"
