"""The compiled sums in processes of their own: forked ones, and machines that keep no machine code or have no numba."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weightcast
from tests.helpers.tensors import random_tensor, whole
from weightcast.digest import on_cpu
from weightcast.digest.definition import _sums_by_torch


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert on_cpu.available()


def test_a_forked_process_sums_with_threads_of_its_own():
    tensor = random_tensor((4096, 2048), torch.bfloat16)
    expected = _sums_by_torch([whole(tensor)]).tolist()
    code = f"""
import os, torch
from tests.helpers.tensors import random_tensor, whole
from weightcast.digest import on_cpu
assert on_cpu.available()
tensor = random_tensor((4096, 2048), torch.bfloat16)
torch.set_num_threads(2)
launches = on_cpu.sums_of([whole(tensor)])
assert launches.launch().tolist() == {expected}
child = os.fork()
if child == 0:
    same = launches.launch().tolist() == {expected}
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


_SAYS = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from weightcast.digest import on_cpu
from weightcast.digest.definition import tensor_digest
import torch
found = on_cpu.available()
print(found, tensor_digest(torch.arange(12, dtype=torch.int16).view(3, 4)))
"""


def _said(folder: Path, **environment: str) -> str:
    home = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-P", "-c", _SAYS], env=home, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the package without any machine code."""
    here = Path(weightcast.__file__).parent
    shutil.copytree(here, tmp_path / "weightcast", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.wide
def test_a_machine_where_nothing_can_be_kept_compiles_each_time(installed, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()  # no folder can be made in a file, not even by root
    (installed / "weightcast" / "digest" / "__pycache__").touch()
    text = _said(installed, HOME=str(blocked), XDG_CACHE_HOME=str(blocked))
    assert "compiles at every start" in text
    assert "True a1fa19993e081a6b" in text


@pytest.mark.wide
def test_machine_code_that_is_cut_short_is_replaced(installed):
    assert "True a1fa19993e081a6b" in _said(installed)
    kept = sorted((installed / "weightcast" / "digest" / "__pycache__").glob("*.nb[ci]"))
    assert len(kept) >= 2
    for path in kept:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "a1fa19993e081a6b" in _said(installed)


def test_without_numba_the_digest_is_the_same(installed):
    (installed / "numba.py").write_text("raise ImportError('no numba here')\n")
    text = _said(installed)
    assert "weightcast[cpu]" in text
    assert "False a1fa19993e081a6b" in text
