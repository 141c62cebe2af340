"""A rank of a running engine fails in the middle of its switch: the engine serves one version whole, or is paused."""

from __future__ import annotations

import pytest

from tests.helpers.harness import Engine, connect, free, next_version, serves_whole, trainer_of
from tests.helpers.torn import OUT_OF_MEMORY
from weightcast.errors import UpdateFailed

PLACES = {
    "device": ["--staging", "device"],
    "device that keeps storage": ["--staging", "device", "--keep-storage"],
    "host": ["--staging", "host"],
}


@pytest.fixture(scope="module", params=PLACES.values(), ids=PLACES.keys())
def engine(request):
    made = Engine("--tp", "2", *request.param)
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_half_way_takes_no_rank_to_another_version(engine: Engine, transport: str, rank: int) -> None:
    first, second, third = (next_version() for _ in range(3))
    trainer = trainer_of(first)
    with connect(trainer, [engine], transport=transport) as updater:
        updater.update(version=first)
        assert engine.ask("POST", f"/fault/{rank}/1")[0] == 200
        trainer.set_version(second)
        with pytest.raises(UpdateFailed, match=OUT_OF_MEMORY.split(".")[0]):
            updater.update(version=second)
        assert serves_whole(engine) == first
        assert not engine.info().paused
        trainer.set_version(third)
        assert updater.update(version=third).targets[0].proof == "resident"
        assert serves_whole(engine) == third


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_go_back_quarantines_its_engine(engine: Engine, rank: int) -> None:
    first, second, third = (next_version() for _ in range(3))
    trainer = trainer_of(first)
    with connect(trainer, [engine], transport="ipc") as updater:
        updater.update(version=first)
        assert engine.ask("POST", f"/fault/{rank}/2")[0] == 200
        trainer.set_version(second)
        with pytest.raises(UpdateFailed, match=OUT_OF_MEMORY.split(".")[0]):
            updater.update(version=second)
        info = free(engine)
        assert (info.state, info.version, info.paused) == ("quarantined", first, True)
        assert f"rank {rank}: the old version could not be switched back" in info.message
        trainer.set_version(third)
        assert updater.update(version=third).targets[0].status == "serving"
        assert serves_whole(engine) == third
        assert not engine.info().paused
