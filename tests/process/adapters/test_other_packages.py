"""Packages of other people, installed as their users install them: an engine and an exporter, as the docs have them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import Engine, digests_of, next_version
from tests.helpers.toy_engine import toy_weights

DOCS = Path(__file__).parents[3] / "docs"
BROKEN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "broken-weightcast"
version = "2.0"

[project.entry-points."weightcast.engines"]
broken = "broken_weightcast:Kind"
sglang = "broken_weightcast:Kind"

[project.entry-points."weightcast.exporters"]
broken = "broken_weightcast:Models"
"""
# Connects to the engine with the model of another package, and says what it has sent.
TRAINER = """
import sys
from acme_models import AcmeModel
from safetensors.torch import load_file
from weightcast import WeightUpdater

with WeightUpdater.connect(AcmeModel(load_file(sys.argv[1])), [sys.argv[2]], transport="disk") as updater:
    print(updater.update(version=int(sys.argv[3])).targets[0].status)
"""


class Acme:
    """The server of docs/engines/own.md, with weights of its own."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version = 0
        self.paused = False
        self.asked: list[str] = []
        acme = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(acme.get(self.path))

            def do_POST(self) -> None:
                self._answer(acme.post(self.path, self.rfile.read(int(self.headers["Content-Length"] or 0))))

            def _answer(self, answer: dict[str, Any] | None) -> None:
                body = json.dumps(answer).encode()
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def get(self, path: str) -> dict[str, Any] | None:
        if path != "/acme":
            return None
        return {"release": "3.1", "model": "m", "ranks": 1, "version": self.version, "started": "at noon"}

    def post(self, path: str, body: bytes) -> dict[str, Any] | None:
        if path == "/pause":
            self.paused = True
        elif path == "/load":
            assert self.paused
            self.weights = load_file(Path(json.loads(body)["folder"]) / "model.safetensors")
        elif path == "/resume":
            self.version, self.paused = json.loads(body)["version"], False
        else:
            return None
        return {}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def blocks(page: str, heading: str) -> list[str]:
    section = (DOCS / page).read_text().split(f"# {heading}\n", 1)[1]
    return re.findall(r"```(?:toml|python)\n(.*?)```", section, flags=re.DOTALL)


def install(project: Path, site: Path, files: dict[str, str]) -> None:
    project.mkdir()
    for name, text in files.items():
        (project / name).write_text(text)
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which two packages are installed: one as the docs have it, and one that cannot be imported."""
    root = tmp_path_factory.mktemp("packages")
    project, adapter = blocks("engines/own.md", "An engine of your own")[:2]
    exporters, models = blocks("exporters.md", "A package that brings the exporter")[:2]
    project = project + "\n" + exporters + '\n[tool.hatch.build.targets.wheel]\ninclude = ["*.py"]\n'
    files = {"pyproject.toml": project, "acme_weightcast.py": adapter, "acme_models.py": models}
    install(root / "acme", root / "site", files)
    broken = {"pyproject.toml": BROKEN, "broken_weightcast.py": "import there_is_no_such_module\n"}
    install(root / "broken", root / "site", broken)
    return root / "site"


@pytest.fixture
def acme() -> Iterator[Acme]:
    with closing(Acme()) as server:
        yield server


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), *sys.path[1:])), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)


def weightcast(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return python(site, "-m", "weightcast", *map(str, arguments))


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    weights = toy_weights(seed=31)
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", weights


def test_an_engine_of_another_package_is_updated(site: Path, acme: Acme, checkpoint: Any) -> None:
    file, weights = checkpoint
    done = weightcast(site, "push", file, "--to", acme.url, "--via", "disk", "--version", 7)
    assert done.returncode == 0, done.stderr
    assert acme.version == 7
    assert not acme.paused
    assert acme.weights.keys() == weights.keys()
    assert all(torch.equal(acme.weights[name], weights[name]) for name in weights)
    assert "there_is_no_such_module" in done.stderr  # the warning of the other package, once
    assert done.stderr.count("broken of broken-weightcast 2.0") == 1


def test_a_model_of_another_package_is_exported(site: Path, acme: Acme, checkpoint: Any) -> None:
    file, weights = checkpoint
    done = python(site, "-c", TRAINER, str(file), acme.url, "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["serving"]
    assert acme.version == 8
    assert all(torch.equal(acme.weights[name], weights[name]) for name in weights)


def test_doctor_lists_packages_and_what_is_wrong_with_them(site: Path, acme: Acme) -> None:
    done = weightcast(site, "doctor", acme.url, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    [engine] = said["engines"]
    assert engine["engine"].startswith("acme 3.1, m")
    rows = {row["name"]: (row["level"], row["text"]) for row in said["extensions"]}
    assert rows["engine acme"] == rows["exporter acme"] == ("ok", "from acme-weightcast 1.0")
    words = "broken-weightcast 2.0 is left out: ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert rows["engine broken"] == rows["exporter broken"] == ("warn", words)
    assert rows["engine sglang"][0] == "warn"
    assert "weightcast's own" in rows["engine sglang"][1]


def test_a_package_that_cannot_be_imported_is_refused_by_name(site: Path, acme: Acme) -> None:
    done = weightcast(site, "status", acme.url, "--engine", "broken")
    assert done.returncode != 0
    assert "No module named 'there_is_no_such_module'" in done.stdout + done.stderr
    done = weightcast(site, "plan", DOCS / "nothing.json", "--engine", "nobody")
    assert done.returncode == 2
    assert "choose one of native, sglang, lmdeploy, vllm, acme" in done.stderr


def test_plan_and_help_know_the_engine(site: Path, checkpoint: Any) -> None:
    done = weightcast(site, "plan", checkpoint[0], "--engine", "acme", "--json")
    assert done.returncode == 0, done.stderr
    assert {other["engine"] for other in json.loads(done.stdout)["others"]} > {"native", "acme"}
    assert "|vllm|acme|broken" in "".join(weightcast(site, "push", "--help").stdout.split())


def test_engines_that_weightcast_knows_import_no_other_package(site: Path, checkpoint: Any) -> None:
    version = next_version()
    save_file(toy_weights(seed=version), checkpoint[0])
    with closing(Engine()) as engine:
        done = weightcast(site, "push", checkpoint[0], "--to", engine.url, "--version", version)
        assert done.returncode == 0, done.stderr
        assert "broken" not in done.stderr
        assert engine.digests() == digests_of(version)
