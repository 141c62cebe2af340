"""Checkpoints in fp8, made from wider ones: by plain arithmetic, by which others are judged, or by our exporters."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.exports import export
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks, Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8, Nvfp4

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
BLOCK = 128
QUANTISED = re.compile(r".*_proj\.weight")
Kind = Literal["blocks", "tensors", "static"]
EXPORTED: dict[str, Fp8Format] = {
    "exported-blocks": Fp8Blocks(),
    "exported-tensors": Fp8Tensors(),
    "exported-scalars": Fp8Tensors(scalar=True),
    "exported-channels": Fp8Channels(),
    "exported-mxfp8": Mxfp8(),
    "exported-nvfp4": Nvfp4(),
}


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the whole matrix."""
    scale = _over_most(weight.float().abs().amax())
    return (weight.float() / scale).clamp(-MOST, MOST).to(FP8), scale


def _over_most(largest: torch.Tensor) -> torch.Tensor:
    """Divides as a CPU does: by a number, torch on a GPU multiplies by its reciprocal, and the last bit may differ."""
    return largest / torch.tensor(MOST, device=largest.device)


def by_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each block of 128 x 128."""
    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight.float()
    scale = padded.view(high, BLOCK, wide, BLOCK).abs().amax(dim=(1, 3))
    scale = _over_most(scale)
    scale = torch.where(scale == 0, 1.0, scale)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return (weight.float() / spread).clamp(-MOST, MOST).to(FP8), scale


def config_of(kind: Kind, wide: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of such a checkpoint.

    Args:
        kind: How it is quantised.
        wide: Names of the modules whose matrices are not.
    """
    found: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if kind == "static" else "dynamic"}
    found["modules_to_not_convert"] = wide
    return found | ({"weight_block_size": [BLOCK, BLOCK]} if kind == "blocks" else {})


def exported_checkpoint(source: Path, target: Path, form: Fp8Format) -> None:
    """Writes the checkpoint ``source`` as our exporter sends the model, with the configuration that it gives."""
    from transformers import AutoModelForCausalLM

    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, target / file.name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    exporter = ModuleExporter(model, quantise=form)
    got = export(exporter)
    tensors = {
        spec.name: torch.frombuffer(bytearray(got[spec.name]), dtype=spec.torch_dtype).view(spec.shape)
        for spec in exporter.specs()
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = form.quantization_config(exporter.specs())
    (target / "config.json").write_text(json.dumps(config))


def fp8_checkpoint(source: Path, target: Path, kind: Kind, *, device: str = "cpu") -> None:
    """Writes the checkpoint ``source`` in fp8; its matrices of attention, MLPs and experts are quantised."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, target / file.name)
    wide: list[str] = []
    for file in sorted(source.glob("*.safetensors")):
        found: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file, device=device).items():
            if not QUANTISED.fullmatch(name):
                found[name] = tensor.bfloat16()
                if tensor.dim() == 2:
                    wide.append(name.removesuffix(".weight"))
                continue
            quantised, scale = by_block(tensor.bfloat16()) if kind == "blocks" else by_tensor(tensor.bfloat16())
            found[name] = quantised
            found[f"{name}_scale_inv" if kind == "blocks" else f"{name}_scale"] = scale
            if kind == "static":
                found[name.removesuffix("weight") + "input_scale"] = scale * 3
        save_file({name: tensor.cpu() for name, tensor in found.items()}, target / file.name, {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": config_of(kind, wide)}
    (target / "config.json").write_text(json.dumps(config))
