"""Exchanges on a GPU: every byte changes places, in one launch, whatever the addresses."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.needs import needs
from weightcast.digest.exchange import MemoryExchange
from weightcast.receiver.staging import StagingSet

pytestmark = [pytest.mark.gpu, needs(1)]


def test_pairs_of_any_size_and_alignment_are_exchanged_and_nothing_else():
    torch.manual_seed(0)
    memory = torch.randint(0, 255, (1 << 22,), dtype=torch.uint8, device="cuda")
    before = memory.clone()
    spans = [(0, 1 << 20, 40_000), (50_000, 1_500_000, 3), (60_016, 1_600_016, 16), (60_033, 1_700_041, 33_000)]
    spans += [(100_000, 2_000_000, 1 << 14), (150_001, 2_100_001, 1), (200_000, 2_200_000, 700_000)]
    exchange = MemoryExchange([(memory[a : a + size], memory[b : b + size]) for a, b, size in spans])
    wanted = before.clone()
    for a, b, size in spans:
        wanted[a : a + size], wanted[b : b + size] = before[b : b + size], before[a : a + size]
    exchange.run()
    assert torch.equal(memory, wanted)
    with torch.cuda.stream(torch.cuda.Stream()):
        exchange.run()
    assert torch.equal(memory, before)
    exchange.run(wait=False)
    assert torch.equal(memory, wanted)  # on the same stream


def test_a_flip_of_small_and_large_parameters_and_its_undo():
    torch.manual_seed(0)
    shapes = {f"norm.{number}": (number % 7 + 1, 33) for number in range(1000)} | {"large": (1024, 2048)}
    live = {name: torch.randn(shape, device="cuda").to(torch.bfloat16) for name, shape in shapes.items()}
    stage = StagingSet(live, "device")
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for _ in range(3):
        old = {name: tensor.clone() for name, tensor in live.items()}
        new = {name: torch.randn_like(tensor) for name, tensor in live.items()}
        for name, tensor in new.items():
            stage.target(name).copy_(tensor)
        stage.flip()
        assert all(torch.equal(live[name], tensor) for name, tensor in new.items())
        assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
        stage.undo()
        assert all(torch.equal(live[name], tensor) for name, tensor in old.items())
        stage.flip()
        assert all(torch.equal(live[name], tensor) for name, tensor in new.items())
