import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import ConfigError, WireError
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import (
    DTYPES,
    BucketLayout,
    Packing,
    TensorSlot,
    TensorSpec,
    dtype_name,
    plan_buckets,
    total_bytes,
)

specs = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=12
).map(
    lambda drawn: [
        TensorSpec(name=f"t{number}", dtype=dtype, shape=tuple(shape)) for number, (dtype, shape) in enumerate(drawn)
    ]
)
packings = st.builds(
    Packing,
    alignment_bytes=st.sampled_from([1, 2, 3, 16, 256]),
    one_dtype=st.booleans(),
    slices=st.booleans(),
    gapless=st.booleans(),
)


def needed_bytes(tensors: list[TensorSpec], packing: Packing) -> int:
    return max(spec.row_bytes if packing.slices else spec.size_bytes for spec in tensors)


@given(tensors=specs, packing=packings, spare=st.integers(0, 3000))
def test_every_row_travels_once_and_in_order(tensors, packing, spare):
    bucket_bytes = needed_bytes(tensors, packing) + spare
    layouts = plan_buckets(tensors, bucket_bytes=bucket_bytes, packing=packing)
    slots = [slot for layout in layouts for slot in layout.slots]

    seen: dict[str, int] = {}
    for slot in slots:
        assert slot.first_row == seen.get(slot.spec.name, 0)
        seen[slot.spec.name] = slot.first_row + slot.num_rows
    dtypes = list(dict.fromkeys(spec.dtype for spec in tensors))
    order = sorted(tensors, key=lambda spec: dtypes.index(spec.dtype)) if packing.one_dtype else tensors
    assert list(seen) == [spec.name for spec in order]
    assert all(seen[spec.name] == spec.num_rows for spec in tensors)
    assert sum(slot.size_bytes for slot in slots) == total_bytes(tensors)


@given(tensors=specs, packing=packings, spare=st.integers(0, 3000))
def test_every_bucket_is_one_that_the_other_end_accepts(tensors, packing, spare):
    bucket_bytes = needed_bytes(tensors, packing) + spare
    layouts = plan_buckets(tensors, bucket_bytes=bucket_bytes, packing=packing)
    assert [layout.index for layout in layouts] == list(range(len(layouts)))
    for layout in layouts:
        layout.check()
        assert layout.size_bytes <= bucket_bytes
        assert layout.size_bytes == max(slot.end_bytes for slot in layout.slots)
        for slot in layout.slots:
            assert slot.offset_bytes % packing.alignment_bytes == 0
            assert slot.offset_bytes % slot.spec.torch_dtype.itemsize == 0
            assert packing.slices or slot.whole
        if packing.one_dtype:
            assert len({slot.spec.dtype for slot in layout.slots}) == 1
        for slot, view in Bucket(layout, torch.zeros(bucket_bytes, dtype=torch.uint8)).views():
            assert (view.dtype, tuple(view.shape)) == (slot.spec.torch_dtype, slot.shape)
        again = msgspec.json.decode(msgspec.json.encode(layout), type=BucketLayout)
        assert again == layout


@given(tensors=specs, packing=packings, missing=st.integers(1, 3000))
def test_a_bucket_too_small_is_refused_and_the_error_says_what_is_enough(tensors, packing, missing):
    bucket_bytes = max(needed_bytes(tensors, packing) - missing, 0)
    if bucket_bytes >= needed_bytes(tensors, packing):
        return
    with pytest.raises(ConfigError) as caught:
        plan_buckets(tensors, bucket_bytes=bucket_bytes, packing=packing)
    hint = caught.value.hint or ""
    # The first tensor that does not fit is named; with the size it asks for, it fits.
    enough = int(hint.removeprefix("use bucket_bytes=").split()[0])
    assert enough > bucket_bytes
    culprit = next(spec for spec in tensors if spec.name in str(caught.value).split())
    assert plan_buckets([culprit], bucket_bytes=enough, packing=packing)


def test_all_tensors_that_are_too_large_are_counted_and_the_largest_is_named():
    tensors = [TensorSpec(name=f"t{size}", dtype="float32", shape=(size,)) for size in (50, 300, 10, 200)]
    with pytest.raises(ConfigError, match=r"t300 has 1200 bytes .* a bucket of 400, nor do 1 other\n") as caught:
        plan_buckets(tensors, bucket_bytes=400, packing=Packing(one_dtype=True, slices=False))
    assert caught.value.hint == "use bucket_bytes=1200 or more"
    assert len(plan_buckets(tensors, bucket_bytes=1200, packing=Packing(one_dtype=True, slices=False))) == 3


def test_norms_in_float32_do_not_break_buckets_of_one_dtype():
    # As many buckets as two dtypes need, not one for each change of dtype.
    tensors = [
        TensorSpec(name=f"{number}", dtype="float32" if number % 2 else "bfloat16", shape=(8,)) for number in range(40)
    ]
    layouts = plan_buckets(
        tensors, bucket_bytes=1 << 20, packing=Packing(alignment_bytes=1, one_dtype=True, gapless=True)
    )
    assert [len(layout.slots) for layout in layouts] == [20, 20]


