"""The digest: its definition, that boxes add up, and what it must notice."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tensors import DTYPES, random_tensor, sum_by_definition, tensors, whole
from weightcast.digest import coefficients, definition, on_cpu
from weightcast.digest.coefficients import signed
from weightcast.digest.definition import (
    add_partial,
    as_unsigned,
    finish,
    finish_all,
    key_of,
    model_digest,
    partial_sums,
    tensor_digest,
)
from weightcast.digest.pieces import TensorPiece
from weightcast.wire.box import Box

SHAPES = ((), (1,), (7,), (0,), (5, 0), (0, 3), (1, 1), (4, 9), (9, 1), (1, 9), (3, 4, 5), (2, 3, 2, 4))


@pytest.fixture(scope="module", autouse=True, params=["torch", "compiled"])
def way(request):
    """Both ways of summing on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(on_cpu, "_found", (None,))
        else:
            assert on_cpu.available()
        yield


def part(full, box):
    return TensorPiece(tensor=full[slices(box)], full_shape=tuple(full.shape), box=box)


def slices(box):
    return tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))


def sums(*pieces):
    return [as_unsigned(value) for value in partial_sums(pieces).tolist()]


@st.composite
def cuts(draw, size):
    """A partition of range(size) as (start, length) pairs."""
    inner = draw(st.sets(st.integers(0, size), max_size=3))
    edges = [0, *sorted(inner), size]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


def boxes_of(draw, shape):
    for combination in itertools.product(*(draw(cuts(size)) for size in shape)):
        yield Box(offset=tuple(at for at, _ in combination), shape=tuple(size for _, size in combination))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_the_definition(dtype):
    for shape in SHAPES:
        tensor = random_tensor(shape, dtype)
        assert sums(whole(tensor)) == [sum_by_definition(tensor)], shape


@pytest.mark.parametrize(
    "shape", [(300, 41), (2, 6000), (9000, 1), (1, 9000), (9000,), (3, 50, 60), (40, 7, 3, 11)], ids=str
)
def test_small_blocks_change_nothing(shape, monkeypatch):
    # Tensors this small fit one block; smaller blocks bring the loops of big tensors into play.
    tensor = random_tensor(shape, torch.float32, seed=3)
    expected = sum_by_definition(tensor)
    monkeypatch.setattr(definition, "_BLOCK_WORDS", 1000)
    monkeypatch.setattr(definition, "SPAN", 100)
    monkeypatch.setattr(coefficients, "SPAN", 100)
    assert sums(whole(tensor)) == [expected]
    backwards = tuple(reversed(range(len(shape))))
    assert sums(whole(tensor.permute(backwards).contiguous().permute(backwards))) == [expected]
    monkeypatch.setattr(coefficients.Coefficients, "_MAX_KEPT", 64)
    assert sums(whole(tensor)) == [expected]


def test_known_digests():
    # These values are what other processes, versions and machines compute: changing them breaks the wire.
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert sums(whole(tensor)) == [sum_by_definition(tensor)]
    assert tensor_digest(tensor) == "a1fa19993e081a6b"
    assert tensor_digest(torch.zeros(3, 4, dtype=torch.bfloat16)) == "7410fbc674a21491"
    assert model_digest({"a": "0" * 16, "b": "1" * 16}) == "39400f4b26d12210"


@settings(deadline=None)
@given(st.data())
def test_any_flipped_bit_changes_the_digest(data):
    tensor = data.draw(tensors(min_elements=1))
    before = tensor_digest(tensor)
    flat = tensor.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, flat.numel() - 1))
    bit = 0 if tensor.dtype is torch.bool else data.draw(st.integers(0, 7))
    flat[at] ^= 1 << bit
    assert tensor_digest(tensor) != before
    flat[at] ^= 1 << bit
    assert tensor_digest(tensor) == before


