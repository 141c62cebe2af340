"""Every package of the tests' environments has one version, in ``requirements/``, which ``make lock`` writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from tests.engines.environment import LOCKS
from tests.helpers.installed import closure
from tests.lock import listed_requirements, lists, own_requirements

PYTHONS = ("3.11.7", "3.12.1", "3.13.0")
ASKED = {"dev": own_requirements(), **{name: listed_requirements(path) for name, path in lists().items()}}
PIN = re.compile(r"[a-z0-9-]+==[^\s;@]+( ; [^;@]+)?")
AGAIN = "run `make lock`, then `make setup`"


def pins(name: str, python: str | None = None) -> dict[str, Version]:
    """The versions that a file of constraints has for a Python, on Linux with an x86 processor; else for this one."""
    where = dict(default_environment())
    if python is not None:
        where |= {
            "python_full_version": python,
            "python_version": python.rpartition(".")[0],
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
        }
    found: dict[str, Version] = {}
    for line in lines(name):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(where):
            assert requirement.name not in found, f"two versions of {requirement.name} for Python {python}"
            [pin] = requirement.specifier
            found[requirement.name] = Version(pin.version)
    return found


def lines(name: str) -> Iterator[str]:
    for line in (LOCKS / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            yield line


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ASKED)
def test_a_lock_has_versions_and_no_addresses(name):
    assert [line for line in lines(name) if not PIN.fullmatch(line)] == []


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for_is_locked_for_every_python(name, python):
    found = pins(name, python)
    wrong: list[str] = []
    for line in ASKED[name]:
        if line.startswith("-"):
            continue
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python[:4]}):
            continue
        version = found.get(normal(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{line} is asked for, {version} is locked")
    assert wrong == [], AGAIN


def test_there_is_a_lock_for_each_environment_and_no_other():
    assert {path.stem for path in LOCKS.glob("*.txt")} == set(ASKED)


def test_this_environment_has_the_locked_versions():
    locked, wrong = pins("dev"), list[str]()
    for name, found in closure(["weightcast[dev,docs]"], frozenset()).items():
        installed = Version(Version(found.version).public)  # torch adds the kind of processor that it was built for
        if installed != locked.get(normal(name)):
            wrong.append(f"{name} {installed} is installed, {locked.get(normal(name))} is locked")
    assert wrong == [], AGAIN
