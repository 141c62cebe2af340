"""Paths at which an engine gives chunks of its weights to another engine, and tells which boxes its ranks want."""

from __future__ import annotations

CHUNK = "/weightcast/chunk"
BOXES = "/weightcast/boxes"
