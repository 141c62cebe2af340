"""The tail of a process's output is bounded, however much it writes."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.clock import PATIENCE_S
from weightcast.ray.engine_slot import Tail

TALKS = """
import sys
for number in range(20_000):
    print(f"step {number}", "x" * 1000)
print("out of tea", file=sys.stderr)
"""


def test_only_the_end_of_what_a_process_says_is_kept() -> None:
    with subprocess.Popen([sys.executable, "-c", TALKS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        tail = Tail(process.stdout, num_bytes=4000)
        assert process.wait(PATIENCE_S) == 0  # it would wait at a full pipe if nobody read
    said = tail.text(patience_s=PATIENCE_S)
    assert "step 19999" in said
    assert said.endswith("out of tea")
    assert len(said) <= 4000
    assert len(tail._kept) <= 4000


def test_a_process_that_still_runs_is_not_waited_for() -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        tail = Tail(process.stdout, num_bytes=4000)
        while not tail.text():
            pass
        assert tail.text() == "up"
        process.stdin.close()
