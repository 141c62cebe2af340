"""Weights that cost nothing to make and cannot be mistaken for one another.

Every tensor of every version is a window of one long random pattern, at a start of its own.  So the trainer can fill a
shard without its neighbours, and an engine's process can tell bit for bit what it should have, without being sent it.
The bits are random, so some are no numbers; nothing here computes with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from weightcast.cli.measuring.shapes import ModelShape, Place

POISON = -1
_SHORT, _LONG = 1_048_583, 33_554_467  # primes, so that no shape repeats with the pattern
_STEP = 7919
_COMPARED_WORDS = 1 << 25


class Pattern:
    """Random 16-bit words on a device, read round and round."""

    def __init__(self, device: torch.device) -> None:
        length = _LONG if device.type == "cuda" else _SHORT
        generator = torch.Generator().manual_seed(20)
        words = torch.randint(-(1 << 15), 1 << 15, (length,), generator=generator, dtype=torch.int32)
        self._words = words.to(torch.int16).to(device)

    def fill(self, tensor: torch.Tensor, *, key: int, first_word: int = 0) -> None:
        """Overwrite a contiguous tensor of a 16-bit dtype.

        Args:
            tensor: What to fill.
            key: Which tensor of which version it is.
            first_word: Where in that tensor it begins, in elements.
        """
        self.fill_all([(tensor, key, first_word)])

    def fill_all(self, tensors: Iterable[tuple[torch.Tensor, int, int]]) -> None:
        """As ``fill``, for many: tensor, key and first word of each."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for tensor, key, first_word in tensors:
            words = _words(tensor)
            sources += (windows := self.windows(words.numel(), key=key, first_word=first_word))
            targets += words.split([window.numel() for window in windows])
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]

    def windows(self, count: int, *, key: int, first_word: int = 0) -> list[torch.Tensor]:
        """What so many words of a tensor are, in parts; views."""
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
    """Which window is the tensor with this number in the checkpoint."""
    return version * 1_000_003 + number


def nested(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module whose parameters have these dotted names."""
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


class Engine(nn.Module):
    """The parameters that an engine keeps, and the fastest loader that one could have: a table, no search.

    ``load_weights`` is what peers pay for each tensor, and what our receiver watches once and replays.
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

    def region(self, place: Place) -> torch.Tensor:
        """The part of a live parameter that one tensor of the checkpoint goes to."""
        live = self.kept[place.resident.replace(".", "/")].data
        if place.index is not None:
            live = live[place.index]
        return live[place.row : place.row + place.shape[0]]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors where they belong."""
        for name, tensor in weights:
            self.region(self._places[name]).copy_(tensor)
            self.loaded += 1

    def poison(self, pattern: Pattern, version: int) -> None:
        """Overwrite everything with what no version has."""
        pattern.fill_all(
            (parameter, -key_of(version + 1, number) + POISON, 0) for number, parameter in enumerate(self.kept.values())
        )

    def wrong(self, pattern: Pattern, version: int) -> list[str]:
        """Tensors that are not, bit for bit, those of the version."""
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
        """Those of some tensors."""
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
