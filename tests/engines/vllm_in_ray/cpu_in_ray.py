"""Entry point of a platform plug-in of vLLM's, for tests.  It imports nothing: vLLM asks while it is being imported."""

from __future__ import annotations


def platform() -> str:
    """Returns the name of the platform."""
    return "ray_platform.CpuInRay"
