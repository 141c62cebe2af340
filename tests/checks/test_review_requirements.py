"""Mistakes that reviewers found in other trainers' weight updates, and that have no better place to be tested."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from weightcast import protocols
from weightcast.adapters.lmdeploy.payload import bucket_payload as for_lmdeploy
from weightcast.adapters.registry import OURS
from weightcast.adapters.sglang.payload import bucket_payload as for_sglang
from weightcast.comm.shared_buckets import TorchMemory
from weightcast.protocols import Exporter
from weightcast.transports.checkpoint_engine import Feed, table
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets

SOURCE = Path(protocols.__file__).parent
SPECS = [TensorSpec(name="a", dtype="float32", shape=(2, 2)), TensorSpec(name="b", dtype="float32", shape=(3,))]
# Bad buckets must raise under `python -O` too, which removes assert statements.
BAD_BUCKETS = """
import torch
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
layout = plan_buckets([TensorSpec(name="a", dtype="float32", shape=(4,))], bucket_bytes=64, packing=Packing())[0]
bad = [torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)[::2],
       torch.zeros(15, dtype=torch.uint8)]
refused = 0
for data in bad:
    try:
        Bucket(layout, data)
    except ValueError:
        refused += 1
print(refused, len(bad), __debug__)
"""


def layout() -> BucketLayout:
    return plan_buckets(SPECS, bucket_bytes=64, packing=Packing(gapless=True))[0]


def memory() -> TorchMemory:
    return TorchMemory(kind="cuda", device="u", size_bytes=64, handle=b"h", ref_counter=b"r", event=b"e")


def test_bad_buffers_raise_under_python_minus_o() -> None:
    # dtype, more than one dimension, not contiguous, too small
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-O", "-c", BAD_BUCKETS], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["4", "4", "False"]


def test_torch_is_not_patched() -> None:
    before = dict(vars(reductions)), dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    for_lmdeploy(layout(), memory(), handle=True)
    for_sglang(layout(), memory())
    table(layout(), 0)
    assert (dict(vars(reductions)), dict(ForkingPickler._extra_reducers)) == before  # type: ignore[attr-defined]
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\breductions\.\w+ = ", text), path
        assert "monkey" not in text.lower(), path


def test_every_adapter_implements_every_step() -> None:
    wanted = {
        name: inspect.signature(step)
        for name, step in vars(protocols.Adapter).items()
        if inspect.isfunction(step) and not name.startswith("_")
    }
    assert {"open", "join", "bucket", "close", "commit", "abort", "leave", "score", "check"} <= wanted.keys()
    info: Any = SimpleNamespace(engine="x 1.2.3", tp_size=1, ranks=(), specs=(), version=None, paused=False, hazards=())
    adapters = [type(kind.adapter(info)) for kind in OURS]
    assert len(set(adapters)) == len(OURS)
    for adapter in adapters:
        for name, signature in wanted.items():
            own = inspect.signature(getattr(adapter, name))
            assert list(own.parameters) == list(signature.parameters), (adapter, name)


def test_no_method_raises_not_implemented() -> None:
    # A reviewed base class had steps that only raise; here the type checker finds a missing step.
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "NotImplementedError" not in text, path
        if path.is_relative_to(SOURCE / "adapters") or path.is_relative_to(SOURCE / "transports"):
            assert not re.search(r"def \w+\([^)]*\)[^:]*:\n\s+pass\n", text), path


def test_no_code_is_commented_out() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "ERA", str(SOURCE)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_no_test_catches_an_exception_that_it_should_expect() -> None:
    # A test with try, assert False and except passes on an unexpected exception.
    for path in SOURCE.parents[1].joinpath("tests").rglob("*.py"):
        assert not re.search(r"^\s*assert False\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("words", ["is False", "is True"])
def test_states_are_not_compared_as_booleans(words: str) -> None:
    # A map whose default was the string "False" counted unknown engines as healthy.
    for folder in ("update", "transports"):
        for path in (SOURCE / folder).rglob("*.py"):
            assert ".get(" not in path.read_text() or words not in path.read_text(), path


def test_buckets_are_streamed_not_collected() -> None:
    made: list[int] = []
    buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]

    many = [TensorSpec(name=f"t{index}", dtype="float32", shape=(16,)) for index in range(8)]

    class Counting(Exporter):
        def specs(self) -> list[TensorSpec]:
            return many

        def fill(self, bucket: Bucket | None, layout: BucketLayout, group: Any) -> None:
            made.append(layout.index)

    from tests.helpers.exports import ALONE, bucketize

    layouts = plan_buckets(many, bucket_bytes=64, packing=Packing())
    assert len(layouts) == 8
    stream = bucketize(Counting(), layouts, ALONE, buffers)
    assert made == []
    for index in range(3):
        bucket = next(stream)
        assert bucket is not None
        assert bucket.data.data_ptr() == buffers[index % 2].data_ptr()
        assert made == list(range(index + 1))


def test_checkpoint_engine_feed_names_tensors_that_it_cannot_send() -> None:
    cut = plan_buckets(SPECS, bucket_bytes=8, packing=Packing(alignment_bytes=1, slices=True))[0]
    with pytest.raises(Exception, match="whole"):
        table(cut, 0)
    assert Feed.__doc__
