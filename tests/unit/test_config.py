"""``UpdateConfig`` refuses wrong options before anything is opened."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from typer.testing import CliRunner

from weightcast.cli.app import app
from weightcast.cli.options import advanced
from weightcast.config import GONE, MAX_TIMEOUT_S, AdvancedOptions, UpdateConfig
from weightcast.errors import ConfigError
from weightcast.update import sessions
from weightcast.update.arguments import UpdateOptions, config_of
from weightcast.update.updater import WeightUpdater

CONVERTED = ("bucket_bytes", "max_extra_bytes", "wire_dtype")  # ``connect`` takes them in other types, too


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


def names(owner: type) -> set[str]:
    return set(owner.__annotations__)


def test_every_option_is_one_of_the_caller_or_of_tests() -> None:
    own = {field.name for field in fields(UpdateConfig)}
    assert names(UpdateOptions) - own == {"adapter", "draft", "on_event", "advanced"}
    assert own - names(UpdateOptions) - names(AdvancedOptions) == {"direct_by"}
    assert not names(UpdateOptions) & names(AdvancedOptions)
    assert not GONE.keys() & (names(UpdateOptions) | names(AdvancedOptions))


def test_types_of_the_options_are_those_of_the_config() -> None:
    hints = get_type_hints(UpdateConfig)
    for owner in (UpdateOptions, AdvancedOptions):
        for name, hint in get_type_hints(owner).items():
            if name in hints and name not in CONVERTED:
                assert hint == hints[name], name


def test_help_shows_each_option_with_its_default() -> None:
    shown = inspect.signature(WeightUpdater.connect).parameters
    defaults = {field.name: field.default for field in fields(UpdateConfig)}
    assert list(shown) == ["model", "targets", *UpdateOptions.__annotations__]
    assert {name: shown[name].default for name in UpdateOptions.__annotations__} == {
        name: defaults.get(name) for name in UpdateOptions.__annotations__
    }


@pytest.mark.parametrize("name", sorted(GONE))
def test_an_option_that_is_gone_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(ConfigError, match=f"connect has no option {name}") as caught:
        config_of(cast("UpdateOptions", {name: "resident"}))
    assert caught.value.hint == GONE[name]


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"transprot": "ipc"}, "connect has no option transprot", "did you mean transport? the options are transport,"),
        ({"cell_ranks": 2}, "cell_ranks is an advanced option", "write advanced={'cell_ranks': 2}"),
        ({"advanced": {"cell_rank": 2}}, "advanced has no option cell_rank", "did you mean cell_ranks? the options"),
        ({"advanced": {"xyz": 2}}, "advanced has no option xyz", "the options are cell_ranks, rendezvous_host,"),
        ({"advanced": {"pause": "abort"}}, "pause is an option of its own", "write pause='abort' beside advanced"),
        ({"advanced": {"cell_ranks": "2"}}, "cell_ranks='2': write a whole number", ""),
        ({"advanced": {"disk_readers": "me"}}, "disk_readers='me': choose one of user, group, all", ""),
        ({"transport": "relay"}, "transport='relay': choose one of auto, ipc, broadcast, direct, rdma, disk,", ""),
        ({"strict": 1}, "strict=1: write True or False", ""),
        ({"timeout_s": "5"}, "timeout_s='5': write a number", ""),
    ],
)
def test_an_option_that_is_unknown_or_malformed_is_refused_by_name(
    options: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(cast("UpdateOptions", options))
    assert str(caught.value).startswith(words)
    assert (caught.value.hint or "").startswith(hint)


def test_options_and_advanced_ones_become_one_config() -> None:
    found = config_of({"bucket_bytes": "1MiB", "wire_dtype": "bf16", "advanced": {"cell_ranks": 3, "alone": True}})
    assert (found.bucket_bytes, found.wire_dtype, found.cell_ranks, found.alone) == (1 << 20, "bfloat16", 3, True)
    assert config_of({"advanced": None}) == UpdateConfig()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--require", "resident"], "--verify LEVEL --strict"),
        (["--min-proven-share", "0.5"], "--strict"),
        (["--digest", "sha256"], "leave it out"),
        (["--direct-by", "memory"], "transport names the way"),
        (["--cell-ranks", "2"], "write --advanced cell_ranks=VALUE"),
        (["--rendezvous", "host"], "write --advanced rendezvous_host=VALUE"),
        (["--disk-folder", "/x"], "write --advanced disk_folder=VALUE"),
        (["--no-check-finite"], "write --advanced check_finite=false"),
        (["--advanced", "cell_ranks=two"], "--advanced cell_ranks=two: write a number"),
        (["--advanced", "check_finite=2"], "--advanced check_finite=2: write true or false"),
        (["--advanced", "cell_ranks"], "write --advanced NAME=VALUE"),
        (["--advanced", "cell_rank=2"], "did you mean cell_ranks?"),
    ],
)
def test_push_says_what_to_write_instead_of_a_flag_that_is_gone(tmp_path: Path, flags: list[str], words: str) -> None:
    command = ["push", str(tmp_path), "--to", "http://127.0.0.1:1", "--version", "1", *flags]
    done = CliRunner().invoke(app, command, prog_name="weightcast")
    assert done.exit_code == 2
    assert words in done.output


def test_values_of_advanced_flags_have_their_types() -> None:
    given = ["cell_ranks=2", "behaviour_tolerance=0.5", "check_finite=False", "disk_folder=/a=b", "disk_readers=all"]
    assert advanced(given) == {
        "cell_ranks": 2,
        "behaviour_tolerance": 0.5,
        "check_finite": False,
        "disk_folder": "/a=b",
        "disk_readers": "all",
    }
