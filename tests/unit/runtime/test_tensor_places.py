"""Tensors that move or change their form are found, by attributes and in compiled code alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.runtime import tensor_places
from weightcast.runtime.tensor_places import TensorPlaces

COUNT = 40


@pytest.fixture(params=["attributes", "compiled"])
def way(request, monkeypatch) -> str:
    """How tensors are looked at."""
    if request.param == "compiled":
        pytest.importorskip("numba")
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip("this torch exports no functions for DLPack")
        monkeypatch.setattr(tensor_places, "_MANY", 1)
    return request.param


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
    assert places.fits(tensors)
    return places


@pytest.mark.parametrize("number", [0, COUNT - 1])
@pytest.mark.parametrize("what", [*MOVES, *OTHER_FORMS])
def test_one_change_among_many_is_found(way, what, number):
    tensors = parameters()
    places = looked(tensors)
    before = tensors[number].data
    tensors[number].data = (MOVES | OTHER_FORMS)[what](before)
    lies, alike = places.compare(tensors)
    assert alike is (what in MOVES)
    assert not lies or what in OTHER_FORMS
    assert places.fits(tensors) is (what in MOVES)
    looked(tensors)
    tensors[number].data = before
    assert places.compare(tensors) == (True, True)


def test_another_device_is_found(way):
    tensors = parameters()
    places = looked(tensors)
    tensors[7] = nn.Parameter(tensors[7].to("meta"), requires_grad=False)
    assert places.compare(tensors)[0] is False
    assert not places.fits(tensors)
    assert not places.same_devices(TensorPlaces(tensors))
    assert TensorPlaces(tensors).compare(tensors) == (True, True)


def test_more_or_fewer_tensors_are_others(way):
    tensors = parameters()
    places = looked(tensors)
    assert places.compare(tensors[:-1]) == places.compare([*tensors, *tensors]) == (False, False)
    assert TensorPlaces([]).compare(tensors) == (False, False)
    assert TensorPlaces([]).compare([]) == (True, True)


def test_a_gap_that_moves_is_found(way):
    tensors: list[torch.Tensor] = [torch.zeros(8, 6)[::2, 1:] for _ in range(COUNT)]
    places = looked(tensors)
    tensors[3] = torch.zeros(4, 5)
    assert places.compare(tensors)[1] is False


def test_places_of_the_same_forms_elsewhere(way):
    tensors = parameters()
    places = looked(tensors)
    moved = [nn.Parameter(tensor.data.clone(), requires_grad=False) for tensor in tensors]
    others = TensorPlaces(moved, like=places)
    assert others.compare(moved) == (True, True)
    assert places.compare(moved) == others.compare(tensors) == (False, True)
    moved[-1].data = moved[-1].data.t()
    assert others.compare(moved)[1] is False


def test_bytes_that_are_not_the_values_fit_nothing(way):
    lazily = torch.zeros(2, 2, dtype=torch.complex64).conj()
    assert not TensorPlaces([lazily]).fits([lazily])


def test_no_tensor_is_kept_alive(way):
    tensors: list[Any] = parameters()
    places = looked(tensors)
    kept = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    assert [one() for one in kept] == [None] * COUNT
    assert len(places.addresses) == COUNT


def test_a_tensor_that_cannot_be_exported_is_looked_at_by_attributes(way):
    tensors = [*parameters(), torch.empty(2, device="meta")]
    places = TensorPlaces(tensors)
    assert places.compare(tensors) == (True, True)
    tensors[0].data = tensors[0].data.view(torch.int32)
    assert places.compare(tensors)[1] is False


def test_compiled_code_is_used_where_it_can_be(way):
    assert (TensorPlaces(parameters())._table is not None) is (way == "compiled")
