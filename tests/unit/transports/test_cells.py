"""How engines are divided into cells, and what a trainer rank sends to which of them."""

from __future__ import annotations

import itertools
import threading
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.helpers.clock import PATIENCE_S
from tests.unit.cli.test_plan import SPECS
from tests.unit.transports.test_direct_ways import engine, topology
from tests.unit.update.test_exchange import Post, invited
from weightcast.cli.app import app
from weightcast.comm.group_moves import Move
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.transports.cells import Member, cells_of, divide
from weightcast.transports.preflight import choose_transport
from weightcast.update.estimate import make_plan
from weightcast.update.exchange import Exchange
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, Packing, TensorSlot, TensorSpec
from weightcast.wire.pieces import WantedBox, encode_wanted


@given(sizes=st.lists(st.integers(1, 20), max_size=40), most=st.integers(1, 30))
def test_no_engine_is_divided_and_no_cell_is_too_large(sizes: list[int], most: int) -> None:
    engines = list(enumerate(sizes))
    cells = divide(engines, lambda engine: engine[1], most)
    assert [engine for cell in cells for engine in cell] == engines
    for cell in cells:
        assert len(cell) == 1 or sum(ranks for _, ranks in cell) <= most
    for cell, after in itertools.pairwise(cells):
        assert sum(ranks for _, ranks in cell) + after[0][1] > most  # else the next one would be in it


def test_a_cell_has_an_engine_rank_or_more() -> None:
    with pytest.raises(ConfigError, match="cell_ranks=0"):
        UpdateConfig(cell_ranks=0)


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        ({"transport": "broadcast"}, [128]),
        ({"transport": "broadcast", "cell_ranks": 64}, [64, 64]),
        ({"transport": "direct", "direct_by": "relay"}, [128]),
        ({"transport": "direct", "direct_by": "relay", "cell_ranks": 100}, [100, 28]),
        ({"transport": "direct", "direct_by": "messages"}, [64, 64]),
    ],
)
def test_a_fleet_is_divided_where_that_costs_no_bytes(options: dict[str, Any], cells: list[int]) -> None:
    """Messages go to one engine rank alone; a broadcast, and the first of a chain, carry everything once more."""
    config = UpdateConfig(**options)
    place = topology(["cpu"], *[engine("cpu", host="another")] * 128, variant=config.direct_by)
    spec = choose_transport(config.transport, place)
    found = cells_of([(spec.cells, [Member(url, "weightcast", 1) for url in place.infos])], config.cell_ranks)
    assert [len(cell) for cell in found] == cells


