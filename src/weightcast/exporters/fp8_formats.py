"""The formats of 8-bit floats that weights can travel in, as engines read them from checkpoints.

Each gives a weight in float8_e4m3fn and, beside it, scales:

| class | values that share a scale | name and dtype of the scales | checkpoints |
|---|---|---|---|
| ``Fp8Blocks`` | a block of 128 x 128 | ``<name>_scale_inv``, float32 | DeepSeek-V3's |
| ``Fp8Tensors`` | a matrix | ``<name>_scale``, float32, of one element | vLLM's and SGLang's ``fp8`` |
| ``Fp8Channels`` | a row, which is one output | ``<name>_scale``, float32, ``(rows, 1)`` | compressed-tensors |
| ``Mxfp8`` | 32 elements of a row | ``<name>_scale``, uint8 (E8M0), ``(rows, columns / 32)`` | compressed-tensors |

The arithmetic is in float32, and rounding is to the nearest even value:

    scale = max |x| / 448        q = x / scale

If max |x| is 0, the scale of a block is 1, and that of a matrix or row is 2^-23, as compressed-tensors has it.  With
``reciprocal`` it is what vLLM computes when it quantises a bfloat16 model by itself, and a few elements differ:

    scale = max(max |x| / 448, 1 / (448 * 512)), in blocks max(max |x|, 1e-4) / 448        q = x * (1 / scale)

MXFP8's scale is a power of two, 2^(e - 8), where 2^e is max |x| rounded down, or up from 1.75 * 2^e on.  So no element
exceeds 448.  The E8M0 byte is e - 8 + 127, at least 0.  It is 255 if max |x| is not finite.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weightcast.errors import ConfigError
from weightcast.wire.layout import TensorSpec

FP8 = torch.float8_e4m3fn
# Of the tensors that travel for a quantised weight, beside those in 8-bit floats.
SCALE_SUFFIXES = ("_scale_inv", "_scale", "_packed")

_MOST = torch.finfo(FP8).max
_LEAST_IN_BLOCKS = 1e-4
_LEAST_SCALE = 1.0 / (_MOST * 512.0)
_SCALE_OF_ZERO = 2.0**-23
_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format(ABC):
    """Base of the formats: selects the weights that are quantised.

    Attributes:
        match: Regular expression for names that engines know.  The default matches the projections of attention, MLPs
            and experts, not embeddings, norms, routers and the output head.
        skip: Regular expression for exceptions from ``match``.
    """

    match: str = r".*(_proj(_with_mqa)?|\.experts\.\d+\.w[123])\.weight|.*\.experts\.(gate_up|down)_proj"
    skip: str = r".*(visual|vision|audio)\b.*"

    suffix: ClassVar[str] = "_scale"
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    stacks: ClassVar[bool] = False
    weight_suffix: ClassVar[str] = ""
    weight_dtype: ClassVar[torch.dtype] = FP8
    packs: ClassVar[int] = 1  # elements of a row in one that travels
    overall_suffix: ClassVar[str] = ""  # of one more scale, for the whole weight; empty if there is none

    @property
    def multiplies(self) -> bool:
        """True if values are multiplied by the reciprocal of a scale, and not divided by it."""
        return False

    def wants(self, spec: TensorSpec) -> bool:
        """True for a weight that is quantised; ``ConfigError`` if the format has no scales for its shape."""
        wide = spec.torch_dtype.is_floating_point and spec.torch_dtype.itemsize >= 2
        named = re.fullmatch(self.match, spec.name) is not None and re.fullmatch(self.skip, spec.name) is None
        wanted = wide and named and len(spec.shape) in (2, 3) and spec.numel > 0
        if wanted:
            self.check(spec)
        return wanted

    def check(self, spec: TensorSpec) -> None:
        """Raises ``ConfigError`` for a weight that this format has no scales for."""
        if len(spec.shape) > 2 and not self.stacks:
            raise ConfigError(
                f"{spec.name} stacks the matrices of several experts, and {type(self).__name__} has scales for single "
                "matrices only",
                hint="use Fp8Blocks, or leave such weights out with skip=",
            )

    @abstractmethod
    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the values that share a scale."""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in which the scales of a weight travel."""
        rows, columns = self.block_of(shape)
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))

    def joined(self, name: str) -> str:
        """A name for the weights that share their overall scale with this one."""
        return name

    def overall(self, most: torch.Tensor) -> torch.Tensor:
        """The overall scales of weights, float32, from the largest magnitudes in them."""
        return torch.ones_like(most)

    @abstractmethod
    def finish(self, maxima: torch.Tensor, overall: torch.Tensor | None = None) -> None:
        """Turns maxima of magnitudes, float32, into scales, in place; those of one weight if there is an overall scale.

        A value is divided by its scale, and that by the overall one.
        """

    def encoded(self, q: torch.Tensor) -> torch.Tensor:
        """Divided values, float32, as they are stored."""
        return q.clamp_(-_MOST, _MOST)

    def stored(self, scales: torch.Tensor) -> torch.Tensor:
        """Float32 scales as they travel."""
        return scales

    @abstractmethod
    def quantization_config(self, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
        """The ``quantization_config`` that an engine's ``config.json`` needs to read these weights.

        Args:
            specs: The exporter's ``specs()``.  The modules whose matrices stay wide are then listed, which engines need
                for models with quantisable layers that this format leaves out, such as vision towers.
        """


def divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divides in place, rounded the same on every device; returns ``x``.

    By a Python number, torch multiplies with its reciprocal on a GPU, which makes other scales than a CPU does.
    """
    return x.div_(torch.full((), number, dtype=x.dtype, device=x.device))


