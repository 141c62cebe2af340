"""Tiny random models in real Hugging Face folders, made in milliseconds: no downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A configuration whose heads, key-value heads and widths 1, 2 and 3 divide."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 8,
        "intermediate_size": 132,
        "num_hidden_layers": 2,
        "sliding_window": None,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "dtype": "float32",
    }
    return AutoConfig.for_model(family, **(settings | changes))


def tiny_model(folder: Path, *, family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Save a random model in `folder`; returns it.

    Weights are large enough that greedy answers differ between seeds and do not end at once.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    return model


def in_bfloat16(folder: Path) -> None:
    """Rewrite a checkpoint of one file as a release has it; engines' kernels of some layers take no float32."""
    file = folder / "model.safetensors"
    wide = load_file(file)
    narrow = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in wide.items()}
    save_file(narrow, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def tiny_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer with a chat template in `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", "what is two plus two?"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that transformers itself generates: `count` of them, past end-of-sequence tokens."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


def two_checkpoints(folder: Path, prompts: list[list[int]], count: int, **settings: Any) -> dict[str, list[list[int]]]:
    """Makes the checkpoints A and B in a folder; returns what transformers answers with each, which differs."""
    said: dict[str, list[list[int]]] = {}
    for seed, name in enumerate("AB"):
        model = tiny_model(folder / name, seed=seed, **settings)
        tiny_tokenizer(folder / name)
        said[name] = [greedy(model, prompt, count) for prompt in prompts]
    assert said["A"] != said["B"]
    return said
