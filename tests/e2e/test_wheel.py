"""The wheel in environments that have nothing but what it and an extra require."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.installed import closure
from tests.helpers.tiny import tiny_model
from weightcast.version import __version__

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_USERS = sorted(EXTRAS.keys() - {"dev", "fuzz"})
# `make setup` leaves these out: NIXL for two versions of CUDA, and frameworks of gigabytes.
LEFT_OUT = frozenset(("rdma", "trl", "verl"))
# Modules that an extra makes importable, and that fail without it.
OPENED = {
    "cpu": ["numba"],
    "metrics": ["prometheus_client"],
    "tracing": ["opentelemetry.trace"],
    "cli": ["weightcast.cli.app"],
    "serve": ["weightcast.rollout.launch", "weightcast.receiver.server"],
    "demo": ["weightcast.lab.demo.orchestrate", "gguf"],
    "ray": ["weightcast.ray.trainers", "weightcast.ray.engines"],
    "checkpoint-engine": ["zmq"],
    "nccl": ["nccl"],
    "docs": ["mkdocs", "material", "mkdocstrings"],
}
# Everything that a trainer or an engine of its own needs.
CORE = [
    "weightcast.update.updater",
    "weightcast.transports.registry",
    "weightcast.adapters.registry",
    "weightcast.exporters.converter",
    "weightcast.exporters.lora",
    "weightcast.exporters.multi_module",
    "weightcast.exporters.quantise",
    "weightcast.exporters.state_dict",
    "weightcast.receiver",
    "weightcast.receiver.executor",
    "weightcast.receiver.session",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def build(project: Path, folder: Path) -> Path:
    """Builds the wheel of a project into a folder, without a package index."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(project)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    [found] = folder.glob("weightcast-*.whl")
    return found


def bare(folder: Path, wheel: Path, extra: str | None) -> Path:
    """Makes an environment of the wheel and its requirements alone, linked from this one; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE_S)
    [site] = folder.glob("lib/python*/site-packages")
    metadata = _metadata(wheel)
    extras = frozenset({extra} if extra else ())
    link_all(site, closure(metadata, extras).values())
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    options = ["--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([*install, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return python


def link_all(folder: Path, found: Iterable[Distribution]) -> Path:
    """Links the packages of some distributions into a folder; returns the folder."""
    folder.mkdir(exist_ok=True)
    for package in found:
        for top in _top_level(package):
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))).resolve())
    return folder


def _metadata(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(opened.read(name)).get_all("Requires-Dist") or []


def _top_level(found: Distribution) -> Iterator[str]:
    """First parts of a distribution's paths, without scripts and byte code."""
    yield from {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}


def run(python: Path, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, env=env, timeout=timeout_s)


# Imports the modules of every extra in a fork of its own, with nothing but the core and what the extra requires.
IN_TURN = """
import importlib, json, os, site, sys
import weightcast, weightcast.update.updater
for extra, (folder, modules) in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    site.addsitedir(folder)
    try:
        for name in modules:
            importlib.import_module(name)
    except BaseException as error:
        print(f"{extra}: {error!r}", flush=True)
    os._exit(0)
"""


