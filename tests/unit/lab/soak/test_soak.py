"""The judges of a soak can find something: wrong answers, growing processes, every kind of trouble."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from weightcast.cli import bench_soak
from weightcast.comm.ipc import SharedBuffer
from weightcast.lab.soak.leaks import Sample, Series, buffers_of, segments_of, still_there
from weightcast.lab.soak.load import Answer, Judge
from weightcast.lab.soak.processes import Reaper, Running
from weightcast.lab.soak.result import Result
from weightcast.lab.soak.trainer import Order
from weightcast.lab.soak.versions import Versions, make_tiny_model
from weightcast.rollout.cache import cache_name


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return Versions(folder)


@pytest.fixture
def judge(versions: Versions) -> Iterator[Judge]:
    judge = Judge(versions, {1: "abort", 2: "in_place", 3: "retract", 4: "wait", 5: "in_place"})
    yield judge
    judge.finish()


def generate(versions: Versions, prompt: list[int], spans: list[tuple[int, int]], keep: bool) -> Answer:
    """Makes the answer of an engine whose weights change while it generates."""
    model: Any = versions.model
    tokens: list[int] = []
    logprobs: list[float] = []
    cache: Any = None
    for version, count in spans:
        versions.set(version)
        if not keep:
            cache = None
        for _ in range(count):
            fed = [*prompt, *tokens] if cache is None else tokens[-1:]
            with torch.no_grad():
                output = model(torch.tensor([fed]), use_cache=True, **{cache_name(model): cache})
            cache = output[cache_name(model)]
            row = output.logits[0, -1].float().log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return Answer(prompt=prompt, tokens=tokens, logprobs=logprobs, spans=spans)


def test_versions_are_the_same_everywhere_and_differ(versions):
    first = versions.digests(3)
    assert versions.digests(0) != first
    assert versions.digests(3) == first
    assert all(versions.digests(4)[name] != digest for name, digest in first.items() if "norm" not in name)


@pytest.mark.parametrize(
    ("spans", "keep"),
    [([(0, 6)], False), ([(1, 4), (2, 5)], True), ([(2, 4), (3, 5)], False), ([(1, 3), (5, 4)], True)],
)
def test_an_honest_answer_stands(versions, judge, spans, keep):
    assert judge.verdict(generate(versions, [5, 6, 7], spans, keep)) == ""


def test_answers_that_no_version_explains_are_found(versions, judge):
    one = generate(versions, [5, 6, 7], [(1, 8)], False)
    assert "off by" in judge.verdict(dataclasses.replace(one, spans=[(2, 8)]))
    assert "off by" in judge.verdict(dataclasses.replace(one, logprobs=[value + 0.1 for value in one.logprobs]))
    assert "off by" in judge.verdict(dataclasses.replace(one, tokens=[*one.tokens[:4], 9, *one.tokens[5:]]))
    assert "spans" in judge.verdict(dataclasses.replace(one, spans=[(1, 7)]))
    assert "count up" in judge.verdict(dataclasses.replace(one, spans=[(3, 4), (1, 4)]))
    # One weight of another version is a mixture too.
    versions.set(1)
    other = Versions.__new__(Versions)
    other.model, other.current, other._first = versions.model, 1, versions._first
    with torch.no_grad():
        next(parameter for name, parameter in other.model.named_parameters() if "q_proj" in name).add_(0.3)
    mixed = generate(other, [5, 6, 7], [(1, 8)], False)
    versions.current = -1
    assert "off by" in judge.verdict(mixed)


def test_a_cache_that_was_kept_where_it_should_not_be_is_found(versions, judge):
    kept = generate(versions, [5, 6, 7, 8, 9], [(2, 10), (3, 10)], True)
    assert "off by" in judge.verdict(kept)


FLAT = [20] * 200
STEADY = [1 << 28] * 200
MIB = 1 << 20


def series(fds: list[int], rss: list[int], threads: list[int] | None = None) -> Series:
    """Samples as a soak takes them, one every five updates."""
    made = Series(name="p", pid=1)
    made.samples = [
        Sample(update=5 * index, fds=one, threads=other, rss_bytes=third)
        for index, (one, other, third) in enumerate(zip(fds, threads or [1] * len(fds), rss, strict=True))
    ]
    return made


def wandering(seed: int, count: int = 200) -> list[int]:
    """Resident bytes as an allocator has them: they come and go in lumps, and stay for a while."""
    chance = random.Random(seed)
    extra, values = 0.0, list[int]()
    for _ in range(count):
        extra = 0.9 * extra + chance.gauss(0, 0.3 * MIB)
        values.append((1 << 28) + int(extra))
    return values


def test_descriptors_and_threads_that_grow_are_found():
    assert "+42 descriptors" in series(list(range(100)), STEADY[:100]).leaks
    # One in twenty updates.
    assert "descriptors" in series([20 + index // 4 for index in range(200)], STEADY).leaks
    assert "threads" in series(FLAT, STEADY, threads=[9 + index // 4 for index in range(200)]).leaks


def test_descriptors_that_come_back_are_no_growth():
    assert not series([*range(20, 100), *[100] * 120], STEADY).leaks
    assert not series([*[120] * 60, *[90] * 60, *[120] * 80], STEADY).leaks
    assert not series([*[120] * 120, *[60] * 80], STEADY).leaks


@pytest.mark.parametrize("seed", range(8))
def test_memory_that_grows_is_found_and_noise_is_not(seed):
    noise = wandering(seed)
    assert not series(FLAT, noise).leaks
    # 32 KiB with each update: one eighth of a bucket.
    leaking = series(FLAT, [value + 5 * index * (32 << 10) for index, value in enumerate(noise)])
    assert "bytes an update" in leaking.leaks
    assert leaking.slope_bytes == pytest.approx(32 << 10, rel=0.3)
    # One bucket with each update is found long before.
    noise = wandering(seed, 40)
    assert series(FLAT[:40], [value + 5 * index * (256 << 10) for index, value in enumerate(noise)]).leaks


def test_the_longer_it_goes_on_the_less_goes_unnoticed():
    def leaking(count: int) -> str:
        return series([20] * count, [(1 << 28) + 5 * index * 2048 for index in range(count)]).leaks

    assert not leaking(200)
    assert leaking(2000)


def test_memory_that_reaches_a_bound_is_no_growth():
    def filling(samples: int, size_bytes: int) -> list[int]:
        return [(1 << 28) + size_bytes * min(index, samples) // samples for index in range(200)]

    assert not series(FLAT, filling(20, 100 * MIB)).leaks
    assert not series(FLAT, filling(100, 40 * MIB)).leaks
    for at in range(100, 200, 7):  # steps, wherever they are
        assert not series(FLAT, [(1 << 28) + 30 * MIB * (index >= at) for index in range(200)]).leaks
    assert not series(FLAT, [(1 << 28) - 30_000 * index for index in range(200)]).leaks


def test_nothing_is_said_of_what_lived_too_short():
    assert not series(FLAT[:39], [(1 << 28) + MIB * index for index in range(39)]).leaks
    empty = Series(name="p", pid=1)
    assert empty.leaks == ""
    assert empty.slope_bytes == empty.gained_bytes == empty.growth("fds") == 0


@pytest.mark.parametrize(("keeps", "found"), [("kept.append(block)", True), ("kept[:] = [block]", False)])
def test_a_process_that_leaks_is_found(keeps, found):
    code = f"kept = []\nwhile input():\n    block = bytearray(b'x') * 600_000\n    {keeps}\n    print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    watched = Series(name="p", pid=process.pid)
    try:
        for update in range(60):
            process.stdin.write(b"x\n")
            process.stdin.flush()
            assert process.stdout.readline()
            watched.take(update)
        process.communicate(b"\n")
    finally:
        process.kill()
        process.wait()
    assert bool(watched.leaks) is found


def test_buffers_that_are_held_are_counted():
    before = buffers_of(os.getpid())
    buffer = SharedBuffer(4096, torch.device("cpu"))
    assert buffers_of(os.getpid()) == before + 1
    buffer.close()
    assert buffers_of(os.getpid()) == before


def test_segments_that_outlive_their_process_are_found():
    code = "import os, sys; os.open('/dev/shm/' + sys.argv[1], os.O_CREAT | os.O_RDWR); print(flush=True); input()"
    name = f"weightcast-test-{os.getpid()}"
    process = subprocess.Popen([sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert segments_of(process.pid) == {name}
        process.communicate(b"\n")
        assert still_there({name, "another"}) == {name}
    finally:
        process.kill()
        process.wait()
        os.unlink(f"/dev/shm/{name}")
    assert not still_there({name})


def test_a_process_is_sampled():
    mine = Series(name="me", pid=os.getpid())
    mine.take(1)
    assert mine.samples[0].rss_bytes > 1 << 20
    Series(name="nobody", pid=2**22 + 1).take(1)


def test_torch_keeps_no_notes_that_would_look_like_a_leak(tmp_path):
    code = "import json, os; print(json.dumps(os.environ['TORCH_FR_BUFFER_SIZE']))"
    reaper = Reaper()
    try:
        running = Running("p", [sys.executable, "-c", code], log=tmp_path / "log", reaper=reaper)
        assert running.hear(waiting_for="its setting", timeout_s=30.0).strip() == b'"0"'
        assert running.bury() == 0
    finally:
        reaper.close()


def good_result() -> Result:
    return Result(
        updates=1,
        attempts=1,
        seconds=1.0,
        faults={},
        transports={},
        modes={},
        engines_started=1,
        trainers_started=1,
        answers=1,
        answers_dropped=0,
        answers_checked=1,
        answers_spanning=0,
        hangs=0,
        mixed=0,
        failures=0,
        leaked_processes=0,
        leaked_segments=0,
        leaked_buffers=0,
        leaked_fds=0,
        slope_bytes_per_update=0,
        growing=[],
        details=[],
    )


def test_every_kind_of_trouble_spoils_the_result():
    good = good_result()
    assert good.ok
    for name in ("hangs", "mixed", "failures", "leaked_processes", "leaked_segments", "leaked_buffers"):
        assert not msgspec.structs.replace(good, **{name: 1}).ok
    assert not msgspec.structs.replace(good, growing=["p"]).ok
    assert not msgspec.structs.replace(good, answers_checked=0).ok


def test_what_did_not_happen_is_none_or_zero(capsys: pytest.CaptureFixture[str]) -> None:
    bench_soak._show(good_result())
    rows = {line[:24].strip(): line[24:].strip() for line in capsys.readouterr().out.splitlines()}
    assert (rows["faults"], rows["transports"], rows["growing"], rows["hangs"]) == ("none", "none", "none", "0")


def test_orders_survive_the_pipe():
    order = Order(version=1, urls=["http://h:1"], transport="ipc", pause="wait", abort_at=0.5)
    assert msgspec.json.decode(msgspec.json.encode(order), type=Order) == order


def test_a_long_soak_says_how_far_it_is(capsys):
    show = bench_soak._Progress("of 100 updates", iter([0.0, 1.0, 2.0, 9.0, 12.0, 13.0]).__next__)
    for done in (0, 1, 2, 3, 4):
        show(done, 100)
    assert capsys.readouterr().err.splitlines() == ["1 of 100 updates, 2 s", "3 of 100 updates, 12 s"]
