"""The arguments that ``connect`` takes: paths, state dicts, one URL, sizes as text, dtypes by any name."""

import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers.harness import Engine, digests_of, next_version, trainer_of, unnamed_s
from tests.helpers.toy_engine import toy_weights
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.update.arguments import bytes_of, exporter_of, targets_of, wire_dtype_of
from weightcast.watch.events import StepEnded


@pytest.fixture(scope="module")
def engine():
    engine = Engine()
    yield engine
    engine.close()


def test_an_update_from_a_path_reaches_the_engine_and_closes_its_files(engine, tmp_path):
    version = next_version()
    save_file(toy_weights(seed=version), tmp_path / "model.safetensors")
    for number, path in enumerate((tmp_path, str(tmp_path / "model.safetensors"))):
        updater = WeightUpdater.connect(path, engine.url, bucket_bytes="64KiB", allow_older=True)
        updater.update(version=version + number)
        updater.close()
        assert engine.digests() == digests_of(version)
        with pytest.raises(ValueError, match="closed file"):
            next(iter(updater._exporter.tensors()))
    next_version()


@pytest.mark.parametrize("transport", ["auto", "direct"])
def test_an_update_from_a_state_dict_follows_the_live_values(engine, transport):
    before, after = next_version(), next_version()
    model = trainer_of(before)
    with WeightUpdater.connect(
        model.state_dict(), engine.url, transport=transport, bucket_bytes="64KiB", allow_older=True
    ) as updater:
        for version in (before, after):
            model.set_version(version)
            updater.update(version=version)
            assert engine.digests() == digests_of(version)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_may_have_any_of_its_names(engine, dtype):
    version = next_version()
    with WeightUpdater.connect(
        trainer_of(version), [Target(engine.url)], wire_dtype=dtype, allow_older=True, bucket_bytes=1 << 16
    ) as updater:
        updater.update(version=version)
    assert engine.digests() == digests_of(version, wire_dtype="bfloat16")


def test_a_second_run_is_told_which_versions_are_too_low(engine, caplog):
    served = next_version()
    with WeightUpdater.connect(trainer_of(served), engine.url, bucket_bytes="64KiB", allow_older=True) as updater:
        updater.update(version=served)
    with WeightUpdater.connect(trainer_of(0), engine.url) as updater:
        assert caplog.messages == []  # a healthy second run gets no warning
        with pytest.raises(ConfigError, match=f"version 0 is older than {served}, which {engine.url} serves") as caught:
            updater.update(version=0)
    assert "allow_older" in caught.value.hint
    caplog.set_level("INFO", "weightcast")
    WeightUpdater.connect(trainer_of(0), engine.url).close()
    assert f"{engine.url} serves version {served}" in caplog.text
    assert engine.digests() == digests_of(served)


def test_update_counts_by_itself(engine):
    served = next_version()
    model = trainer_of(served)
    with WeightUpdater.connect(model, engine.url, bucket_bytes="64KiB", allow_older=True) as updater:
        updater.update(version=served)
        assert updater.served == served
    with WeightUpdater.connect(model, engine.url, bucket_bytes="64KiB") as updater:
        for number in (1, 2):
            model.set_version(served + number)
            report = updater.update()
            assert (report.version, updater.served) == (served + number, served + number)
            assert engine.digests() == digests_of(served + number)
        assert updater.update(version=served + 10).ok
        assert updater.update().version == served + 11
    for _ in range(12):
        next_version()


def test_a_proof_that_cannot_be_reached_is_refused_before_anything_moves(engine, caplog):
    before, version = engine.digests(), next_version()
    with pytest.raises(ConfigError, match="needs a forward pass, and this exporter has none"):
        WeightUpdater.connect(toy_weights(seed=1), engine.url, verify="behaviour", strict=True)
    assert engine.digests() == before
    with WeightUpdater.connect(toy_weights(seed=version), engine.url, verify="behaviour", allow_older=True) as updater:
        assert "this exporter has none: no answer is compared" in caplog.text
        assert updater.update(version=version).targets[0].proof == "resident"
    with WeightUpdater.connect(trainer_of(1), engine.url, strict=True, allow_older=True) as updater:
        assert updater.update(version=next_version()).short_of("resident") == ()