def test_plan_shows_the_cells() -> None:
    settings: dict[str, Any] = {"model": "m", "engine": "native", "packing": Packing(), "bucket_bytes": 16384}
    assert make_plan(SPECS, **settings, engine_ranks=130).cells == (130,)
    assert make_plan(SPECS, **settings, engine_ranks=300).cells == (256, 44)
    assert make_plan(SPECS, **settings, engine_ranks=130, cell_ranks=64).cells == (64, 64, 2)
    assert make_plan(SPECS, **settings, engine_ranks=24, tp=8, cell_ranks=20).cells == (16, 8)
    assert make_plan(SPECS, **settings, engine_ranks=16, tp=8, cell_ranks=4).cells == (8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--targets=3"],
            "broadcast: 1 cell of 3 engine ranks; trainer rank 0 sends each bucket to each cell, 64 B in all",
        ),
        (
            ["--targets=3", "--tp=2", "--cell-ranks=2"],
            "3 cells of 2 engine ranks; trainer rank 0 sends each bucket to each",
        ),
        (["--targets=3", "--tp=2", "--cell-ranks=2"], "each cell, 192 B in all"),
        (["--targets=3", "--tp=2", "--cell-ranks=4"], "broadcast: 2 cells of 2 to 4 engine ranks"),
    ],
)
def test_the_command_plan_shows_the_cells(tmp_path, options: list[str], words: str) -> None:
    save_file({"w": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    result = CliRunner().invoke(app, ["plan", str(tmp_path), *options], prog_name="weightcast")
    assert result.exit_code == 0, result.output
    assert words in result.output


# -- messages of a trainer rank

SPEC = TensorSpec(name="w", dtype="uint8", shape=(8, 8))
WANTED = encode_wanted({"w": (WantedBox((0, 0), (8, 8)),)})
PARTS = {"": [(0, Box(offset=(0, 0), shape=(8, 8)))]}


class Breaking(Post):
    """A group whose messages fail from some bucket on."""

    def __init__(self, breaks_at: int = 99) -> None:
        super().__init__(1, [WANTED])
        self.breaks_at = breaks_at
        self.closed = False

    def start_moves(self, sends: list[Move]) -> list[Any]:
        if len(self.messages.get(1, ())) >= self.breaks_at:
            raise GroupFailed("the engine is gone")
        return super().start_moves(sends)

    def close(self) -> None:
        self.closed = True


def bucket(index: int) -> Bucket:
    layout = BucketLayout(index=index, slots=(TensorSlot(spec=SPEC, offset_bytes=0, num_rows=8),), size_bytes=64)
    return Bucket(layout, torch.full((64,), index, dtype=torch.uint8))


def firsts(post: Post) -> list[int]:
    """The bucket of each message."""
    return [data[0] for data in post.messages.get(1, [])]


def test_messages_that_fail_in_one_cell_do_not_keep_the_others_from_theirs() -> None:
    well, broken, again = Breaking(), Breaking(breaks_at=2), Breaking()
    end = Exchange(rank=0, num_trainers=1, device=torch.device("cpu"), timeout_s=1.0)
    groups = {"well": well, "broken": broken}
    assert end.use({invited(2, name): cast(UpdateGroup, group) for name, group in groups.items()}) == {}
    end.begin()
    for index in range(4):
        end.send(bucket(index), PARTS)
    assert end.failures == {"broken": "the engine is gone"}
    assert (firsts(well), firsts(broken)) == ([0, 1, 2, 3], [0, 1])
    end.drain()

    end.begin()  # the next attempt
    assert end.use({invited(2, "again"): cast(UpdateGroup, again)}) == {}
    end.keep(("well", "again"))
    assert broken.closed
    for index in range(2):
        end.send(bucket(index), PARTS)
    end.drain()
    assert end.failures == {}
    assert (firsts(well)[-2:], firsts(again)) == ([0, 1], [0, 1])


class InTurn(Post):
    """A group that notes when it is its turn."""

    def __init__(self, name: str, turns: list[str]) -> None:
        super().__init__(2, [WANTED])
        self.name, self.turns = name, turns

    def start_moves(self, sends: list[Move]) -> list[Any]:
        self.turns.append(self.name)
        return super().start_moves(sends)

    def close(self) -> None:
        pass


def test_every_trainer_rank_sends_to_the_cells_in_one_order(monkeypatch) -> None:
    """NCCL connects two ranks at their first message: ranks that begin with different cells wait for each other."""
    met = {name: threading.Event() for name in "cde"}
    turns: list[list[str]] = [[], []]

    def join(*, name: str, rank: int, **_: object) -> InTurn:
        after = {"c": "d", "d": "e"}.get(name)  # the first one invited comes about last
        if after is not None:
            assert met[after].wait(PATIENCE_S)
        met[name].set()
        return InTurn(name, turns[rank])

    monkeypatch.setattr(UpdateGroup, "join", join)
    head, other = (
        Exchange(rank=rank, num_trainers=2, device=torch.device("cpu"), timeout_s=PATIENCE_S) for rank in range(2)
    )
    first = [invited(3, name) for name in "ab"]
    for rank, end in enumerate((head, other)):
        end.use({one: cast(UpdateGroup, InTurn(one.group, turns[rank])) for one in first})
    again = [invited(3, name) for name in "cde"]  # "b" has failed
    head.keep("acde")
    head.use({one: cast(UpdateGroup, InTurn(one.group, turns[0])) for one in again})
    other.keep("acde")
    assert other.join(again) == {}
    for end in (head, other):
        end.begin()
        end.send(bucket(0), PARTS)
    assert turns[0] == turns[1]
    assert sorted(turns[0]) == list("acde")