@settings(deadline=None)
@given(st.data())
def test_swapped_elements_change_the_digest(data):
    tensor = data.draw(tensors(min_elements=2))
    elements = tensor.view(-1, 1).view(torch.uint8)
    i, j = (data.draw(st.integers(0, len(elements) - 1)) for _ in range(2))
    swapped = elements.clone()
    swapped[[i, j]] = elements[[j, i]]
    same = torch.equal(swapped, elements)
    swapped = swapped.view(-1).view(tensor.dtype).view(tensor.shape)
    assert (tensor_digest(swapped) == tensor_digest(tensor)) == same


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_boxes_of_any_partition_add_up(data):
    tensor = data.draw(tensors())
    boxes = list(boxes_of(data.draw, tuple(tensor.shape)))
    total = 0
    for box, value in zip(boxes, sums(*(part(tensor, box) for box in boxes)), strict=True):
        total = add_partial(total, value)
        assert [value] == sums(TensorPiece(tensor=tensor[slices(box)].clone(), full_shape=tuple(tensor.shape), box=box))
    assert total == sum_by_definition(tensor)
    assert finish(total, dtype=tensor.dtype, shape=tensor.shape) == tensor_digest(tensor)


@settings(deadline=None)
@given(st.data())
def test_strides_do_not_matter(data):
    tensor = data.draw(tensors())
    order = data.draw(st.permutations(range(tensor.ndim)))
    back = [order.index(i) for i in range(tensor.ndim)]
    permuted = tensor.permute(order)
    strided = tensor.clone().permute(order).contiguous().permute(back)
    assert sums(whole(strided)) == sums(whole(tensor))
    assert sums(whole(permuted)) == [sum_by_definition(permuted.contiguous())]
    spaced = torch.empty((*tensor.shape, 3), dtype=tensor.dtype)[..., 1]
    spaced.copy_(tensor)
    assert sums(whole(spaced)) == sums(whole(tensor))


