"""Every element written once: arithmetic on routes, against a brute-force count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.errors import ConfigError
from weightcast.receiver.coverage import uncovered
from weightcast.receiver.recorder import record_routes
from weightcast.wire.layout import TensorSpec
from weightcast.wire.routes import Region, Route


def rows(parameter: str, source: str, first: int, count: int, width: int) -> Route:
    region = Region(offset=first * width, shape=(count, width), stride=(width, 1))
    return Route(source=source, box_offset=(0, 0), box_shape=(count, width), parameter=parameter, region=region)


def test_all_written_once_is_covered():
    residents = {"qkv": torch.zeros(6, 4), "norm": torch.zeros(4)}
    routes = [rows("qkv", name, 2 * index, 2, 4) for index, name in enumerate("qkv")]
    norm = Region(offset=0, shape=(4,), stride=(1,))
    routes.append(Route(source="n", box_offset=(0,), box_shape=(4,), parameter="norm", region=norm))
    assert uncovered(routes, residents) == []


def test_what_is_not_written_is_named():
    residents = {"a": torch.zeros(6, 4), "b": torch.zeros(3), "scalar": torch.zeros(()), "empty": torch.zeros(0, 4)}
    assert uncovered([rows("a", "x", 0, 5, 4)], residents) == ["a", "b", "scalar"]


def test_what_is_written_twice_is_an_error_that_names_the_sources():
    residents = {"a": torch.zeros(6, 4)}
    with pytest.raises(ConfigError, match="a is written twice, from x, y"):
        uncovered([rows("a", "x", 0, 4, 4), rows("a", "y", 3, 3, 4)], residents)


def test_regions_that_are_no_boxes_are_counted_by_element():
    # Every second element of a flat parameter, as an interleaved layout has it.
    residents = {"a": torch.zeros(8)}

    def every_second(source: str, offset: int) -> Route:
        region = Region(offset=offset, shape=(4,), stride=(2,))
        return Route(source=source, box_offset=(0,), box_shape=(4,), parameter="a", region=region)

    assert uncovered([every_second("x", 0), every_second("y", 1)], residents) == []
    with pytest.raises(ConfigError, match="twice"):
        uncovered([every_second("x", 0), every_second("y", 0)], residents)


def test_a_parameter_with_gaps_is_counted_by_where_its_elements_are():
    # Columns of a wider tensor: its last element lies further on than it has elements.
    residents = {"a": torch.zeros(4, 4)[:, 2:]}

    def row(source: str, first: int) -> Route:
        region = Region(offset=4 * first, shape=(2, 2), stride=(4, 1))
        return Route(source=source, box_offset=(0, 0), box_shape=(2, 2), parameter="a", region=region)

    assert uncovered([row("x", 0), row("y", 2)], residents) == []
    with pytest.raises(ConfigError, match="a is written twice, from x, y"):
        uncovered([row("x", 1), row("y", 2)], residents)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_agrees_with_counting_every_element(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    boxes = []
    for _ in range(data.draw(st.integers(1, 3))):
        box = []
        for size in shape:
            start = data.draw(st.integers(0, size - 1))
            box.append(slice(start, data.draw(st.integers(start + 1, size))))
        boxes.append(tuple(box))
    sizes = [tuple(part.stop - part.start for part in box) for box in boxes]
    specs = [TensorSpec(name=f"s{index}", dtype="float32", shape=size) for index, size in enumerate(sizes)]

    def load(weights):
        for (_, tensor), box in zip(weights, boxes, strict=True):
            parameter[box].copy_(tensor)

    recording = record_routes(load, specs, {"p": parameter})
    assert not recording.why
    count = torch.zeros(shape)
    for box in set(map(str, boxes)):  # of copies to the same place the last one stays
        count[next(each for each in boxes if str(each) == box)] += 1
    routes = [route for found in recording.routes.values() for route in found]
    if (count > 1).any():
        with pytest.raises(ConfigError, match="twice"):
            uncovered(routes, {"p": parameter})
    else:
        assert uncovered(routes, {"p": parameter}) == ([] if (count == 1).all() else ["p"])