def test_listeners_hear_how_many_bytes_were_sent_of_how_many(engine):
    version, heard = next_version(), list[StepEnded]()
    with WeightUpdater.connect(
        trainer_of(version), engine.url, bucket_bytes="64KiB", allow_older=True, on_event=heard.append
    ) as updater:
        report = updater.update(version=version)
    steps = [event for event in heard if isinstance(event, StepEnded) and event.total_bytes]
    assert [(event.step.phase, event.step.bucket) for event in steps] == [("send", n) for n in range(report.buckets)]
    sizes = [event.sent_bytes for event in steps]
    assert sizes == sorted(set(sizes))
    assert {event.total_bytes for event in steps} == {sizes[-1]} == {report.bytes}


def test_a_module_with_nan_is_refused_and_the_engine_keeps_serving(engine):
    version = next_version()
    model = trainer_of(version)
    with WeightUpdater.connect(model, engine.url, bucket_bytes="64KiB", allow_older=True) as updater:
        updater.update(version=version)
        name, parameter = next(iter(model.named_parameters()))
        with torch.no_grad():
            kept = parameter.view(-1)[0].clone()
            parameter.view(-1)[0] = float("nan")
        with pytest.raises(UpdateFailed, match="NaN or infinite") as caught:
            updater.update()
        assert caught.value.report.targets[0].status == "untouched"
        assert engine.digests() == digests_of(version)
        with torch.no_grad():
            parameter.view(-1)[0] = kept
        assert updater.update(version=version).ok, name
    assert engine.digests() == digests_of(version)


