"""Nobody without the key reaches the routes of our receiver, in any engine, with any FastAPI that it permits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import engine_python
from tests.engines.overlays import (
    HOST_WEB,
    HTTP_PARSER,
    LAZY_WEB,
    NEWEST_WEB,
    OLDEST_WEB,
    overlay,
    receiver_path,
)

pytestmark = [pytest.mark.engine]

RIG = Path(__file__).parent / "route_guard_rig.py"
ENVIRONMENTS = {
    "sglang": "sglang-0.5.23-cpu",
    "lmdeploy": "lmdeploy-0.18.0-cpu",
    "vllm": "vllm-0.32.0-cpu",
    "reference": "vllm-0.32.0-cpu",
    "bare": "vllm-0.32.0-cpu",
}
# vLLM itself takes FastAPI from 0.133 to 0.136 with Starlette 1.0.1 or newer.
OF_VLLM = ("fastapi==0.133.0", "starlette==1.0.1")
ANY = (OLDEST_WEB, HOST_WEB, LAZY_WEB, NEWEST_WEB)
# `make test` plays some, `make engine-test` all.
CASES = [
    *((engine, web) for engine in ("sglang", "lmdeploy") for web in (HOST_WEB, NEWEST_WEB)),
    ("vllm", OF_VLLM),
    ("reference", OLDEST_WEB),
    *(
        pytest.param(*case, marks=pytest.mark.engine_full)
        for case in [
            *((engine, web) for engine in ("sglang", "lmdeploy") for web in (OLDEST_WEB, LAZY_WEB)),
            *(("vllm", web) for web in (HOST_WEB, NEWEST_WEB)),
            ("reference", NEWEST_WEB),
            ("bare", OLDEST_WEB),
        ]
    ),
]


def played(engine: str, web: tuple[str, ...], tmp_path: Path, **keys: str) -> dict[str, Any]:
    """Runs the rig with these versions of FastAPI and Starlette, and returns what it found."""
    python = engine_python(ENVIRONMENTS[engine])
    path = (str(overlay(python, *web)), receiver_path(python, tmp_path), str(overlay(python, HTTP_PARSER)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "VLLM_TARGET_DEVICE": "cpu"}
    given = [f"{name}={key}" for name, key in keys.items()]
    command = [str(python), "-W", "ignore", str(RIG), engine, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["versions"] == [wheel.partition("==")[2] for wheel in web[:2]]
    return found


def answers(found: dict[str, Any], who: str) -> set[int]:
    """The statuses that somebody got from our routes; negative where our handler was not reached."""
    return set(found["holders"][who].values())


@pytest.mark.parametrize(("engine", "web"), CASES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_strangers_reach_nothing_whatever_they_say(engine: str, web: tuple[str, ...], tmp_path: Path) -> None:
    found = played(engine, web, tmp_path, api="secret")
    assert found["leaks"] == []
    assert found["tries"] > 3000
    assert answers(found, "nobody") == {-401}
    assert answers(found, "api") == {200}


@pytest.mark.parametrize("web", [OLDEST_WEB, NEWEST_WEB], ids=lambda web: web[0])
def test_in_sglang_only_the_admin_key_updates_where_there_is_one(web: tuple[str, ...], tmp_path: Path) -> None:
    alone = played("sglang", web, tmp_path, admin="a-key")
    assert alone["leaks"] == []
    assert (answers(alone, "nobody"), answers(alone, "admin")) == ({-401}, {200})
    both = played("sglang", web, tmp_path, api="u-key", admin="a-key")
    assert both["leaks"] == []
    assert [answers(both, who) for who in ("nobody", "api", "admin")] == [{-401}, {-401}, {200}]


@pytest.mark.parametrize("engine", ["sglang", "lmdeploy"])
def test_a_server_without_keys_answers_everybody(engine: str, tmp_path: Path) -> None:
    found = played(engine, NEWEST_WEB, tmp_path)
    assert answers(found, "nobody") == {200}
