"""A plug-in of vLLM that makes LoRA wrappers hide their layers from ``load_weights``, as those of vLLM 0.25 do."""

from __future__ import annotations

from pathlib import Path

ENTRY = "old_lora"


def install() -> None:
    """Takes the method away that hands weights on."""
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        del BaseLayerWithLoRA.load_weights


def metadata(folder: Path) -> Path:
    """A folder for a ``PYTHONPATH`` on which vLLM finds this plug-in."""
    inside = folder / "old_lora-0.dist-info"
    inside.mkdir(parents=True)
    (inside / "METADATA").write_text("Metadata-Version: 2.1\nName: old-lora\nVersion: 0\n")
    (inside / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{ENTRY} = {__name__}:install\n")
    return folder
