"""Tensors that move or change their form are found."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.runtime.tensor_places import TensorPlaces

COUNT = 40


def parameters() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(4, 4), requires_grad=False) for _ in range(COUNT)]


Change = Callable[[torch.Tensor], torch.Tensor]
MOVES: dict[str, Change] = {
    "another storage": torch.clone,
    "further on in a storage": lambda data: torch.zeros(5, 4)[1:],
}
OTHER_FORMS: dict[str, Change] = {
    "another dtype": lambda data: data.view(torch.int32),
    "another dtype elsewhere": torch.Tensor.bfloat16,
    "another shape": lambda data: data.view(2, 8),
    "fewer rows": lambda data: data[:3],
    "fewer dimensions": lambda data: data.view(16),
    "more dimensions": lambda data: data.view(2, 2, 2, 2),
    "no elements": lambda data: data[:0],
    "a scalar": lambda data: data[0, 0],
    "other strides": torch.t,
    "strides with gaps": lambda data: torch.zeros(8, 4)[::2],
}


def looked(tensors: list[torch.Tensor]) -> TensorPlaces:
    places = TensorPlaces(tensors)
    assert places.addresses == tuple(tensor.data_ptr() for tensor in tensors)
    assert places.compare(tensors) == (True, True)
    return places


@pytest.mark.parametrize("number", [0, COUNT - 1])
@pytest.mark.parametrize("what", [*MOVES, *OTHER_FORMS])
def test_one_change_among_many_is_found(what, number):
    tensors = parameters()
    places = looked(tensors)
    before = tensors[number].data
    tensors[number].data = (MOVES | OTHER_FORMS)[what](before)
    lies, alike = places.compare(tensors)
    assert alike is (what in MOVES)
    assert not lies or what in OTHER_FORMS
    looked(tensors)
    tensors[number].data = before
    assert places.compare(tensors) == (True, True)


def test_another_device_is_found():
    tensors = parameters()
    places = looked(tensors)
    tensors[7] = nn.Parameter(tensors[7].to("meta"), requires_grad=False)
    assert places.compare(tensors)[0] is False
    assert not places.same_devices(TensorPlaces(tensors))
    assert TensorPlaces(tensors).compare(tensors) == (True, True)


def test_more_or_fewer_tensors_are_others():
    tensors = parameters()
    places = looked(tensors)
    assert places.compare(tensors[:-1]) == places.compare([*tensors, *tensors]) == (False, False)
    assert TensorPlaces([]).compare(tensors) == (False, False)
    assert TensorPlaces([]).compare([]) == (True, True)


def test_a_gap_that_moves_is_found():
    tensors: list[torch.Tensor] = [torch.zeros(8, 6)[::2, 1:] for _ in range(COUNT)]
    places = looked(tensors)
    tensors[3] = torch.zeros(4, 5)
    assert places.compare(tensors)[1] is False


def test_places_of_the_same_forms_elsewhere():
    tensors = parameters()
    places = looked(tensors)
    moved = [nn.Parameter(tensor.data.clone(), requires_grad=False) for tensor in tensors]
    others = TensorPlaces(moved, like=places)
    assert others.compare(moved) == (True, True)
    assert places.compare(moved) == others.compare(tensors) == (False, True)
    moved[-1].data = moved[-1].data.t()
    assert others.compare(moved)[1] is False


def test_no_tensor_is_kept_alive():
    tensors: list[Any] = parameters()
    places = looked(tensors)
    kept = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    assert [one() for one in kept] == [None] * COUNT
    assert len(places.addresses) == COUNT
