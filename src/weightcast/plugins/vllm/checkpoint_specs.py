"""Reads the checkpoint that vLLM was started with, for the names, dtypes and shapes of a full update."""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import get_model_loader

from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError
from weightcast.plugins.vllm.rank_protocol import is_dummy
from weightcast.wire.layout import TensorSpec


class CheckpointSpecs:
    """The tensors of the checkpoint, known once ``weights`` has been read to its end.

    Attributes:
        specs: The tensors of a full update, in the order of the checkpoint.
        left_out: Names of the tensors that no update contains.
        heads: Digests of tensors with a row for each word, by name, if vLLM may drop one that equals another.
        dummy: True if vLLM was started with random weights, so that the checkpoint's values are not in the model.
    """

    def __init__(self, vllm_config: Any, model: nn.Module, *, not_updated: str = "") -> None:
        """Reads nothing yet.  ``not_updated`` is the setting of this name."""
        self._config = vllm_config.model_config
        self._load_config = vllm_config.load_config
        self._model = model
        self.dummy = is_dummy(vllm_config)
        self._not_updated = not_updated
        self.specs: list[TensorSpec] = []
        self.left_out: list[str] = []
        self.heads: dict[str, str] = {}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor.  vLLM maps safetensors files, so bytes that nobody looks at are not read.

        Raises:
            ConfigError: vLLM was started without a checkpoint.
        """
        words = self._config.get_vocab_size() if self._may_tie() else -1
        config = dataclasses.replace(self._load_config, load_format="auto") if self.dummy else self._load_config
        loader = get_model_loader(config)
        if not hasattr(loader, "get_all_weights"):
            raise ConfigError(f"load format {self._load_config.load_format} has no checkpoint to read")
        try:
            for name, tensor in loader.get_all_weights(self._config, self._model):
                if self._not_updated and re.fullmatch(self._not_updated, name):
                    self.left_out.append(name)
                    yield name, tensor
                    continue
                self.specs.append(TensorSpec.of(name, tensor))
                if tensor.ndim == 2 and tensor.shape[0] == words:
                    self.heads[name] = tensor_digest(tensor)
                yield name, tensor
        except (RuntimeError, OSError) as error:
            if not self.dummy:
                raise
            raise _no_names(f"{self._config.model} has no readable checkpoint: {error}") from error
        if not self.specs and not self.left_out:
            raise _no_names("vLLM was started without a checkpoint")
        self._check_left_out()

    def _check_left_out(self) -> None:
        if not self._not_updated:
            return
        setting = f"the setting not_updated, {self._not_updated!r},"
        hint = "it is a regular expression for whole names of the checkpoint's tensors"
        if not self.left_out or not self.specs:
            raise ConfigError(f"{setting} matches {'every' if self.left_out else 'no'} tensor", hint=hint)
        if self.dummy:
            raise ConfigError(
                f"{setting} would leave random weights in {self.left_out[0]} (--load-format dummy)",
                hint="start vLLM with the checkpoint's weights",
            )

    def read_specs(self) -> None:
        """Reads names, dtypes and shapes only."""
        for _ in self.weights():
            pass

    def _may_tie(self) -> bool:
        """Returns whether vLLM may drop a stored head because it equals the word embeddings."""
        text = self._config.hf_config.get_text_config()
        untied = getattr(self._config, "word_embeddings_untied_by_checkpoint", False)
        return bool(untied or getattr(text, "tie_word_embeddings", False))


def _no_names(why: str) -> ConfigError:
    return ConfigError(
        f"{why}, so the names of its weights are unknown",
        hint="start vLLM from a folder with the checkpoint's safetensors files; with --load-format dummy "
        "weightcast reads their headers only",
    )
