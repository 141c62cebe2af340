"""A template with addresses is the very launch that would be worked out from the tensors themselves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.digest import on_cpu
from weightcast.digest.definition import partial_sums
from weightcast.digest.jobs import CPU_TILING, GPU_TILING, plans_of_transfers
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.templates import NOWHERE, Placed, StandIns, Template, flat_stand_in
from weightcast.digest.transfers import can_transfer, launches_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]


def memory_of(size_bytes: int) -> torch.Tensor:
    return torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)


@st.composite
def a_copy(draw: st.DrawFn) -> dict[str, object]:
    """A rectangle of a flat buffer that goes to a rectangle of a parameter, both at any offset and with gaps."""
    rows, cols = draw(st.integers(0, 5)), draw(st.integers(1, 40))
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "shape": (rows, cols),
        "source_stride": (cols + draw(st.integers(0, 3)), 1),
        "source_offset": draw(st.integers(0, 9)),
        "target_stride": (cols + draw(st.integers(0, 3)), 1),
        "target_offset": draw(st.integers(0, 9)),
        "summed": draw(st.booleans()),
        "copied": draw(st.booleans()),
        "casts": draw(st.booleans()),
        "moved": draw(st.integers(0, 17)),
    }


def transfer_of(copy: dict, number: int, source: torch.Tensor, target: torch.Tensor) -> Transfer:
    def view(whole: torch.Tensor, side: str) -> torch.Tensor:
        offset = whole.storage_offset() + copy[f"{side}_offset"]
        return whole.as_strided(copy["shape"], copy[f"{side}_stride"], offset)

    piece = TensorPiece(tensor=view(source, "source"), full_shape=copy["shape"])
    goal = view(target, "target") if copy["copied"] else None
    return Transfer(piece=piece, target=goal, total=number if copy["summed"] else None, casts=casts(copy))


def casts(copy: dict) -> bool:
    return copy["casts"] and copy["dtype"] is torch.float32


@settings(deadline=None, max_examples=150)
@given(copies=st.lists(a_copy(), min_size=1, max_size=6), device=st.sampled_from(["cpu", "cuda"]))
def test_a_template_at_its_addresses_is_the_plan_of_the_tensors_there(copies, device):
    tiling = CPU_TILING if device == "cpu" else GPU_TILING
    real: list[Transfer] = []
    meant: list[Transfer] = []
    addresses: list[int] = []
    memories: list[tuple[int, int]] = []
    made = StandIns()
    alive: list[torch.Tensor] = []
    for number, copy in enumerate(copies):
        first = copy["moved"] * copy["dtype"].itemsize  # also beside 16 bytes
        flat = memory_of(4000 + first)[first:].view(copy["dtype"])
        parameter = memory_of(4000 + first)[first:].view(torch.bfloat16 if casts(copy) else copy["dtype"])
        alive += [flat, parameter]
        real.append(transfer_of(copy, number, flat, parameter))
        flat_like = flat_stand_in(flat.nbytes).view(copy["dtype"])
        meant.append(transfer_of(copy, number, flat_like, made.of(parameter)))
        memories.append((2 * number, 2 * number + 1 if copy["copied"] else NOWHERE))
        addresses += [flat.data_ptr(), parameter.data_ptr()]
        assert can_transfer(real[-1]) == can_transfer(meant[-1])
    wanted = plans_of_transfers(real, tiling)
    found = Template(meant, memories, torch.device(device)).at(addresses)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one.word_bytes, one.casts, one.copies) == (other.word_bytes, other.casts, other.copies)
        assert torch.equal(one.jobs, other.jobs)
        assert torch.equal(one.tiles, other.tiles)


def test_one_template_serves_memory_that_moves():
    assert on_cpu.available()
    parameter = torch.zeros(3, 50)
    flat_like = flat_stand_in(600).view(torch.float32).view(3, 50)
    piece = TensorPiece(tensor=flat_like, full_shape=(3, 50))
    transfer = Transfer(piece=piece, target=StandIns().of(parameter), total=0)
    template = Template([transfer], [(0, 1)], CPU)
    for _ in range(3):
        source, target = torch.randn(3, 50), torch.zeros(3, 50)
        addresses = [source.data_ptr(), target.data_ptr()]
        sums = launches_of(Placed(template, addresses), 1, CPU).launch()
        assert sums is not None
        assert torch.equal(source, target)
        expected = partial_sums([TensorPiece(tensor=source, full_shape=(3, 50))])
        assert torch.equal(sums, expected)
