"""Weights of each version, the same in every process, so that any process can check what an engine serves.

Version 0 is the checkpoint.  Every other version is the checkpoint plus noise that depends on the version only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcast.digest.definition import tensor_digest

_NOISE = 0.5  # share of a tensor's standard deviation: versions must give different answers


class Versions:
    """A transformers causal LM, in float32 on the CPU, that can be set to any version."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        loader: Any = AutoModelForCausalLM
        self.model: nn.Module = loader.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        self.current = 0
        self._first = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def set(self, version: int) -> None:
        """Sets the model's parameters to a version."""
        if version == self.current:
            return
        self.current = version
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self.model.named_parameters()):
                first = self._first[name]
                parameter.copy_(first)
                if version and first.numel() > 1:
                    generator = torch.Generator().manual_seed(version * 1_000_003 + number)
                    parameter.add_(torch.randn(first.shape, generator=generator) * first.std() * _NOISE)

    def digests(self, version: int) -> dict[str, str]:
        """Returns the fast digest of each parameter in float32, by name."""
        self.set(version)
        return {name: tensor_digest(parameter.detach()) for name, parameter in self.model.named_parameters()}


def make_tiny_model(folder: Path) -> None:
    """Saves a random Llama of 300,000 parameters and a byte tokenizer, in a second and without a download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    configs: Any = AutoConfig
    maker: Any = AutoModelForCausalLM
    config = configs.for_model(
        "llama",
        vocab_size=512,
        hidden_size=96,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=8,
        intermediate_size=132,
        num_hidden_layers=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = maker.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)  # large enough that greedy answers differ
    model.save_pretrained(folder)
    parts: Any = Tokenizer(models.BPE())
    parts.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=parts, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
