"""The look for leaks finds what grows, and nothing else."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys

import pytest

from tests.faults.leaks import Sample, Watch, grown, sample_of

MIB = 1 << 20


def samples(descriptors: list[int], rss: list[int]) -> list[Sample]:
    return [Sample(one, 4, 1, 2, size) for one, size in zip(descriptors, rss, strict=True)]


def wandering(seed: int, count: int = 200) -> list[int]:
    """Resident bytes as an allocator has them: they come and go in lumps, and stay for a while."""
    chance, extra, values = random.Random(seed), 0.0, list[int]()
    for _ in range(count):
        extra = 0.9 * extra + chance.gauss(0, 0.3 * MIB)
        values.append((1 << 28) + int(extra))
    return values


STEADY = [1 << 28] * 200


def test_counts_that_grow_are_found_and_those_that_come_back_are_not():
    assert "descriptors" in grown(samples([20 + index // 4 for index in range(200)], STEADY))
    assert "ports" in grown([Sample(20, 4, index // 4, 2, 1 << 28) for index in range(200)])
    assert not grown(samples([*range(20, 100), *[100] * 120], STEADY))
    assert not grown(samples([*[120] * 60, *[90] * 60, *[120] * 80], STEADY))


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_grows_is_found_and_noise_and_steps_are_not(seed):
    noise = wandering(seed)
    flat = [20] * 200
    assert not grown(samples(flat, noise))
    assert "bytes a case" in grown(samples(flat, [value + index * (160 << 10) for index, value in enumerate(noise)]))
    for at in range(100, 200, 7):
        assert not grown(samples(flat, [(1 << 28) + 30 * MIB * (index >= at) for index in range(200)]))


def test_nothing_is_said_of_what_lived_too_short():
    assert not grown(samples([20] * 39, [(1 << 28) + MIB * index for index in range(39)]))


def test_a_process_that_keeps_what_it_allocates_is_named():
    code = "kept = []\nwhile input():\n    kept.append(bytearray(b'x') * 600_000)\n    print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    watch = Watch()
    try:
        for _ in range(60):
            process.stdin.write(b"x\n")
            process.stdin.flush()
            assert process.stdout.readline()
            watch.take("it", process.pid)
    finally:
        process.kill()
        process.communicate()
    [words] = watch.found()
    assert words.startswith(f"it (pid {process.pid}) gained ")


def test_a_sample_counts_shared_memory():
    before = sample_of(os.getpid())
    name = f"/dev/shm/weightcast-test-{os.getpid()}"
    with open(name, "w+b") as file:
        os.unlink(name)
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert sample_of(os.getpid()).shared == before.shared + 1
    assert sample_of(os.getpid()).shared == before.shared
