"""Entry points of other packages: found without imports, imported once, and left out where they cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weightcast.errors import ConfigError
from weightcast.exporters import claims
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.runtime.entry_points import EntryPoints, names_in
from weightcast.update.arguments import exporter_of

GROUP = "weightcast.tested"
Install = Callable[[str, dict[str, str], str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package of one module: its name, its entry points, and the code of the module."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, points: dict[str, str], code: str, group: str = GROUP) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{point} = {name}:{value}" for point, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join((f"[{group}]", *lines, "")))
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


def number(name: str, loaded: object) -> int:
    if not isinstance(loaded, int):
        raise TypeError(f"{name} is no number")
    return loaded


def test_names_are_known_without_an_import(install: Install) -> None:
    install("pkg_a", {"one": "ONE", "two": "TWO"}, "ONE, TWO = 1, 2")
    assert names_in(GROUP) == ("one", "two")
    assert "pkg_a" not in sys.modules
    assert EntryPoints(GROUP, number).made() == (1, 2)


def test_one_that_cannot_be_used_leaves_the_others_and_is_named_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("pkg_b", {"one": "ONE", "word": "WORD", "gone": "GONE", "own": "ONE"}, "ONE, WORD = 1, 'x'")
    install("pkg_c", {"falls": "ONE"}, "raise RuntimeError('it needs a GPU')")
    found = EntryPoints(GROUP, number, taken=("own",))
    assert found.made() == (1,)
    assert found.made() == (1,)
    errors = {one.name: one.error for one in found.load()}
    assert errors["one"] == ""
    assert errors["word"] == "TypeError: word is no number"
    assert errors["gone"].startswith("AttributeError: ")
    assert errors["own"] == "the name 'own' is weightcast's own"
    assert errors["falls"] == "RuntimeError: it needs a GPU"
    assert len(caplog.messages) == 4
    assert "falls of pkg_c 1.0 is left out: RuntimeError: it needs a GPU" in "\n".join(caplog.messages)


def test_a_name_of_two_packages_is_used_of_neither(install: Install) -> None:
    for package in ("pkg_d", "pkg_e"):
        install(package, {"both": "ONE"}, "ONE = 1")
    first, second = EntryPoints(GROUP, number).load()
    assert first.made is second.made is None
    assert first.error == "the name 'both' is also that of pkg_e 1.0"
    assert second.error == "the name 'both' is also that of pkg_d 1.0"


class Model:
    """A model that weightcast does not know."""


class Maker:
    def claims(self, model: object) -> bool:
        return isinstance(model, Model)

    def exporter(self, model: object, wire_dtype: torch.dtype | None) -> StateDictExporter:
        return StateDictExporter({"w": torch.ones(2)}, wire_dtype=wire_dtype)


def registered(monkeypatch: pytest.MonkeyPatch, install: Install, *names: str) -> None:
    monkeypatch.setattr(claims, "OTHERS", EntryPoints(GROUP, claims._model_kind))  # type: ignore[reportPrivateUsage]
    for name in names:
        install(name, {name: "Maker"}, f"from {__name__} import Maker")


def test_a_model_of_another_package_gets_its_exporter(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, install, "pkg_f")
    exporter, close = exporter_of(Model(), "bfloat16")  # type: ignore[reportArgumentType]
    assert [spec.dtype for spec in exporter.specs()] == ["bfloat16"]
    close()


def test_a_model_that_two_packages_claim_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, install, "pkg_g", "pkg_h")
    with pytest.raises(ConfigError, match=r"claim a model of type Model: pkg_g of pkg_g 1\.0, pkg_h of pkg_h 1\.0"):
        exporter_of(Model(), None)  # type: ignore[reportArgumentType]


def test_a_model_that_no_package_claims_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, install, "pkg_i")
    with pytest.raises(ConfigError, match="type int is no model"):
        exporter_of(3, None)  # type: ignore[reportArgumentType]


class Alike:
    """An object with the methods of an exporter, which is none."""

    device = torch.device("cpu")

    def specs(self) -> list[object]:
        return []

    def fill(self, bucket: object, layout: object, group: object) -> None:
        pass


def test_an_object_that_only_looks_like_an_exporter_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="type Alike is no model") as caught:
        exporter_of(Alike(), None)  # type: ignore[reportArgumentType]
    assert "derives from weightcast.protocols.Exporter" in str(caught.value.hint)


def test_a_package_whose_exporter_only_looks_like_one_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(monkeypatch, install, "pkg_j")
    monkeypatch.setattr(Maker, "exporter", lambda *_: Alike())
    with pytest.raises(ConfigError, match=r"Alike, which pkg_j of pkg_j 1\.0 makes .* type Model, is no exporter"):
        exporter_of(Model(), None)  # type: ignore[reportArgumentType]