def wide_modules(specs: Sequence[TensorSpec]) -> list[str]:
    """Names of the modules whose weights, of two dimensions or more, are not quantised."""
    return [
        spec.name.removesuffix(".weight")
        for spec in specs
        if spec.name.endswith(".weight") and len(spec.shape) > 1 and spec.torch_dtype != FP8
    ]


def _listed(key: str, specs: Sequence[TensorSpec]) -> dict[str, list[str]]:
    return {key: wide_modules(specs)} if specs else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks(Fp8Format):
    """One scale for each block of a matrix, as in DeepSeek-V3's checkpoints; smaller blocks at the ends.

    Attributes:
        block: Rows and columns of a block.
        reciprocal: Multiply by the reciprocal of the scale, as vLLM does when it quantises by itself.
    """

    block: int = 128
    reciprocal: bool = False

    suffix: ClassVar[str] = "_scale_inv"
    stacks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"a block cannot have {self.block} x {self.block} elements")

    @property
    def multiplies(self) -> bool:
        return self.reciprocal

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Implements the base's method."""
        return self.block, self.block

    def finish(self, maxima: torch.Tensor, overall: torch.Tensor | None = None) -> None:
        """Implements the base's method."""
        if self.reciprocal:
            maxima.clamp_(min=_LEAST_IN_BLOCKS).div_(_MOST)  # with a number, as vLLM: see ``divide``
        else:
            divide(maxima, _MOST)
        maxima.masked_fill_(maxima == 0, 1.0)

    def quantization_config(self, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
        """Implements the base's method."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
        } | _listed("modules_to_not_convert", specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coarse(Fp8Format):
    """One scale for a whole matrix or row.

    Attributes:
        reciprocal: Multiply by the reciprocal of the scale, as vLLM does when it quantises by itself.
    """

    reciprocal: bool = False

    @property
    def multiplies(self) -> bool:
        return self.reciprocal

    def finish(self, maxima: torch.Tensor, overall: torch.Tensor | None = None) -> None:
        divide(maxima, _MOST)
        if self.reciprocal:
            maxima.clamp_(min=_LEAST_SCALE)
        else:
            maxima.masked_fill_(maxima == 0, _SCALE_OF_ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tensors(_Coarse):
    """One scale for each matrix, as in checkpoints of the ``quant_method`` ``fp8`` without blocks.

    Attributes:
        scalar: The scales have the shape ``()``, as some checkpoints do, and not ``(1,)``.
    """

    scalar: bool = False

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Implements the base's method."""
        return shape[-2], shape[-1]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Implements the base's method."""
        return () if self.scalar else (1,)

    def quantization_config(self, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
        """Implements the base's method."""
        return {"quant_method": "fp8", "activation_scheme": "dynamic"} | _listed("modules_to_not_convert", specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Channels(_Coarse):
    """One scale for each row of a matrix, as in compressed-tensors' checkpoints for scales of each token (``W8A8``)."""

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Implements the base's method."""
        return 1, shape[-1]

    def quantization_config(self, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
        """Implements the base's method."""
        float8 = {"num_bits": 8, "type": "float", "symmetric": True}
        return compressed_tensors_config(
            "float-quantized",
            specs,
            weights=float8 | {"strategy": "channel", "dynamic": False},
            inputs=float8 | {"strategy": "token", "dynamic": True},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp8(Fp8Format):
    """MXFP8 of the OCP's Microscaling formats: one power of two for 32 elements along a row, as compressed-tensors."""

    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    def check(self, spec: TensorSpec) -> None:
        """Implements the base's method."""
        Fp8Format.check(self, spec)
        if spec.shape[-1] % _GROUP:
            raise ConfigError(
                f"{spec.name} has rows of {spec.shape[-1]} elements, and MXFP8 needs a multiple of {_GROUP}",
                hint="leave such weights out with skip=",
            )

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Implements the base's method."""
        return 1, _GROUP

    def finish(self, maxima: torch.Tensor, overall: torch.Tensor | None = None) -> None:
        """Implements the base's method."""
        bits = maxima.view(torch.int32)
        bits.bitwise_and_(0x7FFFFFFF)  # the maximum of NaNs may have any sign
        infinite = bits >= 0x7F800000
        exponents = ((bits + 0x200000) >> 23).sub_(8).clamp_(0, 254)
        bits.copy_(exponents << 23)
        bits.masked_fill_(exponents == 0, 0x400000)  # 2^-127 is subnormal
        bits.masked_fill_(infinite, 0x7FC00000)

    def stored(self, scales: torch.Tensor) -> torch.Tensor:
        """Implements the base's method."""
        return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)

    def quantization_config(self, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
        """Implements the base's method."""
        group = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": _GROUP}
        group |= {"scale_dtype": "torch.uint8"}
        return compressed_tensors_config(
            "mxfp8-quantized", specs, weights=group | {"dynamic": False}, inputs=group | {"dynamic": True}
        )


def compressed_tensors_config(
    form: str, specs: Sequence[TensorSpec], *, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": form}},
        "ignore": wide_modules(specs) if specs else ["lm_head"],
    }
