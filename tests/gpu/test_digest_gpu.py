"""The CUDA kernel gives the sums of the CPU path, which the unit tests compare with the definition."""

import itertools
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu.needs import needs
from tests.helpers.tensors import DTYPES, random_tensor
from weightcast.digest.definition import (
    add_partial,
    as_unsigned,
    partial_sums,
    tensor_digest,
)
from weightcast.digest.pieces import TensorPiece
from weightcast.wire.box import Box

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Below, at and above what a program covers: 64 and 1024 columns, 64 rows; aligned and not.
SHAPES = (
    (),
    (1,),
    (0,),
    (0, 3),
    (128,),
    (5000,),
    (1 << 20,),
    (1, 1),
    (3, 63),
    (3, 64),
    (64, 1024),
    (65, 1032),
    (63, 1023),
    (300, 576),
    (129, 4096),
    (70000, 1),
    (20000, 9),
    (1, 100001),
    (3, 4, 5),
    (8, 65, 130),
    (40, 7, 3, 11),
)


def whole(tensor):
    return TensorPiece(tensor=tensor, full_shape=tuple(tensor.shape))


def part(full, box):
    where = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
    return TensorPiece(tensor=full[where], full_shape=tuple(full.shape), box=box)


def on_gpu(piece):
    """The piece on the GPU with the strides that it has on the CPU."""
    tensor = piece.tensor
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.as_strided((extent if tensor.numel() else 0,), (1,)).cuda()
    moved = memory.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else tensor.cuda()
    return TensorPiece(tensor=moved, full_shape=piece.full_shape, box=piece.box)


def assert_same(pieces):
    expected = partial_sums(pieces)
    gpu_pieces = [on_gpu(piece) for piece in pieces]
    for _ in range(2):  # the second call finds the plan of the first
        actual = partial_sums(gpu_pieces)
        assert actual.device.type == "cuda"
        wrong = (actual.cpu() != expected).nonzero().flatten().tolist()
        assert not wrong, [(pieces[i].tensor.shape, pieces[i].tensor.dtype, pieces[i].box) for i in wrong]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_in_one_call(dtype):
    assert_same([whole(random_tensor(shape, dtype, seed)) for seed, shape in enumerate(SHAPES)])


def test_dtypes_mixed_in_one_call():
    assert_same([whole(random_tensor(shape, dtype)) for shape, dtype in itertools.product(SHAPES[3:], DTYPES)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((200, 3000), Box(offset=(0, 1024), shape=(200, 1024))),
        ((200, 3000), Box(offset=(7, 1), shape=(100, 1999))),
        ((200, 3000), Box(offset=(199, 2999), shape=(1, 1))),
        ((5000,), Box(offset=(2500,), shape=(2500,))),
        ((6, 40, 96), Box(offset=(1, 8, 0), shape=(4, 16, 96))),
        ((6, 40, 96), Box(offset=(0, 0, 32), shape=(6, 40, 32))),
        ((6, 40, 96), Box(offset=(1, 3, 5), shape=(4, 30, 41))),
        ((6, 40, 96), Box(offset=(0, 0, 95), shape=(6, 40, 1))),
        ((3, 5, 6, 7, 8), Box(offset=(1, 1, 2, 3, 4), shape=(2, 3, 4, 3, 2))),
        ((6, 40, 96), Box(offset=(6, 0, 0), shape=(0, 40, 96))),
    ],
)
def test_boxes(shape, box, dtype):
    full = random_tensor(shape, dtype)
    view = part(full, box)
    assert_same([view, TensorPiece(tensor=view.tensor.clone(), full_shape=shape, box=box)])


