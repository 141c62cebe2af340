"""Measured updates: the tables of models, the synthetic weights, and one whole case with real processes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from weightcast.errors import ConfigError
from weightcast.lab.bench.case import order_of
from weightcast.lab.bench.raw import chunks
from weightcast.lab.bench.shapes import MODELS, model_shape
from weightcast.lab.bench.synthetic import Pattern, SyntheticEngine, key_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "tensors", "size_bytes"),
    [
        # What the checkpoints' own indices say; of the third, the part that is taken.
        ("qwen3-8b", 399, 16_381_470_720),
        ("qwen3-30b-a3b", 18_867, 61_064_245_248),
        ("llama-70b-20-layers", 183, 38_428_884_992),
        ("many-65536", 65_536, 65_536 * 64 * 1024),
        ("big-16", 16, 16 << 30),
    ],
)
def test_shapes_of_known_models(name: str, tensors: int, size_bytes: int) -> None:
    shape = model_shape(name)
    assert len(shape.places) == tensors == len({place.name for place in shape.places})
    assert shape.size_bytes == size_bytes


@pytest.mark.parametrize("name", sorted(MODELS))
def test_an_engine_keeps_every_element_exactly_once(name: str) -> None:
    shape = model_shape(name)
    kept = sum(math.prod(size) for size in shape.residents.values())
    assert kept * 2 == shape.size_bytes
    taken: set[tuple[str, int | None, int]] = set()
    for place in shape.places:
        assert place.row + place.shape[0] <= shape.residents[place.resident][-len(place.shape)]
        taken.add((place.resident, place.index, place.row))
    assert len(taken) == len(shape.places)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9, 10])
def test_everybody_comes_after_everybody_else_as_often(count: int) -> None:
    rounds = [order_of(turn, count) for turn in range(count if count % 2 == 0 else 2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    followed = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert followed.keys() == set(itertools.permutations(range(count), 2))
    assert len(set(followed.values())) <= 1


def test_a_size_makes_a_model_of_about_that_size() -> None:
    for text, size_bytes in (("dense-64MiB", 64 << 20), ("dense-1GiB", 1 << 30)):
        assert model_shape(text).size_bytes == pytest.approx(size_bytes, rel=0.2)
    with pytest.raises(ConfigError, match="is unknown"):
        model_shape("qwen3-9b")


def test_shards_of_a_tensor_have_the_words_of_the_whole_one() -> None:
    pattern = Pattern(CPU)
    whole = torch.empty(3000, 700, dtype=torch.bfloat16)
    pattern.fill(whole, key=11)
    assert whole.isfinite().all()
    part = torch.empty(1000, 700, dtype=torch.bfloat16)
    pattern.fill(part, key=11, first_word=1500 * 700)
    assert torch.equal(part.view(torch.int16), whole[1500:2500].view(torch.int16))
    pattern.fill(part, key=12, first_word=1500 * 700)
    assert not torch.equal(part.view(torch.int16), whole[1500:2500].view(torch.int16))


def test_one_wrong_bit_and_what_was_never_written_are_seen() -> None:
    shape, pattern = model_shape("tiny-moe"), Pattern(CPU)
    engine = SyntheticEngine(shape, CPU)
    engine.poison(pattern, 3)
    assert len(engine.wrong(pattern, 3)) == len(shape.places)
    for number, place in enumerate(shape.places):
        tensor = torch.empty(place.shape, dtype=torch.bfloat16)
        pattern.fill(tensor, key=key_of(3, number))
        engine.load_weights([(place.name, tensor)])
    assert engine.wrong(pattern, 3) == []
    assert len(engine.wrong(pattern, 4)) == len(shape.places)
    engine.region(shape.places[7]).view(torch.int16).view(-1)[5].bitwise_xor_(1)
    assert engine.wrong(pattern, 3) == [shape.places[7].name]


def test_chunks_cover_a_model() -> None:
    assert list(chunks(10, 4)) == [4, 4, 2]
    assert list(chunks(8, 4)) == [4, 4]
    assert list(chunks(3, 4)) == [3]
