"""Our plug-in's hook points against the real package of LMDeploy, and against one that has changed."""

from __future__ import annotations

import subprocess

import pytest

from tests.engines.environment import ROOT
from tests.engines.forked import run
from tests.engines.lmdeploy_server import IMPORTED, VERSIONS, lmdeploy

pytestmark = [pytest.mark.engine]

CHECK = """
import sys
sys.path.insert(0, {source!r})
import weightcast.plugins.hook_points as points
{change}
from weightcast.plugins.lmdeploy import engine_process, rank, server
points.LMDEPLOY.check("server", "engine", "ranks")
import os
os.environ["WEIGHTCAST_LMDEPLOY_FOLDER"] = folder = "/nowhere"
from lmdeploy.pytorch.engine.model_agent import agent
from lmdeploy.pytorch.engine.mp_engine.base_worker import EngineWorkerBase
from lmdeploy.pytorch.engine.mp_engine.zmq_engine import ZMQMPEngine
from lmdeploy.serve.openai import api_server
before = (agent.load_model_weights, agent.BaseModelAgent._async_step, api_server.serve, ZMQMPEngine._mp_proc)
server.patch(folder); engine_process.patch(); rank.install(folder)
after = (agent.load_model_weights, agent.BaseModelAgent._async_step, api_server.serve, ZMQMPEngine._mp_proc)
assert all(old is not new for old, new in zip(before, after))
import inspect
public = {{name for name, value in inspect.getmembers(EngineWorkerBase) if inspect.isfunction(value)}}
assert {{method.__name__ for method in engine_process.METHODS}} <= public
print(points.LMDEPLOY.version(), sum(map(len, points.LMDEPLOY.places.values())))
"""


def check(change: str = "") -> subprocess.CompletedProcess[str]:
    """Checks and patches LMDeploy as its processes do, after a change to it."""
    python, environment = lmdeploy(VERSIONS[0])
    code = CHECK.format(change=change, source=str(ROOT / "src"))
    return run(python, ["-c", code], modules=IMPORTED, env=environment)


def test_every_hook_point_is_there_and_every_hook_takes() -> None:
    done = check()
    assert done.returncode == 0, done.stderr[-3000:]
    version, count = done.stdout.split()
    assert version == "0.18.0"
    assert int(count) > 30


def test_an_lmdeploy_without_a_hook_point_is_refused_and_says_why() -> None:
    done = check(
        "from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync\n"
        "del InputsMakerAsync.prefetch_next_inputs\n"
        "from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent\n"
        "BaseModelAgent.sleep = lambda self: None"
    )
    assert done.returncode == 1
    said = done.stderr
    assert "LMDeploy 0.18.0 is not as this plug-in expects" in said
    assert "InputsMakerAsync.prefetch_next_inputs is missing" in said
    assert "BaseModelAgent.sleep has no parameter level" in said
