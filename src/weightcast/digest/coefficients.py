"""The coefficients of the digest: splitmix64 of row and column numbers, made odd.

`weightcast.digest.definition` says what they are for.
"""

import torch

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
SEED_A = 0x243F6A8885A308D3
SEED_B = 0x13198A2E03707344

# Coefficients computed at a time: 256 KiB, so that they stay in cache.
SPAN = 1 << 15


def splitmix64(value: int) -> int:
    """The splitmix64 mix of a 64-bit number: one-to-one on [0, 2**64)."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """The int64 with the bits of a number in [0, 2**64)."""
    return value - (1 << 64) if value >> 63 else value


def splitmix64_(x: torch.Tensor, scratch: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """Replaces each number by the `splitmix64` of its sum with the seed.

    `x` is int64 on the CPU, read mod 2**64; it is overwritten and returned. `scratch` is memory of the same shape.
    """
    x.add_(signed((seed + GOLDEN) & MASK))
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x.bitwise_xor_(_shift_right(x, shift, scratch)).mul_(signed(factor))
    return x.bitwise_xor_(_shift_right(x, 31, scratch))


class Coefficients:
    """A or B on the CPU. The first 2**20 (8 MiB) are kept once they have been used."""

    _MAX_KEPT = 1 << 20

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept = torch.empty(0, dtype=torch.int64)

    def span(self, start: int, stop: int) -> torch.Tensor:
        """The coefficients of `start` to `stop - 1`: int64 `[stop - start]`, not to be written to."""
        if stop > self._MAX_KEPT:
            return self.at(torch.arange(start, stop))
        kept = self._kept
        if len(kept) < stop:
            # A thread that loses this race computes the same numbers.
            size = min(max(1 << 12, 1 << (stop - 1).bit_length()), self._MAX_KEPT)
            self._kept = kept = self.at(torch.arange(size))
        return kept[start:stop]

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """The coefficients of `indices`, int64 `[n]`, which are overwritten and returned."""
        scratch = torch.empty(min(len(indices), SPAN), dtype=torch.int64)
        for x in indices.split(SPAN):
            splitmix64_(x, scratch[: len(x)], seed=self._seed).bitwise_or_(1)
        return indices


A = Coefficients(SEED_A)
B = Coefficients(SEED_B)


def _shift_right(x: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """`x >> bits` as unsigned numbers: an int64 shift copies the sign, the mask takes the copies away."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)
