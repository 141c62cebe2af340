"""Keeps other packages from starting processes in the exporters' tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers (RWKV) and PEFT (BOFT) start ``ninja`` to see whether they can compile kernels for GPUs."""
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: False)
    monkeypatch.setattr("transformers.models.rwkv.modeling_rwkv.is_ninja_available", lambda: False)
