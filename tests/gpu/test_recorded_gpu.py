"""Recorded launches on a GPU: they repeat the work, notice memory that moved, and leave out what waits."""

from __future__ import annotations

import pytest
import torch

from weightcast.runtime.recorded_launches import LaunchRecorder, side_by_side

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


def test_recorded_work_is_done_with_the_values_that_are_there() -> None:
    source, target = torch.randn(300, 40, device="cuda"), torch.zeros(300, 40, device="cuda")

    def work() -> None:
        for row in range(0, 300, 3):  # many small launches, with memory of their own
            target[row : row + 3] = source[row : row + 3] / source[row : row + 3].abs().amax()

    work()
    found = LaunchRecorder(DEVICE).record(work, [source, target])
    assert found is not None
    for seed in range(3):
        source.copy_(torch.randn(300, 40, generator=torch.Generator().manual_seed(seed)))
        work()
        wanted = target.clone()
        target.zero_()
        assert found.launch()
        assert torch.equal(target, wanted)
    source.data = source.clone()
    target.zero_()
    assert not found.launch()
    assert not target.any(), "nothing was done"


def test_work_that_looks_at_values_is_not_recorded_and_torch_works_on() -> None:
    source, target = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    record = LaunchRecorder(DEVICE).record
    for look in (lambda: float(source.amax()), lambda: torch.tensor([1.0], device="cuda")):
        assert record(lambda look=look: target.copy_(source * look()), [source, target]) is None
    assert record(lambda: target.copy_(source * 3), [source, target]) is not None
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.ones(8, device="cuda").sum().item()


def test_recordings_share_what_they_allocate() -> None:
    source = torch.randn(16 << 20, device="cuda")
    targets = [torch.zeros_like(source) for _ in range(4)]
    record = LaunchRecorder(DEVICE).record
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    found = [
        record(lambda target=target, k=k: target.copy_((source * k).cos()), [source, target])
        for k, target in enumerate(targets)
    ]
    torch.cuda.empty_cache()  # of what the work took before it was recorded
    assert torch.cuda.memory_reserved() - before <= 3 * source.nbytes
    for recording in found:
        assert recording is not None
        assert recording.launch()
    for k, target in enumerate(targets):
        assert torch.equal(target, (source * k).cos())


def test_recordings_side_by_side_begin_after_what_was_before_and_end_before_what_follows() -> None:
    sources = [torch.randn(1 << 20, device="cuda") for _ in range(6)]
    targets = [torch.zeros_like(source) for source in sources]
    recorders = [LaunchRecorder(DEVICE) for _ in range(3)]

    def many(source: torch.Tensor, target: torch.Tensor) -> None:
        for row in range(0, 1 << 20, 1 << 14):
            target[row : row + (1 << 14)] = source[row : row + (1 << 14)].cos() * source.amax()

    found = [
        recorders[k % 3].record(lambda k=k: many(sources[k], targets[k]), [sources[k], targets[k]]) for k in range(6)
    ]
    for seed in range(3):
        torch.cuda._sleep(20_000_000)  # the sources are written late
        for k, source in enumerate(sources):
            source.fill_(seed + k + 1)
        with side_by_side(recorders):
            for recording in found:
                assert recording is not None
                assert recording.launch()
        sums = [target.sum() for target in targets]  # on the current stream, without waiting on the host
        for k, source in enumerate(sources):
            wanted = torch.zeros_like(source)
            many(source, wanted)
            assert torch.equal(targets[k], wanted), (seed, k)
            assert torch.equal(sums[k], wanted.sum())
        for target in targets:
            target.zero_()
