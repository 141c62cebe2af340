"""``weightcast verify`` in a terminal that lacks letters of a path."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.unit.cli import test_verify
from tests.unit.cli.test_verify import (
    WEIGHTS,
    Engine,
    digests,
)

serve = test_verify.serve  # a fixture
checkpoint = test_verify.checkpoint  # a fixture


@pytest.mark.parametrize(
    ("encoding", "name"), [("ascii", "poids-d\u00e9j\u00e0-\U0001f600"), ("utf-8", "weights-\udcff")]
)
def test_a_terminal_without_the_letters_of_a_path_shows_the_result(serve, checkpoint, tmp_path, encoding, name):
    folder = tmp_path / name
    folder.mkdir()
    for file in list(checkpoint.glob("*.*")):
        if file.is_file():
            file.rename(folder / file.name)
    url = serve(Engine(kept=tuple(WEIGHTS), resident=digests(*WEIGHTS)))
    command = [sys.executable, "-m", "weightcast", "verify", str(folder), "--at", url]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run(command, capture_output=True, env=env, check=False)
    assert (shown.returncode, b"Traceback" in shown.stderr) == (0, False), shown.stderr
    assert f"/{name}: ".encode(encoding, "backslashreplace") in shown.stdout
    document = subprocess.run([*command, "--json"], capture_output=True, env=env, check=False)
    assert document.returncode == 0, document.stderr
    assert json.loads(document.stdout.decode(encoding))["checkpoint"] == str(folder)
