"""The lowest version of vLLM that weightcast updates, for the plug-in in vLLM and for the trainer's adapter."""

from __future__ import annotations

import re

LOWEST_VLLM = (0, 25)
LOWEST_WORDS = ".".join(map(str, LOWEST_VLLM))
INSTALL_NEWER = f"install vLLM {LOWEST_WORDS} or newer"


def vllm_version(version: str) -> tuple[int, int] | None:
    """Major and minor number of ``"0.25.1"``; None for a development version such as ``0.1.dev7``, which is new."""
    found = re.match(r"(\d+)\.(\d+)\.\d", version)
    return (int(found[1]), int(found[2])) if found else None


def too_old(version: str) -> str:
    """Says that this version of vLLM is older than the lowest one; empty if it is not."""
    number = vllm_version(version)
    if number is None or number >= LOWEST_VLLM:
        return ""
    return f"vLLM {version} is older than {LOWEST_WORDS}, the lowest version that weightcast updates"
