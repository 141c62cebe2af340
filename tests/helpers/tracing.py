"""OpenTelemetry's SDK in one test: spans in memory, and their tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler


@contextmanager
def spans_in_memory(monkeypatch: pytest.MonkeyPatch, sampler: Sampler | None = None) -> Iterator[InMemorySpanExporter]:
    """Makes an SDK the process's own; a process can set its provider only once, so this goes past the setter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def plain(span: ReadableSpan) -> dict[str, Any]:
    """A span as plain values, with ids as numbers."""
    assert span.context is not None
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": None if span.parent is None else span.parent.span_id,
        "values": dict(span.attributes or {}),
        "events": [(event.name, dict(event.attributes or {})) for event in span.events],
        "began": span.start_time,
        "ended": span.end_time,
        "error": span.status.description if not span.status.is_ok and span.status.description else None,
        "kind": span.kind.name,
    }


def tree(spans: list[dict[str, Any]], parent: int | None = None) -> list[Any]:
    """Names of spans as nested lists, sorted: ``[name, child, child ...]``."""
    found = [span for span in spans if span["parent"] == parent]
    return sorted([span["name"], *tree(spans, span["id"])] for span in found)
