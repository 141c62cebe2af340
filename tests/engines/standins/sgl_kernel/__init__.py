"""In the place of SGLang's CUDA kernels, which are imported by name on every machine and have no build for CPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any


def _beside(name: str) -> Any:
    """Imports a module beside this one; `__path__` is empty, so that no other submodule is found."""
    loader = SourceFileLoader(f"{__name__}._{name}", str(Path(__file__).with_name(f"{name}.py")))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


__version__ = "0.4.10"
__path__: list[str] = []
_speculative: Any = _beside("speculative")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    if hasattr(_speculative, name):
        return getattr(_speculative, name)

    def absent(*_: object, **__: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} has no CPU build; something wants it all the same")

    return absent


def _name_operators() -> None:
    """Names operators that models of SGLang look up when they are imported; a call of one fails as above."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):
        library.define(f"{name}(Tensor x) -> Tensor")
    _libraries.append(library)  # its operators end with it


_libraries: list[Any] = []
_name_operators()