@pytest.mark.parametrize("check_finite", [None, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_with_nan_is_refused_before_its_merged_weights_leave(engine, value, check_finite):
    peft = pytest.importorskip("peft")
    version, after = next_version(), next_version()
    model = nn.Module()
    for name, tensor in toy_weights(seed=version).items():
        *path, _ = name.split(".")
        parent = model
        for part in path[:-1]:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        layer = nn.Linear(*tensor.T.shape, bias=False) if tensor.dim() == 2 else nn.Module()
        layer.weight = nn.Parameter(tensor.bfloat16())
        parent.add_module(path[-1], layer)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up"])).to(torch.bfloat16)
    with WeightUpdater.connect(
        model, engine.url, bucket_bytes="128KiB", allow_older=True, advanced={"check_finite": check_finite}
    ) as updater:
        updater.update(version=version)
        assert engine.digests() == digests_of(version, wire_dtype="bfloat16")
        with torch.no_grad():
            model.get_parameter("base_model.model.layers.1.up.lora_A.default.weight")[1, 3] = value
        with pytest.raises(UpdateFailed, match=r"NaN or infinite.*layers\.1\.up\.weight") as caught:
            updater.update(version=after)
        assert caught.value.report.targets[0].status == "untouched"
        assert engine.digests() == digests_of(version, wire_dtype="bfloat16")


@pytest.fixture(scope="module")
def narrow():
    """An engine that keeps bfloat16."""
    engine = Engine("--dtype", "bfloat16")
    yield engine
    engine.close()


@pytest.mark.parametrize("way", ["module", "state dict", "path", "direct", "composed"])
def test_weights_travel_in_the_smaller_dtype_that_every_engine_keeps(narrow, way, tmp_path):
    version = next_version()
    model: object = trainer_of(version)
    if way == "state dict":
        model = toy_weights(seed=version)
    if way == "path":
        save_file(toy_weights(seed=version), tmp_path / "model.safetensors")
        model = tmp_path
    if way == "composed":
        model = ComposedExporter({"all": ModuleExporter(trainer_of(version))})
    half = sum(tensor.numel() * 2 for tensor in toy_weights(seed=version).values())
    transport = "direct" if way == "direct" else "auto"
    with WeightUpdater.connect(
        model, narrow.url, bucket_bytes="64KiB", allow_older=True, transport=transport
    ) as updater:
        report = updater.update(version=version)
    assert report.bytes == half
    assert report.cast == {"bfloat16": len(toy_weights(seed=0))}
    assert f"{len(toy_weights(seed=0))} tensors travelled in bfloat16, which the engines keep" in str(report)
    assert report.targets[0].proof == "resident"
    assert narrow.digests() == digests_of(version, dtype="bfloat16")


def test_weights_travel_in_the_dtype_that_the_caller_asks_for_or_that_one_engine_keeps(engine, narrow):
    for targets, options in (
        ([narrow.url], {"wire_dtype": "float32"}),
        ([engine.url, narrow.url], {}),
    ):
        version = next_version()
        size = sum(tensor.nbytes for tensor in toy_weights(seed=version).values())
        with WeightUpdater.connect(
            trainer_of(version), targets, bucket_bytes="64KiB", allow_older=True, **options
        ) as updater:
            report = updater.update(version=version)
        assert (report.bytes, report.cast) == (size, {})
        assert report.short_of("resident") == ()
        assert narrow.digests() == digests_of(version, dtype="bfloat16")
    assert engine.digests() == digests_of(version)


def test_the_dtype_follows_the_engines_when_they_change(engine, narrow):
    version = next_version()
    model = trainer_of(version)
    with WeightUpdater.connect(model, narrow.url, bucket_bytes="64KiB", allow_older=True) as updater:
        assert updater.update(version=version).cast
        updater.retarget([narrow.url, engine.url])
        model.set_version(after := next_version())
        report = updater.update(version=after)
        assert report.ok
        assert report.cast == {}
        assert engine.digests() == digests_of(after)
        assert narrow.digests() == digests_of(after, dtype="bfloat16")
        updater.retarget([narrow.url])
        model.set_version(last := next_version())
        assert updater.update(version=last).cast
        assert narrow.digests() == digests_of(last, dtype="bfloat16")


def test_every_second_of_an_update_belongs_to_a_phase(engine):
    version, after = next_version(), next_version()
    model, wait_s = trainer_of(version), 0.2
    with WeightUpdater.connect(model, engine.url, bucket_bytes="64KiB", allow_older=True) as updater:
        report = updater.update(version=version)
    assert unnamed_s(report) == pytest.approx(0, abs=1e-3)
    with connect_in_lab(
        model, engine.url, bucket_bytes="64KiB", allow_older=True, progress=lambda *_: time.sleep(wait_s)
    ) as updater:
        slow = updater.update(version=after)
    assert unnamed_s(slow) == pytest.approx(0, abs=1e-3)
    assert slow.phases["other"] > slow.buckets * wait_s
    assert "other" in str(slow)


def test_one_url_is_one_target():
    assert targets_of("http://a:1") == targets_of(["http://a:1"]) == targets_of(Target("http://a:1"))
    assert [target.url for target in targets_of(("http://a:1", Target("http://b:2")))] == ["http://a:1", "http://b:2"]
    with pytest.raises(ConfigError, match="no targets"):
        targets_of([])
    with pytest.raises(ConfigError, match="http://b:2 is named twice"):
        targets_of(["http://a:1", "http://b:2", Target("http://b:2/")])


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("64MB", 64_000_000), (4096, 4096)]
)
def test_a_size_may_be_text(text, size):
    assert bytes_of("bucket_bytes", text) == size


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bytes_of("bucket_bytes", "512 potatoes"), r"bucket_bytes='512 potatoes': .* is not a size"),
        (lambda: bytes_of("bucket_bytes", 5e8), r"bucket_bytes=500000000\.0 is not a size"),
        (lambda: wire_dtype_of(torch.complex64), r"wire_dtype=torch\.complex64: choose one of float64"),
        (lambda: wire_dtype_of("bf17"), r"wire_dtype='bf17': choose one of"),
        (lambda: exporter_of(object(), None), r"an object of type object is no model that can be exported"),
        (lambda: exporter_of("/nowhere/at/all", None), r"/nowhere/at/all"),
        (lambda: exporter_of({"step": 3, "a": torch.ones(1)}, None), r"step is a int, and only tensors"),
        (lambda: exporter_of({}, None), r"no parameters"),
        (lambda: exporter_of(exporter_of(nn.Linear(2, 2), None)[0], "bfloat16"), r"is for a module; ModuleExporter"),
    ],
)
def test_what_cannot_work_is_refused_by_name(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
