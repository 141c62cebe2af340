"""``weightcast`` in a process with OpenTelemetry's SDK, which writes each span as a line into a file.

The file is ``spans-PID.jsonl`` in the folder that ``SPANS_FOLDER`` names.  An application, or the program
``opentelemetry-instrument``, sets the SDK up in the same way.
"""

from __future__ import annotations

import os
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace import set_tracer_provider

from weightcast.__main__ import main as weightcast


def main() -> int:
    """Runs the command of this process's arguments."""
    path = Path(os.environ["SPANS_FOLDER"]) / f"spans-{os.getpid()}.jsonl"
    provider = TracerProvider()
    with path.open("w", buffering=1) as lines:
        exporter = ConsoleSpanExporter(out=lines, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        set_tracer_provider(provider)
        return weightcast()
