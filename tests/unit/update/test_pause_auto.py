"""``pause="auto"``, the default: requests that run are kept where the engine can, and the log says where it cannot."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from tests.helpers.roster import Connecting, info, members_of
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.wire.engine_info import EngineInfo

KEEPS, ENDS, BOTH = "http://keeps", "http://ends", ("http://keeps", "http://ends")
ONLY_SLEEP = "its only pause is sleep, which drops every request"


def engine(*refused: str) -> EngineInfo:
    return msgspec.structs.replace(info("native"), no_pause=dict.fromkeys(refused, ONLY_SLEEP))


def pauses(plan: Connecting) -> dict[str, str | None]:
    plan.choose()
    return {url: link.start.pause for url, link in plan.links.items()}


def test_the_default_keeps_requests_that_run_where_the_engine_can(caplog):
    caplog.set_level(logging.WARNING, "weightcast")
    infos = {KEEPS: engine(), ENDS: engine("retract", "in_place", "wait")}
    plan = members_of(infos)
    assert pauses(plan) == {KEEPS: "retract", ENDS: "abort"}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{ENDS} (")
    assert "requests that run end at each update" in line
    assert ONLY_SLEEP in line
    plan.choose_again()
    assert len(caplog.records) == 1  # once for each connect


def test_an_engine_that_can_neither_keep_nor_end_requests_gets_the_pause_that_is_left(caplog):
    caplog.set_level(logging.WARNING, "weightcast")
    assert pauses(members_of({KEEPS: engine("retract", "abort", "wait")})) == {KEEPS: "in_place"}
    assert "in_place" in caplog.text


def test_an_engine_that_refuses_every_pause_is_refused():
    with pytest.raises(ConfigError, match=ONLY_SLEEP):
        members_of({KEEPS: engine("retract", "abort", "wait", "in_place")}).choose()


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place", "wait"])
def test_a_pause_that_is_named_is_taken_or_refused(pause: Any, caplog):
    caplog.set_level(logging.WARNING, "weightcast")
    assert pauses(members_of({KEEPS: engine()}, pause=pause)) == {KEEPS: pause}
    assert caplog.records == []
    with pytest.raises(ConfigError, match=f"cannot be updated with pause='{pause}'"):
        members_of({KEEPS: engine(pause)}, pause=pause).choose()


def test_an_unknown_pause_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match="auto, abort, retract, in_place, wait"):
        UpdateConfig(pause="freeze")  # type: ignore[arg-type]