def test_box_far_into_a_huge_tensor():
    box = Box(offset=(2**32 + 5, 2**33 + 1), shape=(64, 2048))
    assert_same([TensorPiece(tensor=random_tensor(box.shape, torch.bfloat16), full_shape=(2**33, 2**34), box=box)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_memory_that_is_not_aligned(dtype):
    flat = random_tensor((1 << 18,), dtype).cuda()
    views = [flat[start : start + 64 * 1024].view(64, 1024) for start in range(9)]
    actual = partial_sums([whole(view) for view in views]).cpu()
    assert torch.equal(actual, partial_sums([whole(view.cpu()) for view in views]))
    assert len(set(actual.tolist())) == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_other_strides(dtype):
    square, cube = random_tensor((300, 200), dtype), random_tensor((20, 30, 40), dtype)
    assert_same(
        [
            whole(square.t()),
            whole(square[:, ::3]),
            whole(square[::2]),
            whole(square[:1].expand(50, 200)),
            whole(cube.permute(2, 0, 1)),
            whole(cube.transpose(1, 2)),
            whole(cube[:, :, 4]),
        ]
    )


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(1, 90), min_size=1, max_size=3),
            st.lists(st.integers(0, 89), min_size=3, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_pieces(drawn):
    pieces = []
    for seed, (dtype, shape, corner, copied) in enumerate(drawn):
        offset = tuple(at % size for at, size in zip(corner, shape, strict=False))
        box = Box(offset=offset, shape=tuple(size - at for size, at in zip(shape, offset, strict=True)))
        piece = part(random_tensor(shape, dtype, seed), box)
        pieces.append(
            TensorPiece(tensor=piece.tensor.clone(), full_shape=piece.full_shape, box=box) if copied else piece
        )
    assert_same(pieces)


def test_new_values_in_the_same_memory():
    # The plan of the first call is used again; the bytes must be read again.
    tensors = [random_tensor((129, 1024), torch.bfloat16, seed).cuda() for seed in range(3)]
    pieces = [whole(tensor) for tensor in tensors]
    before = partial_sums(pieces).tolist()
    tensors[1].view(torch.int16)[128, 1023] ^= 1
    after = partial_sums(pieces).tolist()
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert after == partial_sums([whole(tensor.cpu()) for tensor in tensors]).tolist()


def test_every_bit_of_a_tile_counts():
    tensor = torch.zeros(2, 1032, dtype=torch.int16, device="cuda")
    flipped = torch.zeros(32, 2, 1032, dtype=torch.int16, device="cuda")
    seen = {0}
    for at in range(0, 2064, 37):
        for bit in range(16):
            flipped[bit].copy_(tensor).view(-1)[at] = (1 << bit) - (1 << 16 if bit == 15 else 0)
        seen |= set(partial_sums([whole(flipped[bit]) for bit in range(16)]).tolist())
    assert len(seen) == 1 + 16 * len(range(0, 2064, 37))


def test_the_host_does_not_wait():
    pieces = [whole(random_tensor((64, 1024), dtype).cuda()) for dtype in (torch.bfloat16, torch.int8)]
    partial_sums(pieces)  # compiles
    pieces += [whole(random_tensor((65, 1000), torch.float32).cuda().t())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        first, again = partial_sums(pieces), partial_sums(pieces)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


def test_streams_see_their_own_order():
    tensor = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
    expected = []
    for value in range(4):
        expected.append(tensor_digest(torch.full((4096, 4096), value, dtype=torch.bfloat16)))
    digests = []
    torch.cuda.synchronize()
    for value in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor.fill_(value)
            digests.append(tensor_digest(tensor))
    assert digests == expected


@needs(2)
def test_a_device_that_is_not_the_current_one():
    tensor = random_tensor((200, 1024), torch.bfloat16)
    with torch.cuda.device(0):
        assert tensor_digest(tensor.to("cuda:1")) == tensor_digest(tensor)
    with pytest.raises(ValueError, match="piece 1 is on cuda:1"):
        partial_sums([whole(tensor.to("cuda:0")), whole(tensor.to("cuda:1"))])


def test_little_extra_memory():
    tensor = torch.zeros(1 << 17, 4096, dtype=torch.bfloat16, device="cuda")
    partial_sums([whole(tensor)])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    partial_sums([whole(tensor[1:])])
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_more_than_2_31_words():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    tensor = torch.empty(60_000, 80_000, dtype=torch.int8, device="cuda").random_(-128, 128)
    boxes = [Box(offset=(row, col), shape=(30_000, 40_000)) for row, col in itertools.product((0, 30_000), (0, 40_000))]
    total = 0
    for value in partial_sums([part(tensor, box) for box in boxes]).tolist():
        total = add_partial(total, as_unsigned(value))
    whole_sum, row_sum = partial_sums([whole(tensor), whole(tensor.view(1, -1))]).tolist()
    assert as_unsigned(whole_sum) == total
    corner = Box(offset=(59_000, 79_000), shape=(1000, 1000))
    assert (
        partial_sums([part(tensor, corner)]).tolist()
        == partial_sums(
            [TensorPiece(tensor=part(tensor, corner).tensor.cpu(), full_shape=(60_000, 80_000), box=corner)]
        ).tolist()
    )
    tensor[59_999, 79_999] ^= 1
    after = partial_sums([whole(tensor), whole(tensor.view(1, -1))]).tolist()
    assert after[0] != whole_sum
    assert after[1] != row_sum


def test_digests_of_a_gpu_tensor():
    tensor = random_tensor((300, 576), torch.bfloat16)
    assert tensor_digest(tensor.cuda()) == tensor_digest(tensor)
