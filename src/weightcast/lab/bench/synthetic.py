"""Synthetic weights that are cheap to make and different for every tensor and version.

Every tensor of every version is a window of one long random pattern, at a start of its own.  A trainer can fill a shard
without its neighbours, and an engine can check every bit without being sent the expected weights.  All bits are random
but the highest of the exponent, so that every value is finite, as weights must be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from weightcast.lab.bench.shapes import ModelShape, ResidentPlace

POISON = -1
_SHORT, _LONG = 1_048_583, 33_554_467  # primes, so that no shape is in step with the pattern
_STEP = 7919
_COMPARED_WORDS = 1 << 25
_HIGHEST_EXPONENT_BIT = 1 << 14


class Pattern:
    """Random 16-bit words on a device, read as a ring."""

    def __init__(self, device: torch.device) -> None:
        length = _LONG if device.type == "cuda" else _SHORT
        generator = torch.Generator().manual_seed(20)
        words = torch.randint(-(1 << 15), 1 << 15, (length,), generator=generator, dtype=torch.int32)
        self._words = (words & ~_HIGHEST_EXPONENT_BIT).to(torch.int16).to(device)

    def fill(self, tensor: torch.Tensor, *, key: int, first_word: int = 0) -> None:
        """Overwrites a contiguous 16-bit tensor, a part from element ``first_word`` of the whole; see ``key_of``."""
        self.fill_all([(tensor, key, first_word)])

    def fill_all(self, tensors: Iterable[tuple[torch.Tensor, int, int]]) -> None:
        """Fills many tensors, each given as tensor, key and first word."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for tensor, key, first_word in tensors:
            words = _words(tensor)
            sources += (windows := self.windows(words.numel(), key=key, first_word=first_word))
            targets += words.split([window.numel() for window in windows])
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]

    def windows(self, count: int, *, key: int, first_word: int = 0) -> list[torch.Tensor]:
        """Returns views that together are ``count`` words of a tensor."""
        length = self._words.numel()
        at = (key * _STEP + first_word) % length
        found: list[torch.Tensor] = []
        while count:
            found.append(self._words[at : at + count])
            count -= found[-1].numel()
            at = 0
        return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int16).view(-1)


def key_of(version: int, number: int) -> int:
    """Returns the key of a version of the tensor with this number in the checkpoint."""
    return version * 1_000_003 + number


def nested(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Makes a module whose parameters have these dotted names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:  # pyright: ignore[reportPrivateUsage]  get_submodule raises instead
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, parameter)
    return root


class SyntheticEngine(nn.Module):
    """An engine's parameters with the fastest possible loader, which looks up each tensor in a table.

    Peers call ``load_weights`` in each update.  Our receiver records it once and replays it.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.kept = nn.ParameterDict()
        for name, size in shape.residents.items():
            weight = torch.zeros(size, dtype=torch.bfloat16, device=device)
            self.kept[name.replace(".", "/")] = nn.Parameter(weight, requires_grad=False)
        self._places = {place.name: place for place in shape.places}
        self.loaded = 0

    def region(self, place: ResidentPlace) -> torch.Tensor:
        """Returns the part of a live parameter that one checkpoint tensor is copied to."""
        live = self.kept[place.resident.replace(".", "/")].data
        if place.index is not None:
            live = live[place.index]
        return live[place.row : place.row + place.shape[0]]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies whole tensors into the parameters."""
        for name, tensor in weights:
            self.region(self._places[name]).copy_(tensor)
            self.loaded += 1

    def poison(self, pattern: Pattern, version: int) -> None:
        """Overwrites every parameter with values that no version has."""
        pattern.fill_all(
            (parameter, -key_of(version + 1, number) + POISON, 0) for number, parameter in enumerate(self.kept.values())
        )

    def wrong(self, pattern: Pattern, version: int) -> list[str]:
        """Returns the names of tensors that differ from the version in any bit."""
        found: list[str] = []
        some: list[int] = []
        size = 0
        for number, place in enumerate(self.shape.places):  # small ones together: a comparison waits for the device
            words = math.prod(place.shape)
            if size + words > _COMPARED_WORDS:
                found += self._wrong_of(some, pattern, version)
                some, size = [], 0
            some.append(number)
            size += words
        return found + self._wrong_of(some, pattern, version)

    def _wrong_of(self, numbers: list[int], pattern: Pattern, version: int) -> list[str]:
        """Returns the names of those of the numbered tensors that differ."""
        have = [_words(self.region(self.shape.places[number])) for number in numbers]
        want = [
            pattern.windows(words.numel(), key=key_of(version, number))
            for words, number in zip(have, numbers, strict=True)
        ]
        if len(numbers) > 1 and torch.equal(torch.cat(have), torch.cat([window for parts in want for window in parts])):
            return []
        return [
            self.shape.places[number].name
            for number, words, parts in zip(numbers, have, want, strict=True)
            if not all(map(torch.equal, words.split([part.numel() for part in parts]), parts))
        ]
