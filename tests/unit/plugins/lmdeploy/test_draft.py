"""The head of an LMDeploy worker as a part of an update, on a stand-in with LMDeploy's loader of EAGLE 3 heads."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.lmdeploy.rank import LmdeployDraft
from weightcast.receiver.loader import Loader
from weightcast.wire.layout import TensorSpec

WORDS, WIDTH = 40, 4
CHECKPOINT = {
    "fc.weight": torch.randn(WIDTH, 2 * WIDTH),
    "lm_head.weight": torch.randn(3, WIDTH),
    "d2t": torch.tensor([0, 32, 34]),
    "t2d": torch.zeros(WORDS, dtype=torch.bool),
}


class Head(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embeddings
        self.fc = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, 3, bias=False)
        self.draft_id_to_target_id = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "d2t":
                tensor += torch.arange(3)
                self.draft_id_to_target_id.data.copy_(tensor)
            elif name != "t2d":
                self.get_parameter(name).data.copy_(tensor)


class Tidy(Head):
    """Keeps a tensor beside its parameters."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "fc.weight":
                self.kept = tensor
            super().load_weights([(name, tensor)])


class Doubling(Head):
    """Computes a weight."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor * 2 if name == "fc.weight" else tensor) for name, tensor in weights)


class Proposer:
    """Keeps of the table what LMDeploy keeps of it."""

    def __init__(self, model: Head, **config: Any) -> None:
        self.model = model
        self.specdecode_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)))
        self.draft_id_to_target_id = model.draft_id_to_target_id
        self._init_bitmask_translate_constants()

    def _init_bitmask_translate_constants(self) -> None:
        self._d2t_words, self._d2t_bits = self.draft_id_to_target_id // 32, self.draft_id_to_target_id % 32


def model_with_embeddings() -> nn.Module:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(WORDS, WIDTH)
    return model


def load(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    model.load_weights(weights)


def draft_of(kind: type[Head], more: dict[str, torch.Tensor] | None = None, **config: Any) -> tuple[LmdeployDraft, Any]:
    model = model_with_embeddings()
    embeddings: Any = model.embed_tokens
    head = kind(embeddings)
    checkpoint = CHECKPOINT | (more or {})
    with torch.no_grad():
        head.load_weights((name, tensor.clone()) for name, tensor in checkpoint.items())
    proposer = Proposer(head, **config)
    return LmdeployDraft(proposer, model, load=load, checkpoint=lambda: iter(checkpoint.items())), proposer


def test_an_update_writes_what_is_the_heads_own_and_renews_what_comes_of_its_table() -> None:
    draft, proposer = draft_of(Head)
    head = proposer.model
    assert set(draft.residents) == {"draft.fc.weight", "draft.lm_head.weight", "draft.d2t"}
    specs = [TensorSpec.of(f"draft.{name}", tensor) for name, tensor in CHECKPOINT.items()]
    loader = Loader(nn.Module(), load_weights=draft.load_weights, expected=specs, residents=draft.residents)
    assert loader.skipped == {"draft.t2d"}
    assert not loader.computed
    assert head.draft_id_to_target_id.tolist() == [0, 33, 36], "to record the loader must change nothing"
    lent = head.embed_tokens.weight.detach().clone()

    new = {f"draft.{name}": tensor + 1 if tensor.dtype != torch.bool else tensor for name, tensor in CHECKPOINT.items()}
    with torch.no_grad():
        draft.load_weights(new.items())
    with pytest.raises(EngineFailure, match=r"another table than draft\.d2t"):
        draft.check()
    draft.renew()
    draft.check()
    assert head.draft_id_to_target_id.tolist() == [1, 34, 37]
    assert (proposer._d2t_words * 32 + proposer._d2t_bits).tolist() == [1, 34, 37]
    assert torch.equal(head.fc.weight, new["draft.fc.weight"])
    assert torch.equal(head.embed_tokens.weight, lent), "they are the model's"
    assert CHECKPOINT["d2t"].tolist() == [0, 32, 34], "LMDeploy's own loader adds to the tensor that it is given"


@pytest.mark.parametrize(
    ("kind", "words"), [(Tidy, "keeps kept, which an update"), (Doubling, r"computes with fc\.weight, which an update")]
)
def test_a_head_whose_loader_does_more_is_refused(kind: type[Head], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        draft_of(kind)
    assert "WEIGHTCAST_DRAFT" in (caught.value.hint or "")


def test_a_head_that_writes_into_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight would be loaded into the model's embed_tokens"):
        draft_of(Head, {"embed_tokens.weight": torch.randn(WORDS, WIDTH)})


def test_a_quantised_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="the draft is quantised"):
        draft_of(Head, quantization_config={"quant_method": "fp8"})
