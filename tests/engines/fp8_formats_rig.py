"""Runs under a Python that has vLLM: our quantised exports beside those of vLLM and of compressed-tensors.

    python -m tests.engines.fp8_formats_rig

The weights come from one export each, the judges' results from their own functions, on the same float32 values.
Prints one JSON object: for each format and judge, the names of the tensors that differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from tests.helpers.exports import export, raw
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8, Nvfp4

Stored = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
MX = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed_tensors(strategy: str) -> Callable[[torch.Tensor], Pair]:
    """The quantiser of compressed-tensors with a strategy."""

    def quantised(x: torch.Tensor) -> Pair:
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy)
        dims = (1,) if strategy == "channel" else (0, 1)
        low, high = x.float().amin(dims, keepdim=True), x.float().amax(dims, keepdim=True)
        scale, zero = calculate_qparams(low, high, args)
        return quantize(x.float(), scale, zero, args, dtype=torch.float8_e4m3fn), scale

    return quantised


def compressed_mxfp8(x: torch.Tensor) -> Pair:
    """MXFP8 as compressed-tensors stores it."""
    args = QuantizationArgs(**MX, scale_dtype=torch.uint8)
    groups = x.float().unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored = MXFP8QuantizationCompressor.compress({"weight": x.float(), "weight_scale": scale}, scheme)
    return stored["weight"], stored["weight_scale"]


def compressed_nvfp4(x: torch.Tensor) -> Stored:
    """NVFP4 as compressed-tensors stores it, by the last part of a tensor's name."""
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    assert scheme.weights is not None
    x = x.float()
    groups = x.unflatten(-1, (-1, 16))
    overall = generate_gparam(x.amin(), x.amax())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=overall)
    stored = {"weight": x.clone(), "weight_scale": scale, "weight_global_scale": overall}
    return NVFP4PackedCompressor.compress(stored, scheme)


def vllm_native(group: GroupShape) -> Callable[[torch.Tensor], Pair]:
    """vLLM's own quantisation, in PyTorch."""

    def quantised(x: torch.Tensor) -> Pair:
        return QuantFP8(static=False, group_shape=group).forward_native(x)

    return quantised


def weights() -> dict[str, torch.Tensor]:
    """Matrices of several sizes and magnitudes, with zeros."""
    torch.manual_seed(3)
    found = {f"l{n}.up_proj": torch.randn(32 + n, 64 * (n + 1)).bfloat16() * 10.0 ** (n - 2) for n in range(5)}
    found["l0.up_proj"][3] = 0
    found["l1.up_proj"] *= torch.logspace(-12, 3, found["l1.up_proj"].shape[0], 2)[:, None].bfloat16()
    found["l2.up_proj"][:, ::3] = 0
    found["zeros.up_proj"] = torch.zeros(4, 64).bfloat16()
    return found


def extremes() -> dict[str, torch.Tensor]:
    """Matrices with the largest values of float32, with subnormals, with zeros of both signs, and with ties."""
    torch.manual_seed(7)
    x = torch.randn(24, 64)
    x[0], x[1, :16], x[2] = 0, 0, -0.0
    x[3] = torch.logspace(-14, 1, 64, 2)
    limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for row, step in enumerate((0.0, 2.0**-10, -(2.0**-10)), 4):
        x[row, :7], x[row, 7:14], x[row, 14], x[row, 15] = limits + step, -limits - step, 6, -6
    x[7, 0] = 2688
    most, least = torch.finfo(torch.float32).max / 2688, torch.finfo(torch.float32).tiny / 64
    return {f"l{number}.down_proj": x * size for number, size in enumerate((1, most, least, 1e-30, 0))}


def differing_nvfp4(wanted: Stored) -> list[str]:
    """Names of the tensors that we store otherwise than compressed-tensors."""
    got = export(ModuleExporter(model_of(wanted), quantise=Nvfp4()), bucket_bytes=3_000)
    judged = {f"{name}.{part}": value for name, x in wanted.items() for part, value in compressed_nvfp4(x).items()}
    assert set(got) == set(judged)
    return [name for name, value in judged.items() if got[name] != raw(value)]


def differing(form: Fp8Format, judge: Callable[[torch.Tensor], Pair], wanted: dict[str, torch.Tensor]) -> list[str]:
    got = export(ModuleExporter(model_of(wanted), quantise=form), bucket_bytes=3_000)
    wrong: list[str] = []
    for name, tensor in wanted.items():
        q, scale = judge(tensor)
        pairs = ((f"{name}.weight", q), (f"{name}.weight_scale", scale))
        wrong += [key for key, value in pairs if got[key] != raw(value)]
    return wrong


def model_of(wanted: Stored) -> nn.Module:
    model = nn.Module()
    for name, tensor in wanted.items():
        path, _, last = name.partition(".")
        model.add_module(path, nn.Module())
        linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=tensor.dtype)
        linear.weight.data.copy_(tensor)
        model.get_submodule(path).add_module(last, linear)
    return model


def main() -> None:
    with set_current_vllm_config(VllmConfig()):
        found = weights()
        said = {
            "tensors, compressed-tensors": differing(Fp8Tensors(), compressed_tensors("tensor"), found),
            "channels, compressed-tensors": differing(Fp8Channels(), compressed_tensors("channel"), found),
            "mxfp8, compressed-tensors": differing(Mxfp8(), compressed_mxfp8, found),
            "nvfp4, compressed-tensors": differing_nvfp4(found),
            "nvfp4 at the edges, compressed-tensors": differing_nvfp4(extremes()),
            "tensors, vllm": differing(Fp8Tensors(reciprocal=True), vllm_native(GroupShape.PER_TENSOR), found),
            "channels, vllm": differing(Fp8Channels(reciprocal=True), vllm_native(GroupShape.PER_TOKEN), found),
            # The comparison can fail.
            "channels that divide, vllm": differing(Fp8Channels(), vllm_native(GroupShape.PER_TOKEN), found),
            # vLLM's own scale is half as large where the largest element is exactly 1.75 times a power of two.
            "mxfp8, vllm": differing(Mxfp8(), lambda x: _mxfp8_e4m3_quantize_torch(x.float()), without_ties(found)),
            "mxfp8 with ties, vllm": differing(Mxfp8(), lambda x: _mxfp8_e4m3_quantize_torch(x.float()), found),
        }
    print(json.dumps(said))


def without_ties(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices without zero groups, and without groups whose largest element is 1.75 times a power of two."""
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        groups = tensor.clone().unflatten(-1, (-1, 32))
        most = groups.abs().amax(-1, keepdim=True)
        mantissas = torch.frexp(most.float()).mantissa
        changed[name] = torch.where((mantissas == 0.875) | (most == 0), torch.ones_like(groups), groups).flatten(-2)
    return changed


if __name__ == "__main__":
    main()
