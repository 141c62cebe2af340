"""Calls of the CUDA driver, for what torch does not offer.

cuda-bindings has them too, and no torch below 2.10 brings it.  ``tests/unit/test_driver_structs.py`` compares with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from weightcast.errors import WeightcastError


class DriverError(WeightcastError):
    """A call of the CUDA driver failed.

    Attributes:
        code: The driver's ``CUresult``; None without a driver.
    """

    code: int | None = None


def driver_call(name: str, *types: Any) -> Callable[..., None]:
    """Returns a function of the driver, which is loaded when the function is first called.

    The function raises ``DriverError`` with the driver's own words.

    Args:
        name: The function's name in ``libcuda.so.1``.
    """

    def call(*arguments: Any) -> None:
        function = getattr(_driver(), name)
        if function.argtypes is None:
            function.argtypes = types
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            _driver().cuGetErrorString(code, ctypes.byref(text))
            error = DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
            error.code = code
            raise error

    return call


@contextmanager
def current(device: torch.device) -> Generator[None]:
    """Makes the device's primary context current in this thread, which the driver, unlike the runtime, does not do."""
    with torch.cuda.device(device):  # restores the thread's device, but makes no context if it is the same device
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).query()
        yield


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
