"""Real vLLM on a GPU with our receiver, and models whose layers or kernels keep copies of weights there.

vLLM comes from where ``test_vllm_gpu`` has it from.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.servers import Record, pushed
from tests.gpu.test_vllm_gpu import SITE, Vllm, vllm
from tests.gpu.test_vllm_gpu import pytestmark as needs_vllm
from tests.helpers.tiny import in_bfloat16, tiny_model, tiny_tokenizer

pytestmark = [*needs_vllm[:-1], pytest.mark.timeout(500)]

SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}
GPT_OSS = SMALL | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
DELTA = SMALL | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 1.0,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LATENT = SMALL | {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}


def has_flash_attention() -> bool:
    """True if vLLM has its kernels for Hopper; a build that must be small leaves them out."""
    found = importlib.util.find_spec("vllm")
    package = Path(SITE) / "vllm" if SITE else Path((found.origin if found else None) or "").parent
    return any((package / "vllm_flash_attn").glob("_vllm_fa3_C*.so"))


needs_flash_attention = pytest.mark.skipif(not has_flash_attention(), reason="this vLLM has no FlashAttention 3")


@pytest.mark.parametrize(
    ("family", "settings", "flags"),
    [
        # Attention sinks and biases of experts, which kernels hold.
        pytest.param("gpt_oss", GPT_OSS, ["--attention-backend=TRITON_ATTN"], id="gpt-oss"),
        # What vLLM chooses for it on a Hopper GPU.
        pytest.param("gpt_oss", GPT_OSS, [], id="gpt-oss, flash attention", marks=needs_flash_attention),
        # Convolutions and gates of linear attention, beside attention and experts.  By default FlashInfer's kernel
        # is compiled at the first request, which takes more than a test may.
        pytest.param(
            "qwen3_next",
            DELTA,
            ["--attention-backend=TRITON_ATTN", "--gdn-prefill-backend=triton"],
            id="qwen3-next",
        ),
        # Matrices that attention absorbs from kv_b_proj after loading.
        pytest.param(
            "deepseek_v3", LATENT, ["--attention-backend=TRITON_MLA"], id="deepseek-v3", marks=needs_flash_attention
        ),
    ],
)
def test_what_kernels_hold_is_updated_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: Record,
    family: str,
    settings: dict[str, Any],
    flags: list[str],
) -> None:
    monkeypatch.setattr("tests.gpu.test_vllm_gpu.FLAGS", [*flags, "--dtype=bfloat16"])
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        tiny_model(folder, family=family, seed=seed, **settings)
        tiny_tokenizer(folder)
        in_bfloat16(folder)
    common: dict[str, Any] = {"backend": "weightcast", "gpus": [0], "eager": False}
    with (
        vllm(folders[0], tmp_path / "updated.log", **common) as server,
        vllm(folders[1], tmp_path / "other.log", **common) as other,
    ):
        server.wait_ready()
        other.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        answers = [Vllm().answers(server), Vllm().answers(other)]
        assert all(old != new for old, new in zip(*answers, strict=True))
        rows: list[dict[str, Any]] = []
        for version, index in ((1, 1), (2, 0), (3, 1)):
            row = pushed(server, folders[index], version)
            assert row["proof"] == "resident", row
            assert Vllm().answers(server) == answers[index]
            rows.append(row)
        record("rows", rows)
