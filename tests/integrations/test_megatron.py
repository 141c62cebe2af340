"""A real Megatron-Core model over tensor, expert and pipeline ranks, through the real mbridge, into an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.engines import engines
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from tests.integrations.environment import trainer_python
from tests.integrations.script import run_script
from weightcast.digest.definition import tensor_digest

pytestmark = [pytest.mark.engine_full]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
PROMPT = [5, 17, 99, 3, 250]


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp"),
    [pytest.param(2, 1, 2, 2, id="tp2-ep2"), pytest.param(2, 2, 2, 1, id="tp2-pp2-ep2")],
)
def test_engine_computes_what_megatron_computes(tmp_path: Path, tp: int, pp: int, ep: int, etp: int) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    model = tiny_model(folder, family="qwen3_moe", seed=2, **EXPERTS)  # its configuration; its weights are not used
    tiny_model(other, family="qwen3_moe", seed=1, **EXPERTS)
    tiny_tokenizer(other)
    with engines(other, tmp_path, {}) as (engine,):
        before = engine.digests()
        said = run_script(
            trainer_python("megatron-core-0.16.1"),
            "megatron_run",
            *(tp, pp, ep, etp, folder, engine.url),
            folder=tmp_path,
        )
        after = engine.digests()
        info = engine.info()
        (answer,) = engine.greedy([PROMPT], 12)

    assert said["megatron"] == "0.16.1"
    assert [update["proof"] for update in said["updates"]] == ["resident", "resident"]
    assert info["version"] == 2
    held = torch.load(folder / "held.pt")
    assert after == {name: tensor_digest(tensor) for name, tensor in held.items()}
    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())
    # transformers computes the same from these weights, and so does Megatron's own forward pass.
    model.load_state_dict(_fused(held, model))
    assert answer == greedy(model, PROMPT, 12)
    if pp == 1:
        assert answer == said["updates"][-1]["tokens"]


def _fused(held: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The names of a checkpoint, in the layout of transformers' own module, which stacks experts."""
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if name in held:
            state[name] = held[name]
            continue
        prefix, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        state[name] = torch.stack(
            [
                torch.cat([held[f"{prefix}.{expert}.{part}.weight"] for part in parts])
                for expert in range(tensor.shape[0])
            ]
        )
    return state
