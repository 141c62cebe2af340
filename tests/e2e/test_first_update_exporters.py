"""The first updates of every exporter arrive: ``connect`` has planned them, and later ones repeat the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.e2e.served import Served, Weights
from tests.helpers.exports import export
from weightcast import WeightUpdater
from weightcast.exporters.converter import BridgeExporter
from weightcast.exporters.fp8_formats import Fp8Tensors
from weightcast.exporters.lora_adapter import AdapterExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.lab.bench.synthetic import nested
from weightcast.protocols import Exporter
from weightcast.wire.layout import TensorSpec

peft = pytest.importorskip("peft")

COUNT = 64
ROWS, COLUMNS = 8, 32
ADAPTED = 4  # weights that are computed on the way, however many there are


@dataclass
class Trainer:
    """A model, the exporter that ``connect`` gets, and the weights that an engine must keep."""

    exporter: Any
    parameters: Sequence[torch.Tensor]
    sent: Callable[[], Weights]
    after: Callable[[], object] = lambda: None

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(0.25)
        self.after()


def weights(count: int, name: Callable[[int], str] = "blocks.w{}".format) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(count)
    return {
        name(number): nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(), requires_grad=False)
        for number in range(count)
    }


def state_dict(count: int, _: Path) -> Trainer:
    own = weights(count)
    return Trainer(own, list(own.values()), lambda: own)


def composed(count: int, _: Path) -> Trainer:
    policy, draft = weights(count // 2, "p{}".format), weights(count // 2, "d{}".format)
    parts: dict[str, Exporter | Part] = {
        "policy": ModuleExporter(nested(policy)),
        "draft": Part(exporter=ModuleExporter(nested(draft)), prefix="draft."),
    }
    whole = policy | {f"draft.{name}": tensor for name, tensor in draft.items()}
    return Trainer(ComposedExporter(parts), list(whole.values()), lambda: whole)


def checkpoint(count: int, folder: Path) -> Trainer:
    own, path, new = weights(count), folder / "model.safetensors", folder / "new.safetensors"

    def write() -> None:
        save_file({name: tensor.detach() for name, tensor in own.items()}, new)
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.write(new.read_bytes())

    write()
    return Trainer(str(path), list(own.values()), lambda: own, write)


def bridge(count: int, _: Path) -> Trainer:
    own = weights(count)
    return Trainer(BridgeExporter(lambda: list(own.items())), list(own.values()), lambda: own)


def adapted(count: int, targets: str | list[str]) -> Any:
    torch.manual_seed(count)
    layers = (nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(count))
    model = peft.get_peft_model(nn.Sequential(*layers).bfloat16(), peft.LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def as_exported(exporter: Callable[[], Exporter]) -> Callable[[], Weights]:
    """The bytes that an exporter gives that was made anew and has planned nothing."""

    def sent() -> Weights:
        fresh = exporter()
        found = export(fresh)
        return {
            spec.name: torch.frombuffer(bytearray(found[spec.name]), dtype=spec.torch_dtype).view(spec.shape)
            for spec in fresh.specs()
        }

    return sent


def merged_few(count: int, _: Path) -> Trainer:
    return merged(adapted(count, [str(number) for number in range(ADAPTED)]))


def merged_all(count: int, _: Path) -> Trainer:
    return merged(adapted(count, r"\d+"))


def merged(model: Any) -> Trainer:
    return Trainer(ModuleExporter(model), list(model.parameters()), as_exported(lambda: ModuleExporter(model)))


def adapter(count: int, _: Path) -> Trainer:
    model = adapted(count // 2, r"\d+")  # two tensors each
    own = {name: tensor for name, tensor in model.named_parameters() if ".lora_" in name}
    sent = {name.replace(".default", ""): tensor for name, tensor in own.items()}
    return Trainer(AdapterExporter(model), list(own.values()), lambda: sent)


def adapter_scaled(count: int, _: Path) -> Trainer:
    model = adapted(count // 2, r"\d+")
    own = [tensor for name, tensor in model.named_parameters() if ".lora_" in name]
    return Trainer(AdapterExporter(model, scaled=True), own, as_exported(lambda: AdapterExporter(model, scaled=True)))


def quantised_few(count: int, _: Path) -> Trainer:
    own = weights(count, lambda number: f"blocks.{number}.{'up_proj' if number < ADAPTED else 'norm'}.weight")
    return quantised(own)


def quantised_all(count: int, _: Path) -> Trainer:
    return quantised(weights(count, "blocks.{}.up_proj.weight".format))


def quantised(own: dict[str, nn.Parameter]) -> Trainer:
    model = nested(own)

    def exporter() -> Exporter:
        return ModuleExporter(model, quantise=Fp8Tensors())

    return Trainer(exporter(), list(own.values()), as_exported(exporter))


EXPORTERS = (
    state_dict,
    composed,
    checkpoint,
    bridge,
    merged_few,
    merged_all,
    adapter,
    adapter_scaled,
    quantised_few,
    quantised_all,
)


# test_first_update.py has the other transports with a module.
@pytest.mark.parametrize("transport", ["ipc", pytest.param("broadcast", marks=pytest.mark.wide)])
@pytest.mark.parametrize("made", EXPORTERS, ids=lambda made: made.__name__)
def test_each_of_the_first_updates_arrives(tmp_path, made, transport):
    trainer = made(COUNT, tmp_path)
    specs = [TensorSpec.of(name, tensor) for name, tensor in trainer.sent().items()]
    size_bytes = sum(spec.size_bytes for spec in specs)
    with (
        closing(Served(specs)) as served,
        WeightUpdater.connect(
            trainer.exporter, served.url, bucket_bytes=size_bytes // 4, transport=transport
        ) as updater,
    ):
        for version in (1, 2, 3):
            trainer.train()
            assert served.differing(trainer.sent())
            report = updater.update(version=version)
            assert report.buckets >= 4
            assert report.targets[0].proof == "resident"
            assert served.differing(trainer.sent()) == []
