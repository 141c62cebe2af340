"""NVFP4: weights of 4 bits with scales on two levels, in the layout of compressed-tensors (``nvfp4-pack-quantized``).

A weight ``<name>.weight`` of ``(rows, columns)`` travels as three tensors:

| name | dtype | shape | contents |
|---|---|---|---|
| ``<name>.weight_packed`` | uint8 | ``(rows, columns / 2)`` | two values: the even column in the low four bits |
| ``<name>.weight_scale`` | float8_e4m3fn | ``(rows, columns / 16)`` | a scale for 16 elements of a row |
| ``<name>.weight_global_scale`` | float32 | ``(1,)`` | one number for the weight, by which readers divide the scales |

The arithmetic is in float32, and what is halfway between two values becomes the even one of them:

    global = 2688 * (1 / max |x| of the weight)        scale = fp8(global * (max |x| of 16 elements / 6))
    q = fp4(x / (scale / global))                fp4 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

A scale of 0 becomes 0.125, and a global scale that is not finite 1.

Engines join some matrices into one, which then has one global scale: the projections of queries, keys and values, of
gates and inputs of an MLP, and the first ones of latent attention.  So these share the maximum of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weightcast.errors import ConfigError
from weightcast.exporters.fp8_formats import FP8, Fp8Format, compressed_tensors_config, divide
from weightcast.wire.layout import TensorSpec

_GROUP = 16
_MOST = 6.0
_MOST_SCALE = torch.finfo(FP8).max
_SCALE_OF_ZERO = 0.125
_LEAST = torch.finfo(torch.float32).tiny
# Between these limits lie the eight magnitudes; a limit itself belongs to the even one of its neighbours.
_ABOVE = (0.25, 1.25, 2.5, 5.0)
_FROM = (0.75, 1.75, 3.5)
_JOINED = re.compile(
    r"(?P<q>q_proj|k_proj|v_proj)|(?P<up>gate_proj|up_proj)|(?P<w>w1|w3)|(?P<a>q_a_proj|kv_a_proj_with_mqa)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4(Fp8Format):
    """NVFP4 for weights alone (W4A16): activations stay wide, since their scales would need calibration."""

    scale_dtype: ClassVar[torch.dtype] = FP8
    weight_suffix: ClassVar[str] = "_packed"
    weight_dtype: ClassVar[torch.dtype] = torch.uint8
    packs: ClassVar[int] = 2
    overall_suffix: ClassVar[str] = "_global_scale"

    def check(self, spec: TensorSpec) -> None:
        """Implements the base's method."""
        Fp8Format.check(self, spec)
        if spec.shape[-1] % _GROUP or not spec.name.endswith(".weight"):
            what = f"rows of {spec.shape[-1]} elements" if spec.shape[-1] % _GROUP else "no name that ends with .weight"
            raise ConfigError(
                f"{spec.name} has {what}, and NVFP4 needs weights with a multiple of {_GROUP}",
                hint="leave such weights out with skip=",
            )

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Implements the base's method."""
        return 1, _GROUP

    def joined(self, name: str) -> str:
        """Implements the base's method."""
        path, _, last = name.removesuffix(".weight").rpartition(".")
        found = _JOINED.fullmatch(last)
        return f"{path}.{found.lastgroup}" if found is not None else name

    def overall(self, most: torch.Tensor) -> torch.Tensor:
        """Implements the base's method."""
        scale = most.clamp(min=_LEAST).reciprocal().mul(_MOST_SCALE * _MOST)
        return torch.nan_to_num(scale, nan=1.0, posinf=1.0, neginf=1.0)

    def finish(self, maxima: torch.Tensor, overall: torch.Tensor | None = None) -> None:
        """Implements the base's method."""
        assert overall is not None
        divide(maxima, _MOST).mul_(overall).clamp_(max=_MOST_SCALE)
        maxima.copy_(maxima.to(FP8))
        maxima.masked_fill_(maxima == 0, _SCALE_OF_ZERO)

    def stored(self, scales: torch.Tensor) -> torch.Tensor:
        """Implements the base's method."""
        return scales.to(FP8)

    def encoded(self, q: torch.Tensor) -> torch.Tensor:
        """Implements the base's method: two columns become a byte."""
        size = q.abs()
        code = (size > _ABOVE[0]).to(torch.uint8)
        for limit in _ABOVE[1:]:
            code += size > limit
        for limit in _FROM:
            code += size >= limit
        code += (q < 0).to(torch.uint8) << 3
        return code[..., 0::2] | (code[..., 1::2] << 4)

    def quantization_config(self, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
        """Implements the base's method."""
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "dynamic": False}
        weights |= {"group_size": _GROUP, "scale_dtype": "torch.float8_e4m3fn"}
        return compressed_tensors_config("nvfp4-pack-quantized", specs, weights=weights, inputs=None)
