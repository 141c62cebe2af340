"""Random programs of views and copies: their recording, played on real values, gives what the program gives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.errors import ConfigError
from weightcast.exporters.recording import NotRecorded, Recorder
from weightcast.exporters.segments import Arranged, Segment, check_used_once
from weightcast.wire.box import Box

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple)
FORMS = ("narrow", "select", "transpose", "chunk", "clone", "contiguous", "stack", "cat", "unsqueeze", "reshape")


@st.composite
def programs(draw):
    """Shapes of sources, and steps that each append tensors to the list that begins with the sources."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=2))
    step = st.tuples(st.sampled_from(FORMS), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
    return shapes, draw(st.lists(step, min_size=1, max_size=5))


def run(steps, sources):
    """The list of tensors after the steps; a step that does not fit the tensor that it takes is left out."""
    found = list(sources)
    for form, which, a, b in steps:
        tensor = found[which % len(found)]
        dim = a % tensor.dim() if tensor.dim() else 0
        if form == "clone":
            found.append(tensor.clone(memory_format=torch.contiguous_format))
        elif form == "contiguous":
            found.append(tensor.contiguous())
        elif form == "unsqueeze" and tensor.dim() < 4:
            found.append(tensor.unsqueeze(dim))
        elif form == "stack" and tensor.dim() < 4 and tensor.shape == found[b % len(found)].shape:
            found.append(torch.stack([tensor, found[b % len(found)]], dim=dim))
        elif form == "reshape":
            found.append(tensor.reshape(-1))
        elif tensor.dim() == 0:
            continue
        elif form == "narrow":
            start = b % tensor.shape[dim]
            found.append(tensor.narrow(dim, start, 1 + (a + b) % (tensor.shape[dim] - start)))
        elif form == "select":
            found.append(tensor.select(dim, b % tensor.shape[dim]))
        elif form == "transpose":
            found.append(tensor.transpose(dim, b % tensor.dim()))
        elif form == "chunk":
            found.extend(tensor.chunk(2, dim))
        elif form == "cat" and tensor.shape == found[b % len(found)].shape:
            found.append(torch.cat([tensor, found[b % len(found)]], dim=dim))
    return found


def played(segments, shape, sources):
    """Copies the boxes of the sources, and counts how often each element is written."""
    values, counts = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for segment in segments:
        source, box = sources[segment.source], Box(offset=segment.at, shape=segment.shape)
        place = tuple(slice(at, at + n) for at, n in zip(segment.at, segment.shape, strict=True))
        values[place] = segment.view(source, (0,) * source.dim(), box)
        counts[place] += 1
    return values, counts


@settings(max_examples=400)
@given(programs())
def test_a_recording_moves_the_elements_that_the_program_moves(program):
    shapes, steps = program
    real = [
        (torch.arange(math.prod(shape)) + 1000 * (number + 1)).reshape(shape) for number, shape in enumerate(shapes)
    ]
    wanted = run(steps, real)
    recorder = Recorder()
    stand_ins = [recorder.source(number, shape, torch.int64) for number, shape in enumerate(shapes)]
    with torch.no_grad(), recorder:
        made = run(steps, stand_ins)
    assert len(made) == len(wanted)
    for tensor, want in zip(made, wanted, strict=True):
        assert tuple(tensor.shape) == tuple(want.shape)
        try:
            segments = recorder.segments(tensor)
        except NotRecorded:
            continue  # not every program is a union of boxes; the next tests say which must be
        values, counts = played(segments, tuple(want.shape), real)
        assert torch.equal(counts, torch.ones_like(counts))
        assert torch.equal(values, want)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_experts_cut_out_of_copied_halves_are_one_box_each(rows, dim):
    """transformers takes stacked experts apart in this way: halves, each copied, then one expert after another."""
    experts, columns = 4, 5
    shape = (experts, 2 * rows, columns) if dim == 0 else (experts, columns, 2 * rows)
    recorder = Recorder()
    fused = recorder.source(7, shape, torch.bfloat16)
    with torch.no_grad(), recorder:
        halves = [half.contiguous() for half in fused.chunk(2, dim=dim + 1)]
        cut = [[one.squeeze(0) for one in half.split(1)] for half in halves]
    for part, half in enumerate(cut):
        for index, one in enumerate(half):
            [segment] = recorder.segments(one)
            assert segment.source == 7
            first = (index, part * rows, 0) if dim == 0 else (index, 0, part * rows)
            assert segment.box.offset == first
            assert segment.shape == tuple(one.shape)
            assert segment.at == (0, 0)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda a: a + 1, "computed by aten::add"),
        (lambda a: a.clone().mul_(2), "computed by aten::mul_, in place"),
        (lambda a: a.view(torch.int32), "to torch.int32"),
        (lambda a: a.to(torch.bfloat16), "computed by aten::_to_copy"),
        (lambda a: torch.zeros(4, device="meta"), "computed by aten::zeros"),
        (lambda a: a.expand(2, 4, 6), "repeated"),
        (lambda a: a.squeeze_(), "aten::squeeze_, in place"),
    ],
)
def test_values_that_are_computed_are_refused_with_the_operation(program, words):
    recorder = Recorder()
    source = recorder.source(0, (4, 6), torch.float32)
    with torch.no_grad(), recorder:
        made = program(source)
    with pytest.raises(NotRecorded, match=words):
        recorder.segments(made)


@pytest.mark.parametrize(
    ("rows", "works"), [([(0, 2), (2, 2)], True), ([(0, 2)], False), ([(0, 4), (1, 2)], False), ([(0, 4)], True)]
)
def test_every_element_must_be_used_once(rows, works):
    arranged = [
        Arranged(
            name=f"part {first}",
            shape=(count, 3),
            segments=(Segment(source=0, box=Box(offset=(first, 0), shape=(count, 3)), dims=(0, 1), at=(0, 0)),),
        )
        for first, count in rows
    ]
    if works:
        check_used_once([("whole", (4, 3))], arranged)
    else:
        with pytest.raises(ConfigError, match="whole"):
            check_used_once([("whole", (4, 3))], arranged)
