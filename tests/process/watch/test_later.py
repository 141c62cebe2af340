"""Work that listeners put off, at the end of a process and after a fork."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.watch.test_later import PATIENCE_S


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S * 4)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


TRACED = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import set_tracer_provider
from tests.helpers.watching import trainer_events
from weightcast.watch.listeners import Events

events = Events()
provider = TracerProvider()  # after the listener was made, as in a trainer that connects first
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")))
set_tracer_provider(provider)
for event in trainer_events():
    events.emit(event)
"""


def test_spans_of_an_update_just_before_the_end_of_the_process_are_exported():
    assert sorted(run(TRACED).split())[-3:] == ["weightcast.target", "weightcast.target", "weightcast.update"]


FORKED = """
import os
from weightcast.watch import later

later.put_off(lambda: print("of the parent", flush=True))
child = os.fork()
if child == 0:
    later.settle()
    later.put_off(lambda: print("of the child", flush=True))  # starts a thread of the child's own
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
later.settle()
"""


def test_a_forked_child_leaves_the_parents_work_alone_and_does_its_own():
    assert sorted(run(FORKED).splitlines()) == ["of the child", "of the parent"]
