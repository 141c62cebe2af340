"""Imports of parts of the package: the packages that they load, and the words for one that is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_without_its_packages_the_command_says_what_to_install():
    # A meta path finder that refuses typer is what a bare `pip install weightcast` looks like.
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('typer', 'rich'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from weightcast.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert 'pip install "weightcast[cli]"' in done.stderr


def test_help_does_not_import_torch():
    code = "import sys\nfrom weightcast.cli import app\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


def test_weightcast_never_imports_opentelemetry_by_itself():
    code = (
        "import sys\n"
        "from tests.helpers.watching import tell_session, trainer_events\n"
        "from weightcast.watch.listeners import Events\n"
        "from weightcast.watch.spans import EngineSpans\n"
        "events = Events()\n"
        "for event in trainer_events(): events.emit(event)\n"
        "tell_session(EngineSpans())\n"
        "events.close()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_without_prometheus_client_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import weightcast.watch as watch\n"
        "from weightcast import WeightUpdater\n"  # which does not need it
        "WeightUpdater\n"
        "try: watch.PrometheusMetrics\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'pip install "weightcast[metrics]"' in done.stdout