def test_core_suffices_for_a_trainer_and_the_command_names_the_missing_extra(wheel: Path, tmp_path: Path) -> None:
    python = bare(tmp_path / "core", wheel, None)
    code = (
        f"import importlib, torch\nfor name in {CORE!r}:\n    importlib.import_module(name)\n"
        "import weightcast\nprint(weightcast.__version__, weightcast.__file__)\n"
        "try:\n    weightcast.WeightUpdater.connect(torch.nn.Linear(2, 2), 'http://127.0.0.1:9', timeout_s=5)\n"
        "except weightcast.TargetUnreachable as error:\n    print('unreachable:', error)\n"
    )
    done = run(python, "-I", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.splitlines()[0].split()
    assert version == __version__
    assert Path(file).is_relative_to(tmp_path)  # the wheel's package, not this checkout's
    assert Path(file).with_name("py.typed").exists()
    assert done.stdout.splitlines()[1].startswith("unreachable: http://127.0.0.1:9")
    command = run(python.with_name("weightcast"), "--version")
    assert command.returncode != 0
    assert 'pip install "weightcast[cli]"' in command.stderr


def test_command_line_runs_with_its_extra(wheel: Path, tmp_path: Path) -> None:
    python = bare(tmp_path / "cli", wheel, "cli")
    command = python.with_name("weightcast")
    assert run(command, "--version").stdout == f"weightcast {__version__}\n"
    tiny_model(tmp_path / "model", seed=1)
    planned = run(command, "plan", str(tmp_path / "model"))
    assert planned.returncode == 0, planned.stderr
    serve = run(command, "serve", str(tmp_path / "model"))
    assert serve.returncode != 0
    assert 'pip install "weightcast[serve]"' in serve.stderr


def test_files_that_the_dockerfile_copies_suffice_for_the_package(wheel: Path, tmp_path: Path) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == allowed
    for name in copied:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(build(tmp_path, tmp_path / "wheel")) as copy:
        assert set(copy.namelist()) == set(whole.namelist())
    [entry] = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry[entry.index("--weight-transfer-config") + 1]) == {"backend": "weightcast"}
    assert not [line for line in lines if line.startswith("ENV VLLM_PLUGINS")]  # it would turn off other plug-ins


@pytest.mark.parametrize("repository", ["", "https://git.invalid/team/weightcast"])
def test_the_description_has_no_link_that_an_index_cannot_follow(tmp_path, monkeypatch, repository):
    monkeypatch.setenv("WEIGHTCAST_REPOSITORY", repository)
    with zipfile.ZipFile(build(ROOT, tmp_path)) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    text = str(metadata.get_payload())
    assert "One update is a transaction" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    here = f"{repository}/blob/v{__version__}/"
    ours = [link.removeprefix(here).partition("#")[0] for link in links if repository and link.startswith(here)]
    assert all(link.startswith("https://") for link in links)
    assert all((ROOT / path).exists() for path in ours)
    assert ("docs/tutorial/first-push.md" in ours) == bool(repository)
    assert bool(metadata.get_all("Project-URL")) == bool(repository)


def test_dockerfile_takes_a_version_of_vllm_that_ran_and_the_page_says_the_same() -> None:
    text, page = (ROOT / "Dockerfile").read_text(), (ROOT / "docs/engines/vllm.md").read_text()
    [version] = re.findall(r"^ARG VLLM_VERSION=v(\S+)$", text, re.M)
    assert "FROM vllm/vllm-openai:${VLLM_VERSION}" in text.splitlines()
    assert re.search(rf"^\| which versions\? \| {re.escape(version)} ran on ", page, re.M)
    assert f"--build-arg VLLM_VERSION=v{version}" in page
    for command in re.findall(r"^#   (docker run .*)$", text, re.M):
        assert f"$ {command}" in page


def test_every_extra_brings_everything_that_its_modules_import(wheel: Path, tmp_path: Path) -> None:
    python = bare(tmp_path / "core", wheel, None)
    needed = _metadata(wheel)
    folders: dict[str, tuple[str, list[str]]] = {}
    for extra in FOR_USERS:
        try:
            found = closure(needed, frozenset({extra}))
        except PackageNotFoundError:
            if extra not in LEFT_OUT:
                raise
            continue
        folders[extra] = (str(link_all(tmp_path / extra, found.values())), OPENED.get(extra, []))
    assert folders.keys() >= OPENED.keys()
    done = run(python, "-I", "-W", "ignore", "-c", IN_TURN, json.dumps(folders), timeout_s=600)
    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}\n{done.stderr}"
    # Without the extra these modules are not there, so that the test above can fail.
    empty = link_all(tmp_path / "empty", [])
    nothing = {extra: (str(empty), OPENED[extra]) for extra in OPENED}
    done = run(python, "-I", "-W", "ignore", "-c", IN_TURN, json.dumps(nothing), timeout_s=600)
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == OPENED.keys(), done.stderr


@pytest.mark.wide
@pytest.mark.parametrize("extra", ["", *FOR_USERS])
def test_resolver_finds_packages_for_every_extra(wheel: Path, tmp_path: Path, extra: str) -> None:
    """Asks the package index, with torch pinned to the installed release so that no CUDA packages come."""
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    pin = f"torch=={distribution('torch').version.partition('+')[0]}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run([*command, wanted, pin], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
