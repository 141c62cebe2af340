"""``UpdateConfig`` refuses wrong options before anything is opened."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
import torch

from weightcast.config import MAX_TIMEOUT_S, UpdateConfig
from weightcast.errors import ConfigError
from weightcast.update import sessions
from weightcast.update.updater import WeightUpdater

# Options that ``connect`` also accepts in other types, which it converts.
CONVERTED = {"bucket_bytes": {str}, "max_extra_bytes": {str}, "wire_dtype": {torch.dtype}}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_deadline_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="a deadline is a positive number of seconds"):
        UpdateConfig(timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [MAX_TIMEOUT_S + 1, math.inf])
def test_deadline_over_six_hours_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="a deadline is at most 21600 seconds") as caught:
        UpdateConfig(timeout_s=timeout_s)
    assert "each single wait" in (caught.value.hint or "")


def test_longest_deadline_fits_the_longest_lease() -> None:
    assert UpdateConfig(timeout_s=MAX_TIMEOUT_S).timeout_s * sessions.LEASE_DEADLINES == 86_400


def types_in(hint: Any) -> set[Any]:
    """Members of a union; another type by itself."""
    return set(get_args(hint)) if type(None) in get_args(hint) or type(hint) is type(int | str) else {hint}


# Callbacks, and who calls: no options of an update.
OF_CONNECT_ALONE = {"adapter", "draft", "progress", "on_event", "alone"}


def test_keywords_of_connect_are_the_options_of_an_update() -> None:
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(WeightUpdater.connect).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in OF_CONNECT_ALONE
    }
    assert sorted(keywords) == sorted(field.name for field in fields(UpdateConfig))
    defaults = {field.name: field.default for field in fields(UpdateConfig)}
    assert {name: repr(default) for name, default in keywords.items()} == {
        name: repr(default) for name, default in defaults.items()
    }


def test_types_of_connect_are_those_of_the_options() -> None:
    hints = get_type_hints(WeightUpdater.connect)
    wanted = {name: types_in(hint) for name, hint in get_type_hints(UpdateConfig).items()}
    found = {name: types_in(hints[name]) - CONVERTED.get(name, set()) for name in wanted}
    assert found == wanted
    assert all(types <= types_in(hints[name]) for name, types in CONVERTED.items())
