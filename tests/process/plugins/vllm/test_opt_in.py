"""A vLLM that did not ask for our backend: what ``register``, which vLLM calls in every process, does to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import ROOT

CORE = """
class EngineCore:
    def __init__(self, vllm_config):
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        self.vllm_config = vllm_config
        self.cache = self._initialize_kv_caches(vllm_config)
    def _initialize_kv_caches(self, vllm_config):
        return "cache"
"""
FACTORY = """
class WeightTransferEngineFactory:
    _registry = {"nccl": 1}
    @classmethod
    def register_engine(cls, name, module, class_name):
        cls._registry[name] = (module, class_name)
"""
PLUGINS = """
loaded = False
def load_general_plugins():
    global loaded
    if not loaded:
        loaded = True
        from weightcast.plugins.vllm import register
        register()
"""


def a_vllm(folder: Path, **modules: str) -> Path:
    """A package ``vllm`` with these modules; ``__`` in a name stands for a dot."""
    for name, text in ({"plugins": PLUGINS} | modules).items():
        place = folder / "vllm"
        for part in name.split("__")[:-1]:
            place = place / part
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").touch()
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name.split('__')[-1]}.py").write_text(text)
    (folder / "vllm" / "__init__.py").touch()
    return folder


def said(folder: Path, code: str, **variables: str) -> Any:
    """Runs code in a process that has this vLLM and the package under test; returns what it prints."""
    path = os.pathsep.join((str(folder), str(ROOT / "src")))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environment |= {"PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = (
    "import json, sys\n"
    "from vllm.plugins import load_general_plugins\n"
    "before = set(sys.modules)\n"
    "load_general_plugins()\n"
    "print(json.dumps(sorted(set(sys.modules) - before)))\n"
)


@pytest.mark.parametrize("variables", [{}, {"VLLM_PLUGINS": "weightcast"}], ids=["unset", "named"])
def test_a_vllm_without_weight_transfer_loads_our_plug_in(tmp_path: Path, variables: dict[str, str]) -> None:
    new = said(a_vllm(tmp_path, v1__engine__core="raise ImportError('not asked for')"), LOADED, **variables)
    ours = [name for name in new if name.startswith("weightcast.")]
    assert set(ours) <= {"weightcast.version", "weightcast.plugins", "weightcast.plugins.vllm"}
    assert not [name for name in new if name.partition(".")[0] in ("torch", "vllm", "fastapi", "msgspec")]


# The core is imported before the plug-in is loaded, as in a process of its own; or after it, as where it is forked.
@pytest.mark.parametrize("first", ["", "load_general_plugins()\n"], ids=["core-first", "plug-in-first"])
def test_only_a_core_whose_configuration_names_our_backend_gets_our_methods(tmp_path: Path, first: str) -> None:
    code = (
        "import json\n"
        "from types import SimpleNamespace as S\n"
        "from vllm.plugins import load_general_plugins\n"
        f"{first}"
        "from vllm.v1.engine.core import EngineCore\n"
        "def made(config):\n"
        "    core = EngineCore(S(weight_transfer_config=config))\n"
        "    return [core.cache, hasattr(core, 'weightcast_core')]\n"
        "print(json.dumps([made(None), made(S(backend='nccl')), made(S(backend='weightcast'))]))\n"
    )
    found = said(a_vllm(tmp_path, v1__engine__core=CORE), code)
    assert found == [["cache", False], ["cache", False], ["cache", True]]


@pytest.mark.parametrize("first", ["", "load_general_plugins()\n"], ids=["core-first", "plug-in-first"])
def test_a_vllm_that_knows_no_weight_transfer_makes_its_core(tmp_path: Path, first: str) -> None:
    code = (
        "import json\n"
        "from types import SimpleNamespace as S\n"
        "from vllm.plugins import load_general_plugins\n"
        f"{first}"
        "from vllm.v1.engine.core import EngineCore\n"
        "core = EngineCore(S())  # as in vLLM 0.15\n"
        "print(json.dumps([core.cache, hasattr(core, 'weightcast_core')]))\n"
    )
    assert said(a_vllm(tmp_path, v1__engine__core=CORE), code) == ["cache", False]


def test_somebody_who_only_looks_for_a_module_takes_nothing_from_us(tmp_path: Path) -> None:
    code = (
        "import importlib.util, json, sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "before = len(sys.meta_path)\n"
        "load_general_plugins()\n"
        "name = 'vllm.distributed.weight_transfer.factory'\n"
        "looked = importlib.util.find_spec(name) is not None and name not in sys.modules\n"
        "import vllm.v1.engine.core\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory\n"
        "print(json.dumps([looked, 'weightcast' in factory._registry, len(sys.meta_path) - before]))\n"
    )
    folder = a_vllm(tmp_path, distributed__weight_transfer__factory=FACTORY, v1__engine__core=CORE)
    assert said(folder, code) == [True, True, 0]


def test_a_module_that_fails_at_first_is_ours_when_it_is_imported_again(tmp_path: Path) -> None:
    code = (
        "import json, os\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "try:\n"
        "    import vllm.distributed.weight_transfer.factory\n"
        "except KeyError as error:\n"
        "    failed = str(error)\n"
        "os.environ['READY'] = '1'\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory\n"
        "print(json.dumps([failed, 'weightcast' in factory._registry]))\n"
    )
    folder = a_vllm(tmp_path, distributed__weight_transfer__factory=f"import os; os.environ['READY']\n{FACTORY}")
    assert said(folder, code) == ["'READY'", True]


def test_the_backend_is_registered_when_vllm_imports_its_own(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "early = 'vllm.distributed.weight_transfer.factory' in sys.modules\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory\n"
        "print(json.dumps([early, factory._registry['weightcast'], len(sys.meta_path)]))\n"
    )
    folder = a_vllm(tmp_path, distributed__weight_transfer__factory=FACTORY, v1__engine__core=CORE)
    early, place, _ = said(folder, code)
    assert (early, place) == (False, ["weightcast.plugins.vllm.worker", "WeightcastEngine"])


def test_a_registry_of_another_shape_breaks_nothing(tmp_path: Path) -> None:
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "import vllm.distributed.weight_transfer.factory, vllm.v1.engine.core\n"
        "print('true')\n"
    )
    folder = a_vllm(tmp_path, distributed__weight_transfer__factory="FACTORY = 1", v1__engine__core="CORE = 1")
    assert said(folder, code) is True


def test_a_trainers_log_stays_the_trainers(tmp_path: Path) -> None:
    code = (
        "import json, logging, sys\n"
        "logging.basicConfig(filename=sys.argv[0] + 'trainer.log', level=logging.WARNING)\n"
        "theirs = logging.getLogger('vllm')\n"
        "theirs.addHandler(logging.StreamHandler()); theirs.propagate = False\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from weightcast.plugins.vllm import share_log_handlers\n"
        "share_log_handlers()  # where vLLM runs in the trainer, with our receiver\n"
        "logging.getLogger('weightcast.update').error('update to version 7 failed')\n"
        "print(json.dumps(open(sys.argv[0] + 'trainer.log').read()))\n"
    )
    folder = a_vllm(tmp_path)
    script = tmp_path / "trainer.py"
    script.write_text(code)
    found = said(folder, f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r})")
    assert "update to version 7 failed" in found
