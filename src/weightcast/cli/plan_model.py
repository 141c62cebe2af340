"""The tensors of a checkpoint, or of a model that a ``config.json`` describes, for ``weightcast plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.cli.options import torch_dtype
from weightcast.errors import ConfigError
from weightcast.report import one_line

if TYPE_CHECKING:
    import torch

    from weightcast.exporters.checkpoint_layout import Stored
    from weightcast.exporters.mapping import Family
    from weightcast.exporters.segments import Arranged
    from weightcast.wire.layout import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """Tensors to plan for.

    Attributes:
        family: Table of names that was used; None for a checkpoint, which has its names already.
        not_covered: Tensors that no update contains, with the reason, one sentence each.
    """

    specs: Sequence[TensorSpec]
    family: str | None = None
    not_covered: tuple[str, ...] = ()


def model_at(model: Path, dtype: str | None, *, fp8: bool = False) -> PlannedModel:
    """Reads the tensors of a checkpoint, or those that a config describes, under a checkpoint's names.

    Args:
        model: A checkpoint (file or folder), a ``config.json``, or a folder that has only that.
        dtype: Dtype to cast floating-point tensors to; None keeps theirs.

    Raises:
        ConfigError: The path is neither, the dtype is unknown, or the family's experts have no known names.
    """
    config = model / "config.json" if model.is_dir() and not any(model.glob("*.safetensors*")) else model
    if config.suffix == ".json" and not config.name.endswith(".index.json") and config.is_file():
        found = _model_of_config(config, dtype)
    else:
        from weightcast.exporters.checkpoint import CheckpointExporter

        with CheckpointExporter(model, wire_dtype=torch_dtype(dtype)) as checkpoint:
            left_out = tuple(f"{name}: in the checkpoint, but engines do not load it" for name in checkpoint.skipped)
            found = PlannedModel(specs=checkpoint.specs(), not_covered=left_out)
    if not fp8:
        return found

    from weightcast.exporters.quantise import Fp8Blocks, quantised_specs

    return replace(found, specs=quantised_specs(found.specs, Fp8Blocks()))


def _model_of_config(config: Path, dtype: str | None) -> PlannedModel:
    import torch

    from weightcast.exporters.checkpoint_layout import Stored, arrange_as_saved

    wanted = torch_dtype(dtype)
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ModuleNotFoundError:
        raise ConfigError(
            "reading a config.json needs transformers, which is not installed",
            hint='pip install "weightcast[serve]", or give a checkpoint',
        ) from None
    try:
        settings = transformers.AutoConfig.from_pretrained(str(config))
        several = hasattr(settings, "vision_config")
        kind = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(settings)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError) as error:
        raise ConfigError(f"transformers cannot build a language model from {config}: {one_line(str(error))}") from None
    # A model built without weights has torch's default dtype; its checkpoint has the dtype of the config.
    written = getattr(settings, "dtype", None)
    wire = wanted or (written if isinstance(written, torch.dtype) else None)
    first: dict[int, str] = {}
    not_covered: list[str] = []
    stored: list[Stored] = []
    numbers: dict[int, int] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            not_covered.append(f"{name}: tied to {first[id(tensor)]}, sent once")
        else:
            first[id(tensor)] = name
            numbers[id(tensor)] = len(stored)
            stored.append(Stored(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype))
    text = getattr(settings, "text_config", settings)
    drafts = getattr(text, "num_nextn_predict_layers", None)
    if drafts:
        not_covered.append(f"{drafts} draft (MTP) layer{'s' if drafts > 1 else ''}: transformers' model has none")
    family, arranged = arrange_as_saved(model, stored, numbers, settings)
    return PlannedModel(
        specs=_specs_of(stored, arranged, family, wire),
        family=family.name,
        not_covered=tuple(not_covered),
    )


def _specs_of(
    stored: Sequence[Stored], arranged: Sequence[Arranged], family: Family, wire: torch.dtype | None
) -> list[TensorSpec]:
    import torch

    from weightcast.exporters import casting
    from weightcast.exporters.mapping import wire_dtype_of
    from weightcast.wire.layout import TensorSpec, dtype_name

    specs: list[TensorSpec] = []
    for found in arranged:
        # Tensors that a family never casts are float32 in its checkpoints; without weights they get the config's dtype.
        kept = wire_dtype_of(found.name, family, torch.float32) is None
        own = stored[found.segments[0].source].dtype
        dtype = torch.float32 if kept else casting.wire_dtype(own, wire)
        specs.append(TensorSpec(name=found.name, dtype=dtype_name(dtype), shape=found.shape))
    return specs
