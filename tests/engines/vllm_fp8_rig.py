"""Runs under a Python that has vLLM: real fp8 models of vLLM on a CPU, updated by our plug-in's classes.

    python -m tests.engines.vllm_fp8_rig '[["blocks", FIRST, SECOND], ...]'

For each case a model is loaded from FIRST by vLLM's own loader, with vLLM's own layers and quantisation methods, and
updated to SECOND as the receiver does it.  Everything that its layers and kernels hold is then compared, bit by bit,
with a model that vLLM loads from SECOND.  What needs a GPU is put in from outside: the quantising kernel, a kernel for
blocks (which has vLLM's own processing of weights), the choice of a kernel for experts, and for NVFP4 and MXFP8 the
call that brings a matrix into Marlin's order.  Prints one JSON list.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mxfp8.marlin import MarlinMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as blocks
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_mxfp8 as mxfp8_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as compressed_nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a8_mxfp8 as compressed_mxfp8,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.layers.quantization.online import mxfp8
from vllm.model_executor.model_loader import get_model
from vllm.platforms import PlatformEnum

from tests.helpers.models import buckets_of
from tests.helpers.vllm_held import digest, held
from weightcast.comm.ports import quiet_port
from weightcast.digest.copies import bits
from weightcast.errors import ConfigError, WeightcastError
from weightcast.plugins.vllm.layer_kinds import QUANTISED
from weightcast.plugins.vllm.loaded_models import CheckpointSpecs
from weightcast.plugins.vllm.unpacked_model import UnpackedModel
from weightcast.receiver.loader import Loader

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "swizzled": {},
    "tensors": {},
    "static": {},
    "channels": {},
    "mxfp8-stored": {},
    "nvfp4-stored": {},
    "mxfp8-other": {},
    "nvfp4-other": {},
    "dummy": {"load_format": "dummy"},
    "online": {"quantization": "fp8"},
    "online-blocks": {"quantization": "fp8_per_block"},
    "online-channels": {"quantization": "fp8_per_channel"},
    "mxfp8": {"quantization": "mxfp8"},
    "nvfp4": {},  # a method of vLLM's, put into a layer
}


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's kernel: one scale for the tensor or, if asked, for each row."""
    x = input.float()
    if scale is None:
        most = x.abs().amax(dim=-1, keepdim=True) if use_per_token_if_dynamic else x.abs().amax().view(1)
        scale = (most / MOST).clamp_min(1e-12)
    return (x / scale).clamp(-MOST, MOST).to(FP8), scale


class Blocks(blocks.Fp8BlockScaledMMLinearKernel):
    """A kernel with vLLM's own processing of weights."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        raise NotImplementedError("this rig compares what kernels hold, and computes no answers")


class Swizzled(Blocks):
    """A kernel that brings scales into another layout, as DeepGEMM's and swizzled ones are."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        scale = layer.weight_scale_inv
        layer.weight_scale_inv = nn.Parameter(scale.data.t().contiguous().t(), requires_grad=False)
        layer.swizzled = torch.cat([scale.data.flatten(), scale.data.flatten().flip(0)])


def marlin_order(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> torch.Tensor:
    """Another order of a matrix, of the shape that Marlin's has: ``(size_k / 16, size_n * num_bits / 2)``."""
    return b_q_weight.reshape(size_k // 16, size_n * num_bits // 2).flip(0).contiguous()


def on_this_cpu(kernel: type[Blocks], *, marlin: bool) -> None:
    ops.gptq_marlin_repack = marlin_order
    ops.scaled_fp8_quant = scaled_fp8_quant
    torch.accelerator.empty_cache = lambda: None
    for name in dir(linear):
        table = getattr(linear, name)
        if name.startswith("_POSSIBLE") and "BLOCK" in name and isinstance(table, dict):
            table[PlatformEnum.CPU] = [kernel]
    other = SimpleNamespace(process_weights_after_loading=lambda layer: None, input_quant_key=lambda: None)
    for module in (mxfp8, compressed_mxfp8):
        module.init_mxfp8_linear_kernel = lambda *_, **__: object.__new__(MarlinMxfp8LinearKernel) if marlin else other
    compressed_nvfp4.init_nvfp4_linear_kernel = lambda **_: object.__new__(MarlinNvFp4LinearKernel) if marlin else other
    nvfp4_experts.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.MARLIN, MarlinExperts)
    mxfp8_experts.select_mxfp8_moe_backend = lambda **_: (Fp8MoeBackend.MARLIN, MarlinExperts)
    for module in (fp8, online, compressed_experts):
        module.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, TritonExperts)


