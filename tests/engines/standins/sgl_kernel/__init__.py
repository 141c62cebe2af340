"""In the place of SGLang's CUDA kernels, which are imported by name on every machine and have no build for CPUs."""

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} has no CPU build; something wants it all the same")

    return absent
