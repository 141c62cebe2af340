"""Our adapter for SGLang and the reference engine's dialect of it, end to end; something goes wrong at every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engines import Engine, engines, weightcast
from tests.helpers.stolen import Inexcusable
from tests.helpers.tiny import greedy, tiny_model
from weightcast import Target, WeightUpdater
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.report import UpdateReport

WAYS = ("ipc", "broadcast", "disk")
SHORT = [pytest.param(way, marks=pytest.mark.short if way == "disk" else ()) for way in WAYS]
BUCKET = {
    "ipc": "/update_weights_from_tensor",
    "broadcast": "/update_weights_from_distributed",
    "disk": "/update_weights_from_disk",
}
PROMPTS = [[5, 6, 7, 8], [10, 300, 4, 77, 12]]
COUNT = 8
BUCKET_BYTES = 250_000

_versions = itertools.count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    tiny_model(found, seed=0)
    return found


@pytest.fixture(scope="module")
def three(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """A stock SGLang of one rank, one of two, and an engine of our own kind."""
    dialect = {"dialect": "sglang", "staging": "none", "device": "cpu"}
    logs = tmp_path_factory.mktemp("logs")
    with engines(folder, logs, dialect, dialect | {"tp": 2}, {}) as found:
        yield found


@pytest.fixture
def one(three: list[Engine]) -> Iterator[Engine]:
    yield three[0]
    set_faults(three[0], "")


@pytest.fixture
def two(three: list[Engine]) -> Engine:
    return three[1]


@pytest.fixture
def native(three: list[Engine]) -> Engine:
    return three[2]


def set_faults(engine: Engine, faults: str) -> None:
    assert engine.client.post(engine.url + "/faults", content=faults).status_code == 204


def as_sglang(engine: Engine) -> Target:
    return Target(engine.url, engine="sglang")


def model_of(tmp_path: Path, seed: int) -> Any:
    return tiny_model(tmp_path / f"seed-{seed}", seed=seed)


def update(model: Any, targets: list[Target | str], version: int, **options: Any) -> UpdateReport:
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 20.0} | options
    with WeightUpdater.connect(model, targets, **options) as updater:
        return updater.update(version=version)


def digests(model: Any) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in model.state_dict().items()}


def answers(model: Any) -> list[list[int]]:
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def serves(engine: Engine, model: Any, version: int) -> None:
    """It has exactly these weights, says so, and answers with them."""
    if engine.digests() != digests(model) or engine.greedy(PROMPTS, COUNT) != answers(model):
        raise Inexcusable(f"{engine.url} does not serve the weights of version {version}")
    assert engine.complete(PROMPTS[:1], 1)["weight_version"] == version


@pytest.mark.parametrize("way", SHORT)
@pytest.mark.parametrize("number", [0, 1], ids=["one rank", "two ranks"])
def test_three_updates_in_a_row(three: list[Engine], tmp_path: Path, way: str, number: int) -> None:
    engine = three[number]
    model = model_of(tmp_path, seed=number + 1)
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 20.0, "transport": way, "verify": "behaviour"}
    with WeightUpdater.connect(model, [as_sglang(engine)], **options) as updater:
        for _ in range(3):
            version = next(_versions)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            before = engine.greedy(PROMPTS, COUNT)
            assert before != answers(model)
            report = updater.update(version=version)
            [row] = report.targets
            assert (report.transport, row.engine, row.status) == (way, "sglang 0.5.23", "serving")
            assert (row.proof, row.ranks, row.version_after) == ("behaviour", engine.tp, version)
            assert f"its own checksum over {engine.tp} rank" in row.message
            serves(engine, model, version)
            assert engine.get("/model_info")["weight_version"] == str(version)


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place", "wait"])
def test_every_pause_mode(one: Engine, tmp_path: Path, pause: str) -> None:
    model, version = model_of(tmp_path, seed=11), next(_versions)
    with torch.no_grad():
        model.model.norm.weight.add_(version)
    assert update(model, [as_sglang(one)], version, transport="ipc", pause=pause).ok
    serves(one, model, version)


@pytest.mark.parametrize("way", ["ipc", "broadcast"])
def test_engines_of_two_kinds_in_one_update(one: Engine, native: Engine, tmp_path: Path, way: str) -> None:
    model, version = model_of(tmp_path, seed=20 + WAYS.index(way)), next(_versions)
    report = update(model, [as_sglang(one), native.url], version, transport=way)
    assert report.ok
    assert [row.proof for row in report.targets] == ["none", "resident"]
    assert "cannot prove" in report.targets[0].message
    serves(one, model, version)
    serves(native, model, version)


def test_engines_without_that_way_say_so(one: Engine, native: Engine, tmp_path: Path) -> None:
    model = model_of(tmp_path, seed=30)
    with pytest.raises(ConfigError, match="takes no update by disk") as caught:
        update(model, [as_sglang(one), native.url], next(_versions), transport="disk")
    assert native.url in str(caught.value)


def test_the_command_line(two: Engine, tmp_path: Path) -> None:
    model, version = model_of(tmp_path, seed=31), next(_versions)
    arguments = [
        "--to",
        two.url,
        "--engine",
        "sglang",
        "--version",
        version,
        "--via",
        "disk",
        "--advanced",
        f"disk_folder={tmp_path}",
    ]
    done = weightcast("push", tmp_path / "seed-31", *arguments)
    assert done.returncode == 0, done.stderr
    assert "sglang 0.5.23" in done.stdout
    serves(two, model, version)
    assert not list(tmp_path.glob("*weightcast-*"))


def test_siblings_that_come_to_differ_are_found(one: Engine, two: Engine, tmp_path: Path) -> None:
    """Not every wrong engine can be found; one that was as its sibling and is not any more can."""
    same, version = model_of(tmp_path, seed=40), next(_versions)
    update(same, [as_sglang(one), as_sglang(two)], version, transport="ipc")
    assert one.digests() == two.digests() == digests(same)


# The fault matrix has lost connections, lost answers, delays and deaths at each step.
STEPS = [
    ("/pause_generation", "refuse"),
    ("/begin_weight_update", "refuse"),
    ("/begin_weight_update", "drop"),
    ("BUCKET#2", "refuse"),
    ("BUCKET#2", "half"),
    ("/end_weight_update", "refuse"),
    ("/update_weight_version", "refuse"),
]


# The steps that are the same requests whichever way the buckets go are tried on one way.
FAULTS = [("ipc", *fault) for fault in STEPS] + [("broadcast", *fault) for fault in STEPS if fault[0] == "BUCKET#2"]
FAULTS.append(("broadcast", "/init_weights_update_group", "refuse"))


@pytest.mark.parametrize(("way", "step", "kind"), FAULTS)
def test_a_fault_names_its_engine_and_the_next_update_works(
    one: Engine, native: Engine, tmp_path: Path, way: str, step: str, kind: str
) -> None:
    old, version = model_of(tmp_path, seed=50), next(_versions)
    update(old, [as_sglang(one), native.url], version, transport="ipc")
    new, newer = model_of(tmp_path, seed=51), next(_versions)
    set_faults(one, f"{kind}@{step.replace('BUCKET', BUCKET[way])}")
    options = {"transport": way, "timeout_s": 3.0}
    with pytest.raises(UpdateFailed) as caught:
        update(new, [as_sglang(one), native.url], newer, **options)
    assert one.url in str(caught.value)
    rows = {row.url: row for row in caught.value.report.targets}
    moved = step not in ("/pause_generation", "/begin_weight_update", "/init_weights_update_group")
    assert rows[one.url].status == ("quarantined" if moved else "untouched")
    # The other one has either version, but whole; and it is the new one only if all had arrived everywhere.
    state = native.info()
    assert state["state"] == "serving"
    assert state["version"] == version or (state["version"] == newer and not step.startswith("BUCKET"))
    assert native.digests() == digests(old if state["version"] == version else new)
    if moved:
        assert one.client.get(one.url + "/ready").status_code == 503  # it answers nobody with a mixture

    set_faults(one, "")
    last = next(_versions)
    assert update(new, [as_sglang(one), native.url], last, transport=way).ok
    serves(one, new, last)
    serves(native, new, last)


def test_a_tensor_of_another_shape_is_found_by_either_way(one: Engine, tmp_path: Path) -> None:
    model = model_of(tmp_path, seed=80)
    right = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(UpdateFailed, match="partially updated"):
        update(model, [as_sglang(one)], next(_versions), transport="broadcast")
    model.model.norm.weight = right
    version = next(_versions)
    assert update(model, [as_sglang(one)], version, transport="broadcast").ok
    serves(one, model, version)


REFUSED = [
    ("/begin_weight_update", None, "truncated"),
    ("/begin_weight_update", {"selector": "x"}, "selector"),
    ("/end_weight_update", {}, "no weight-update session is open"),
    ("/pause_generation", {"mode": "wait"}, "mode"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": "x"}, "array"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["***"]}, "base64"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, "must run between"),
    ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "must run between"),
    ("/destroy_weights_update_group", {"group_name": "nobody"}, "does not exist"),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, "Cannot find any model weights"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_what_sglang_refuses_the_dialect_refuses(one: Engine, path: str, body: Any, words: str) -> None:
    content = b"" if body is None else None
    answer = one.client.post(one.url + path, json=body, content=content)
    assert answer.status_code == 400
    assert words in answer.text