def configured(folder: Path, case: str) -> VllmConfig:
    args = EngineArgs(
        str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=2, **OPTIONS[case]
    )
    return args.create_engine_config()


def digests(model: nn.Module) -> dict[str, str]:
    return {path: digest(tensor) for path, tensor in held(model).items()}


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def outcome(case: str, first: Path, second: Path) -> dict[str, object]:
    on_this_cpu(Swizzled if case == "swizzled" else Blocks, marlin=not case.endswith("-other"))
    config = configured(first, case)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{quiet_port()}", 0, "gloo")
        destroy_model_parallel()
        initialize_model_parallel(1, 1)  # experts have a group of their own
        model = get_model(vllm_config=config)
        if case == "nvfp4":
            model.model.layers[0].mlp.down_proj.quant_method = object.__new__(ModelOptNvFp4FusedMoE)
        methods = {type(layer.quant_method).__name__ for layer in model.modules() if hasattr(layer, "quant_method")}
        addresses = {path: tensor.data_ptr() for path, tensor in held(model).items() if tensor.dim()}
        before = digests(model)
        try:
            unpacked = UnpackedModel(model, device=torch.device("cpu"))
        except ConfigError as error:
            return {"refused": str(error), "methods": sorted(methods)}
        checkpoint = CheckpointSpecs(config, model)
        if checkpoint.dummy:
            checkpoint.read_specs()
            unpacked.fill_randomly()
        else:
            unpacked.load_weights(checkpoint.weights())
            unpacked.check_layouts()
        untouched = differing(before, digests(model))
        loader = Loader(
            model,
            load_weights=unpacked.load_weights,
            expected=checkpoint.specs,
            finishers=[unpacked.pack],
            residents=unpacked.residents,
        )
        loader.expect_kept_dtypes()
        loader.stage("device", keep_storage=True)
        at_first = digests(model)
        other = CheckpointSpecs(configured(second, case), model)
        weights = {name: tensor.clone() for name, tensor in other.weights()}

        def push() -> None:
            buckets = buckets_of(weights, bucket_bytes=1 << 20)
            loader.check([slot.spec for bucket in buckets for slot in bucket.layout.slots])
            loader.begin()
            for bucket in buckets:
                loader.load(bucket)

        push()
        said: dict[str, object] = {
            "methods": sorted(methods),
            "changed at the start": untouched,
            "before the commit": differing(at_first, digests(model)),
            "computed": sorted(loader.computed),
            "not updated": [name for name in loader.not_updated if name not in unpacked.constants],
            "skipped": sorted(loader.skipped),
            "beside": unpacked.quantised_bytes,
        }
        loader.live.commit()
        unpacked.check()
        updated = digests(model)
        said["moved"] = [
            path for path, tensor in held(model).items() if addresses.get(path, 0) not in (0, tensor.data_ptr())
        ]
        loader.live.undo()
        said["after the undo"] = differing(at_first, digests(model))
        push()
        loader.live.commit()
        said["second time"] = differing(updated, digests(model))
        said["stale"] = stale(unpacked)
        fresh = get_model(vllm_config=configured(second, "tensors" if case == "dummy" else case))
        said["unlike a fresh model"] = differing(updated, digests(fresh))
        said["changed by the update"] = len(differing(at_first, updated))
        return said


def stale(unpacked: UnpackedModel) -> str:
    """The error if a tensor of a kernel is not the derived one."""
    layer = next(layer for layer in unpacked.derivation.layers if layer.kind is QUANTISED)
    if not layer.derived:
        return "nothing is derived"
    target = next(iter(layer.derived.values()))
    bits(target.data)[(0,) * target.dim()] ^= 1
    try:
        unpacked.check()
    except WeightcastError as error:
        return str(error)
    return "not seen"


if __name__ == "__main__":
    gc.freeze()  # vLLM's loader collects garbage for each model, and would look at all that was imported
    print(json.dumps([outcome(case, Path(first), Path(second)) for case, first, second in json.loads(sys.argv[1])]))
