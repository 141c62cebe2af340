"""Path at which an engine gives chunks of its weights to another engine."""

from __future__ import annotations

CHUNK = "/weightcast/chunk"