def test_tensors_that_fit_are_not_cut():
    tensors = [TensorSpec(name=name, dtype="float32", shape=(10, 10)) for name in "abc"]
    layouts = plan_buckets(tensors, bucket_bytes=700, packing=Packing(alignment_bytes=1))
    assert [[slot.whole for slot in layout.slots] for layout in layouts] == [[True], [True], [True]]


def test_a_large_tensor_is_cut_between_rows():
    spec = TensorSpec(name="a", dtype="bfloat16", shape=(10, 100))
    layouts = plan_buckets([spec], bucket_bytes=700, packing=Packing())
    assert [(slot.first_row, slot.num_rows) for layout in layouts for slot in layout.slots] == [
        (0, 3),
        (3, 3),
        (6, 3),
        (9, 1),
    ]


def slot(offset_bytes: int, *, rows: int = 2, first: int = 0, dtype: str = "float32") -> TensorSlot:
    spec = TensorSpec(name=f"t{offset_bytes}", dtype=dtype, shape=(2, 4))
    return TensorSlot(spec=spec, offset_bytes=offset_bytes, first_row=first, num_rows=rows)


@pytest.mark.parametrize(
    ("slots", "size_bytes", "words"),
    [
        ((slot(2),), 100, "aligned"),
        ((slot(0), slot(16)), 100, "overlaps"),
        ((slot(32), slot(0)), 100, "overlaps"),
        ((slot(0),), 31, "ends at byte|end at byte"),
        ((slot(0, rows=3),), 100, "rows"),
        ((slot(0, rows=1, first=2),), 100, "rows"),
    ],
)
def test_a_layout_that_no_sender_of_ours_makes_is_refused(slots, size_bytes, words):
    with pytest.raises(WireError, match=words):
        BucketLayout(index=0, slots=slots, size_bytes=size_bytes).check()


def test_a_bucket_is_flat_uint8_and_large_enough():
    layout = BucketLayout(index=0, slots=(slot(0),), size_bytes=32)
    for data in (torch.zeros(32), torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="flat"):
            Bucket(layout, data)
    with pytest.raises(ValueError, match="needs 32 bytes"):
        Bucket(layout, torch.zeros(31, dtype=torch.uint8))


def test_views_share_the_buckets_memory():
    layout = BucketLayout(index=0, slots=(slot(0), slot(32, dtype="bfloat16")), size_bytes=48)
    bucket = Bucket(layout, torch.zeros(64, dtype=torch.uint8))
    for number, (_, view) in enumerate(bucket.views()):
        view.fill_(number + 1)
    assert torch.equal(bucket.data[:32].view(torch.float32), torch.ones(8))
    assert torch.equal(bucket.data[32:48].view(torch.bfloat16), torch.full((8,), 2.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.qint8])
def test_dtypes_that_cannot_travel_are_refused(dtype):
    with pytest.raises(ConfigError, match="cannot be sent"):
        dtype_name(dtype)


def test_specs_know_their_size():
    for name, dtype in DTYPES.items():
        for shape in ((), (0, 3), (3, 0), (2, 3, 4)):
            spec = TensorSpec.of("t", torch.empty(shape, dtype=dtype))
            assert (spec.dtype, spec.shape, spec.torch_dtype) == (name, shape, dtype)
            assert spec.size_bytes == math.prod(shape) * dtype.itemsize
            assert spec.num_rows * spec.row_bytes == spec.size_bytes
    with pytest.raises(ValueError, match="unknown dtype"):
        TensorSpec(name="t", dtype="complex64", shape=())
    with pytest.raises(ValueError, match="more than a tensor may have"):
        TensorSpec(name="t", dtype="float64", shape=(1 << 44,))


@given(tensors=specs, packing=packings, spare=st.integers(0, 3000))
def test_gapless_buckets_have_no_gaps(tensors, packing, spare):
    packing = packing.also(Packing(gapless=True))
    layouts = plan_buckets(tensors, bucket_bytes=needed_bytes(tensors, packing) + spare, packing=packing)
    for layout in layouts:
        assert layout.slots[0].offset_bytes == 0
        ends = [slot.end_bytes for slot in layout.slots]
        assert [slot.offset_bytes for slot in layout.slots[1:]] == ends[:-1]
        assert layout.size_bytes == ends[-1]


@given(first=packings, second=packings)
def test_what_both_can_read_is_what_each_can_read(first, second):
    both = first.also(second)
    for one in (first, second):
        assert both.one_dtype >= one.one_dtype
        assert both.slices <= one.slices
        assert both.gapless >= one.gapless
        assert both.gapless or both.alignment_bytes % one.alignment_bytes == 0
        assert both.also(one) == both