@settings(deadline=None)
@given(st.lists(tensors(dtypes=(torch.bfloat16,)), max_size=5), st.integers(1, 64))
def test_bucket_boundaries_do_not_matter(members, bucket_elements):
    # The same tensors as flat views of buckets of any size, each tensor cut wherever a bucket ends.
    digests = [tensor_digest(member) for member in members]
    flat = torch.cat([torch.empty(0, dtype=torch.bfloat16), *(member.reshape(-1) for member in members)])
    start = 0
    for member, expected in zip(members, digests, strict=True):
        total, row_length = 0, max(1, member.numel() // max(1, len(member)) if member.ndim else 1)
        full = (1, member.numel()) if member.ndim < 2 else (len(member), row_length)
        stop = start + member.numel()
        at = start
        while at < stop:
            row, col = divmod(at - start, full[1])
            size = min(stop - at, bucket_elements - at % bucket_elements, full[1] - col)
            box = Box(offset=(row, col), shape=(1, size))
            total = add_partial(
                total, *sums(TensorPiece(tensor=flat[at : at + size].view(1, -1), full_shape=full, box=box))
            )
            at += size
        assert finish(total, dtype=member.dtype, shape=member.shape) == expected
        start = stop


def test_zeros_and_reinterpreted_bytes_differ_by_dtype_and_shape():
    tensors_of_one_sum = [
        torch.zeros(shape, dtype=dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    assert {value for tensor in tensors_of_one_sum for value in sums(whole(tensor))} == {0}
    assert len({tensor_digest(tensor) for tensor in tensors_of_one_sum}) == len(tensors_of_one_sum)


def test_swapped_tensors_change_the_model_digest():
    digests = {f"layers.{i}.weight": tensor_digest(random_tensor((4, 4), torch.bfloat16, seed=i)) for i in range(3)}
    swapped = dict(zip(digests, [*list(digests.values())[1:], next(iter(digests.values()))], strict=True))
    assert model_digest(dict(reversed(digests.items()))) == model_digest(digests)
    assert model_digest(swapped) != model_digest(digests)
    assert model_digest({f"x{name}": value for name, value in digests.items()}) != model_digest(digests)
    assert model_digest(dict(list(digests.items())[:2])) != model_digest(digests)
    assert len(model_digest({})) == len(model_digest(digests)) == 16


def test_parameters_and_lazy_conjugates():
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    assert tensor_digest(parameter) == tensor_digest(parameter.detach().clone())
    numbers = torch.randn(4, dtype=torch.complex64)
    assert tensor_digest(numbers.conj()) == tensor_digest(numbers.conj().resolve_conj()) != tensor_digest(numbers)
    with torch.inference_mode():
        inside = tensor_digest(torch.ones(70, 5000))
    assert inside == tensor_digest(torch.ones(70, 5000))


def test_extra_memory_is_small():
    # A whole copy as int64 would be 64 MiB.
    tensor = random_tensor((2048, 4096), torch.bfloat16)
    partial_sums([whole(tensor)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        partial_sums([whole(tensor)])
    allocated = [event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0]
    assert max(allocated) <= 2 << 20
    assert sum(allocated) <= 4 << 20


def test_nothing_to_digest():
    assert partial_sums([]).shape == (0,)
    assert len(tensor_digest(torch.empty(0))) == 16


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (TensorPiece(tensor=torch.ones(2, 3), full_shape=(4, 3)), r"\(2, 3\), not the full shape \(4, 3\)"),
        (
            TensorPiece(tensor=torch.ones(2, 3), full_shape=(4, 3), box=Box(offset=(0, 0), shape=(2, 2))),
            r"its box \(2, 2\)",
        ),
        (TensorPiece(tensor=torch.ones(2, 3), full_shape=(4, 3), box=Box(offset=(3, 0), shape=(2, 3))), "outside"),
        (TensorPiece(tensor=torch.ones(2, 3), full_shape=(4, 3), box=Box(offset=(-1, 0), shape=(2, 3))), "outside"),
        (TensorPiece(tensor=torch.ones(2, 3), full_shape=(4, 3), box=Box(offset=(0,), shape=(2, 3))), "dimensions"),
        (TensorPiece(tensor=torch.ones(2, 3), full_shape=(12,), box=Box(offset=(0, 0), shape=(2, 3))), "dimensions"),
        (TensorPiece(tensor=torch.ones(2).to_sparse(), full_shape=(2,)), "strided"),
        (TensorPiece(tensor=torch.ones(2, device="meta"), full_shape=(2,)), "meta"),
    ],
)
def test_wrong_pieces_are_refused(piece, message):
    with pytest.raises(ValueError, match=message):
        partial_sums([piece])


def test_pieces_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="piece 1 is on meta, piece 0 on cpu"):
        partial_sums([whole(torch.ones(2)), whole(torch.ones(2, device="meta"))])


def test_sums_are_unsigned_64_bit_numbers():
    assert as_unsigned(-1) == 2**64 - 1
    assert as_unsigned(2**64 - 1) == 2**64 - 1
    assert add_partial(2**64 - 1, 2) == 1
    for call in (
        lambda: as_unsigned(2**64),
        lambda: as_unsigned(-(2**63) - 1),
        lambda: add_partial(-1, 1),
        lambda: finish(2**64, dtype=torch.float32, shape=(1,)),
    ):
        with pytest.raises(ValueError, match=r"as_unsigned|64-bit"):
            call()


def test_digests_of_a_model_are_hex():
    with pytest.raises(ValueError, match="lm_head"):
        model_digest({"lm_head": "not a digest"})


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 9), max_size=3)), max_size=20))
def test_many_digests_are_finished_as_one_is(some):
    dtype = torch.bfloat16
    totals = torch.tensor([signed(total) for total, _ in some], dtype=torch.int64)
    keys = torch.tensor([key_of(dtype, shape) for _, shape in some], dtype=torch.int64)
    assert finish_all(totals, keys) == "".join(finish(total, dtype=dtype, shape=shape) for total, shape in some)
    assert [as_unsigned(total) for total in totals.tolist()] == [total for total, _ in some]
