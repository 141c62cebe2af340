"""The draft of an SGLang rank, with a model that has the habits of SGLang's EAGLE 3 heads."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.drafts import apart
from weightcast.plugins.sglang.rank import SglangDraft
from weightcast.receiver.loader import Loader
from weightcast.wire.layout import TensorSpec

WORDS, WIDTH, KNOWN = 8, 4, 3
CHECKPOINT = {
    "embed_tokens.weight": torch.full((WORDS, WIDTH), 5.0),
    "fc.weight": torch.arange(16.0).view(WIDTH, WIDTH),
    "lm_head.weight": torch.ones(KNOWN, WIDTH),
    "d2t": torch.tensor([0, 2, 3]),
    "t2d": torch.tensor([True, False, False, True, False, True, False, False]),
}


class Head(nn.Module):
    """As SGLang's: it loads embeddings that are later replaced, and adds numbers to ``d2t``."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.model.fc = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, KNOWN, bias=False)
        self.hot_token_id: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if "d2t" in name:
                self.hot_token_id = tensor + torch.arange(len(tensor))
            elif "t2d" not in name:
                parameters[name if name in parameters else f"model.{name}"].data.copy_(tensor)


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


def runner_of(kind: type[Head]) -> Any:
    model = kind()
    with torch.no_grad():
        model.load_weights(CHECKPOINT.items())
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(quantization=None),
        server_args=SimpleNamespace(speculative_algorithm="EAGLE3"),
        loader=SimpleNamespace(_get_all_weights=lambda config, model: iter(CHECKPOINT.items())),
    )


def scheduler_of(runner: Any, *, shares: bool = True) -> Any:
    """SGLang once it is ready: it has lent the model's embeddings to the head."""
    target = nn.Module()
    target.embed_tokens = nn.Embedding(WORDS, WIDTH)
    embedding = target.embed_tokens.weight
    runner.model.model.embed_tokens.weight = embedding if shares else nn.Parameter(embedding.detach().clone())
    worker = SimpleNamespace(draft_runner=runner, hot_token_id=runner.model.hot_token_id.clone())
    return SimpleNamespace(
        draft_worker=SimpleNamespace(draft_worker=worker),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
    )


def test_an_update_writes_what_is_the_heads_own_and_renews_what_comes_of_its_table() -> None:
    runner = runner_of(Head)
    draft = SglangDraft(runner)
    words = runner.model.hot_token_id
    assert set(draft.residents) == {"draft.model.fc.weight", "draft.lm_head.weight", "draft.d2t"}
    scheduler = scheduler_of(runner)
    draft.attach(scheduler)
    lent = runner.model.model.embed_tokens.weight.detach().clone()
    specs = [TensorSpec.of(f"draft.{name}", tensor) for name, tensor in draft.checkpoint()]
    loader = Loader(nn.Module(), load_weights=draft.load_weights, expected=specs, residents=draft.residents)
    assert loader.skipped == {"draft.embed_tokens.weight", "draft.t2d"}
    assert not loader.computed
    assert runner.model.hot_token_id is words, "to record the loader must change nothing"

    new = {f"draft.{name}": tensor + 1 if tensor.dtype != torch.bool else tensor for name, tensor in CHECKPOINT.items()}
    with torch.no_grad():
        draft.load_weights(new.items())
    with pytest.raises(EngineFailure, match=r"another table than draft\.d2t"):
        draft.check()
    draft.renew()
    draft.check()
    worker = scheduler.draft_worker.draft_worker
    assert worker.hot_token_id.tolist() == runner.model.hot_token_id.tolist() == [1, 4, 6]
    assert torch.equal(runner.model.model.fc.weight, new["draft.fc.weight"])
    assert torch.equal(runner.model.model.embed_tokens.weight, lent), "they are the model's"


@pytest.mark.parametrize(
    ("kind", "words"), [(Tidy, "keeps kept, which an update"), (Doubling, r"computes with fc\.weight, which an update")]
)
def test_a_head_whose_loader_does_more_is_refused(kind: type[Head], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        SglangDraft(runner_of(kind))
    assert "WEIGHTCAST_DRAFT" in (caught.value.hint or "")


def test_a_head_with_a_copy_of_the_models_embeddings_is_refused() -> None:
    runner = runner_of(Head)
    draft = SglangDraft(runner)
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight that is not the model's"):
        draft.attach(scheduler_of(runner, shares=False))


def test_a_head_whose_own_tensor_was_replaced_is_refused() -> None:
    runner = runner_of(Head)
    draft = SglangDraft(runner)
    scheduler = scheduler_of(runner)
    runner.model.lm_head.weight = nn.Parameter(torch.ones(KNOWN, WIDTH))
    with pytest.raises(ConfigError, match=r"in the place of the draft's lm_head\.weight"):
        draft.attach(scheduler)


def test_tensors_are_handed_out_one_by_one() -> None:
    taken: list[str] = []

    def weights() -> Iterable[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "draft.a", "draft.b"):
            taken.append(name)
            yield name, torch.zeros(1)

    of_model, of_draft = apart(weights())
    assert next(iter(of_model))[0] == "a"
    assert taken == ["a"]
    assert [name for name, _ in of_model] == ["b"]
    assert [name for name, _ in of_draft] == ["draft.a", "draft.b"]
