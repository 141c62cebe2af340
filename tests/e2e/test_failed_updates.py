"""However an update fails, its error says by ``report`` what each engine serves."""

from __future__ import annotations

import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.harness import connect, next_version, serves_whole, trainer_of
from weightcast import WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed, WeightcastError

pytestmark = pytest.mark.deadlines
GUIDES = Path(__file__).parents[2] / "docs" / "reliability.md"


def rows(error: WeightcastError) -> list[tuple[str, str, int | None]]:
    assert error.report is not None
    return [(row.url, row.status, row.version_after) for row in error.report.targets]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_gone_fails_the_update_with_a_report(fresh, how):
    well, gone = fresh("--local"), fresh("--local")
    first, second = next_version(), next_version()
    model = trainer_of(first)
    with connect(model, [well, gone], timeout_s=3.0) as updater:
        updater.update(version=first)
        gone.signal(how)
        model.set_version(second)
        with pytest.raises(UpdateFailed, match=gone.url) as caught:
            updater.update(version=second)
        assert rows(caught.value) == [(well.url, "untouched", first), (gone.url, "quarantined", None)]
        assert caught.value.half_updated == (gone.url,)
        updater.retarget([well.url])
        assert updater.update(version=second).ok
    assert serves_whole(well) == second


def test_the_last_engine_that_is_gone_is_in_the_report_too(fresh):
    gone = fresh("--local")
    version = next_version()
    with connect(trainer_of(version), [gone], on_failure="quarantine") as updater:
        gone.close()
        with pytest.raises(UpdateFailed, match="cannot connect") as caught:
            updater.update(version=version)
        assert rows(caught.value) == [(gone.url, "quarantined", None)]


def test_an_update_without_a_number_says_so_too(fresh):
    gone = fresh("--local")
    with connect(trainer_of(next_version()), [gone]) as updater:
        gone.close()
        with pytest.raises(UpdateFailed, match="cannot connect") as caught:
            updater.update()
        assert rows(caught.value) == [(gone.url, "quarantined", None)]


def test_a_model_that_is_not_as_it_was_is_reported_too(fresh):
    engine = fresh("--local")
    first, second = next_version(), next_version()
    model = trainer_of(first)
    with connect(model, [engine]) as updater:
        updater.update(version=first)
        name, good = next(iter(model.named_parameters()))
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, torch.nn.Parameter(torch.zeros(3, 3)))
        with pytest.raises(WeightcastError, match=re.escape(name)) as caught:
            updater.update(version=second)
        assert rows(caught.value) == [(engine.url, "untouched", first)]
        setattr(model.get_submodule(path), last, good)
        model.set_version(second)
        assert updater.update(version=second).ok
    assert serves_whole(engine) == second


def test_a_call_that_is_no_update_has_no_report(engines):
    with connect(trainer_of(0), [engines.one]) as updater:
        pass
    with pytest.raises(ConfigError, match="closed") as caught:
        updater.update()
    assert caught.value.report is None


def recipe() -> str:
    """The loop of the page, as it is written there."""
    page = GUIDES.read_text()
    part = page[page.index("## Catch, retarget, go on") :]
    return textwrap.dedent(part.split("```python\n", 1)[1].split("```", 1)[0])


def test_the_recipe_of_the_page_goes_on_without_an_engine_that_dies(fresh, capsys):
    well, gone = fresh("--local"), fresh("--local")
    steps = [next_version() for _ in range(3)]
    model = trainer_of(steps[0])

    def train(step: int) -> None:
        model.set_version(step)
        if step == steps[1]:
            gone.signal(signal.SIGKILL)

    program: dict[str, Any] = {"train": train, "model": model, "steps": steps, "urls": [well.url, gone.url]}
    exec(compile(recipe(), str(GUIDES), "exec"), program | {"WeightUpdater": WeightUpdater})
    assert serves_whole(well) == steps[-1]
    assert gone.url in capsys.readouterr().out
