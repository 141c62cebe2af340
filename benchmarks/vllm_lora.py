"""LoRA adapters beside a model: ours from memory into vLLM's slots, and vLLM's own route, which reads a folder.

``engines`` runs ``play`` as its part ``8b-lora``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.engine_streams import load
from benchmarks.engine_trainer import Rank
from safetensors.torch import save_file
from torch import nn

from weightcast import WeightUpdater
from weightcast.exporters.lora_adapter import AdapterExporter

if TYPE_CHECKING:
    from benchmarks.engines import Case

RANK = 32
SCALE = 2  # a power of two, so that nothing is rounded where B is multiplied by it
NAMES = ("one", "two")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS = ["--enable-lora", f"--max-lora-rank={RANK}", "--max-loras=4"]
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PAUSES = ("in_place", "retract")
TOKENS = 300  # of one request of the streams


class Config:
    """The configuration of the adapters, as PEFT's classes give it."""

    def to_dict(self) -> dict[str, Any]:
        """Content of ``adapter_config.json``."""
        config: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none"}
        return config | {"target_modules": list(LINEAR)}


class Adapted(nn.Module):
    """A linear layer with adapters, with the attributes that PEFT's have; the layer itself stays elsewhere."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        self.base_layer = nn.Identity()
        self.lora_A = nn.ModuleDict({name: nn.Linear(layer.in_features, RANK, **like) for name in NAMES})
        self.lora_B = nn.ModuleDict({name: nn.Linear(RANK, layer.out_features, **like) for name in NAMES})
        self.scaling = dict.fromkeys(NAMES, float(SCALE))


class Adapters(nn.Module):
    """Two adapters for every linear layer of a model, without the model; PEFT need not be installed."""

    def __init__(self, model: nn.Module, std: float) -> None:
        super().__init__()
        self.std = std
        self.peft_config = {name: Config() for name in NAMES}
        for path, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and path.rpartition(".")[2] in LINEAR:
                above, _, last = path.rpartition(".")
                place: nn.Module = self
                for part in above.split("."):
                    if not hasattr(place, part):
                        place.add_module(part, nn.Module())
                    place = getattr(place, part)
                place.add_module(last, Adapted(layer))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """A and B of an adapter, by the names under which PEFT saves them."""
        return {
            f"base_model.model.{path.replace(f'.{name}.', '.')}": tensor
            for path, tensor in self.named_parameters()
            if f".{name}." in path
        }

    def fill(self, name: str, seed: int) -> None:
        """Puts the values of this seed into an adapter, the same ones each time."""
        with torch.no_grad():
            for number, tensor in enumerate(self.tensors(name).values()):
                generator = torch.Generator(tensor.device).manual_seed(1000 * seed + 7 * number)
                tensor.normal_(0.0, self.std, generator=generator)

    def save(self, name: str, folder: Path) -> Path:
        """Writes an adapter as PEFT does, for vLLM's own route."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {path: tensor.detach().cpu() for path, tensor in self.tensors(name).items()}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(Config().to_dict()))
        return folder


class LoraCase:
    """A server with our receiver, whose own route is asked too, and the trainer's adapters.

    Args:
        folder: For the adapters that vLLM's own route loads.
    """

    def __init__(self, case: Case, adapters: Adapters, folder: Path) -> None:
        self.case, self.adapters, self.folder = case, adapters, folder
        self.run, self.server = case.run, case.server
        self.loaded = 0

    @contextmanager
    def connected(self, *names: str, pause: str) -> Generator[list[WeightUpdater]]:
        """A connection for each of these adapters; its time is a step of its own."""
        with ExitStack() as stack:
            with self.run.step(f"connect {' and '.join(names)}, {pause}"):
                opened = [
                    WeightUpdater.connect(
                        AdapterExporter(self.adapters, adapter=name, scaled=True),
                        [self.server.url],
                        adapter=name,
                        pause=pause,  # type: ignore[arg-type]  one of the modes
                        timeout_s=60.0,
                    )
                    for name in names
                ]
            for updater in opened:
                stack.enter_context(updater)
            yield opened

    def update(self, what: str, updaters: Sequence[WeightUpdater], seed: int) -> tuple[float, float]:
        """Updates each adapter to the values of a seed; returns when that began and ended."""
        for name, _ in zip(NAMES, updaters, strict=False):
            self.adapters.fill(name, seed)
        synchronize(self.case.args.tiny)
        with self.run.step(what) as kept:
            began = time.monotonic()
            reports = [updater.update() for updater in updaters]
            ended = time.monotonic()
            rows = [report.targets[0] for report in reports]
            kept |= {"update_s": round(ended - began, 4), "each_s": [round(report.seconds, 4) for report in reports]}
            kept |= {"stall_s": [round(row.stall_s, 5) for row in rows], "proof": [row.proof for row in rows]}
            kept |= {"bytes": sum(report.bytes for report in reports)}
            kept["phases"] = [{key: round(value, 5) for key, value in report.phases.items()} for report in reports]
        self.run.check(f"{what}: proven", all(row.proof == "resident" for row in rows), rows)
        return began, ended

    def idle(self) -> None:
        """Updates of one adapter and of two, one after the other, without a request."""
        for names in (NAMES[:1], NAMES):
            for pause in PAUSES:
                with self.connected(*names, pause=pause) as updaters:
                    for number in range(self.case.args.repeats):
                        self.update(f"idle, {len(names)} adapters, {pause}", updaters, 1 + number % 2)

    def streaming(
        self, what: str, models: Iterable[str], each: Callable[[int], tuple[float, float]]
    ) -> list[tuple[float, float]]:
        """Calls ``each`` as often as asked while clients stream from these adapters, and keeps the gaps they saw."""
        wait_s, tokens = (0.2, 40) if self.case.args.tiny else (0.7, TOKENS)
        windows: list[tuple[float, float]] = []
        with load(
            self.server.url, streams=self.case.args.streams, tokens=tokens, engine="vllm", models=tuple(models)
        ) as clients:
            clients.wait_steady(60)
            for number in range(self.case.args.repeats):
                time.sleep(wait_s)
                windows.append(each(number))
            time.sleep(wait_s)
            clients.stop()
        self.case.gaps(f"gaps, {what}", clients.requests, windows)
        return windows

    def under_load(self, names: tuple[str, ...], pause: str) -> None:
        """Updates of adapters that answer meanwhile."""
        what = f"{self.case.args.streams} streams, {len(names)} adapters, {pause}"
        with self.connected(*names, pause=pause) as updaters:
            self.streaming(what, names, lambda number: self.update(what, updaters, 1 + number % 2))

    def answers(self, what: str, model: str) -> list[list[int]]:
        """Greedy answers of an adapter; their time is a step of its own."""
        with self.run.step(f"answers {what}"):
            return self.server.answers(model)

    def from_folder(self, what: str, seed: int, *, name: str = "") -> tuple[str, tuple[float, float]]:
        """Loads the values of a seed by vLLM's own route, under a new name or in the place of a known one.

        Returns:
            The name, and when writing the folder began and loading ended.
        """
        self.adapters.fill(NAMES[0], seed)
        synchronize(self.case.args.tiny)
        self.loaded += 1
        new = name or f"folder-{self.loaded}"
        with self.run.step(what) as kept:
            began = time.monotonic()
            folder = self.adapters.save(NAMES[0], self.folder / f"adapter-{self.loaded}")
            wrote = time.monotonic()
            body = {"lora_name": new, "lora_path": str(folder), "load_inplace": bool(name)}
            answer = self.server.client.post(f"{self.server.url}/v1/load_lora_adapter", json=body)
            ended = time.monotonic()
            if answer.status_code != 200:
                raise RuntimeError(answer.text[:2000])
            kept |= {"update_s": round(ended - began, 4), "write_s": round(wrote - began, 4)}
            kept |= {"load_s": round(ended - wrote, 4)}
        return new, (began, ended)

    def unload(self, name: str) -> None:
        """Takes an adapter out by vLLM's own route."""
        answer = self.server.client.post(f"{self.server.url}/v1/unload_lora_adapter", json={"lora_name": name})
        if answer.status_code != 200:
            raise RuntimeError(answer.text[:2000])

    def compared(self, plain: list[list[int]]) -> None:
        """Adapters from memory answer as the same ones from a folder do, and as nothing else does."""
        found: list[list[list[int]]] = []
        with self.connected(NAMES[0], pause="abort") as updaters:
            for seed in (3, 4):
                self.update("values to compare", updaters, seed)
                ours = self.answers(f"on values {seed}", NAMES[0])
                name, _ = self.from_folder("the same values from a folder", seed)
                theirs = self.answers(f"on values {seed} from a folder", name)
                self.unload(name)
                self.alike(f"values {seed}: answers are those of the folder", ours, theirs)
                found.append(ours)
        firsts = [[answer[0] for answer in each] for each in (*found, plain)]
        self.run.check("other values give other answers", firsts[0] != firsts[1] and firsts[2] not in firsts[:2], found)
        with self.connected(NAMES[0], pause="abort") as updaters:
            self.update("the values before", updaters, 3)
        again = self.answers("on the values before", NAMES[0])
        self.alike("the values before give their answers again", again, found[0])

    def alike(self, what: str, one: list[list[int]], other: list[list[int]]) -> None:
        """Compares answers: all tokens on a CPU, the first ones on a GPU.

        There vLLM's kernels for adapters add up in another order each time, and the answers to a prompt may part at
        later tokens, also if one adapter is asked twice.  How many tokens are equal is kept.
        """
        pairs = [list(zip(*each, strict=True)) for each in zip(one, other, strict=True)]
        equal = [next((at for at, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
        wanted = [len(pair) if self.case.args.tiny else 1 for pair in pairs]
        good = all(found >= least for found, least in zip(equal, wanted, strict=True))
        self.run.check(what, good, {"equal tokens": equal, "answers": (one, other)})

    def own_route(self) -> None:
        """vLLM's own route, idle and under load: each version under a new name, the one before it then taken out."""
        last, _ = self.from_folder("folder, idle, the first one", 1)

        def renew(number: int, what: str) -> tuple[float, float]:
            nonlocal last
            new, window = self.from_folder(what, 1 + number % 2)
            self.unload(last)
            last = new
            return window

        for number in range(self.case.args.repeats):
            renew(number, "folder, idle, a new name")
        fixed, _ = self.from_folder("folder, idle, the one that answers", 1)
        what = f"folder, {self.case.args.streams} streams, a new name"
        self.streaming(what, [fixed], lambda number: renew(number, what))
        before = self.answers("of an adapter from a folder", fixed)
        self.from_folder("folder, idle, in the place of the old one", 1, name=fixed)
        after = self.answers("after loading it again in its place", fixed)
        self.alike("loaded again in its place it answers the same", before, after)
        for name in (last, fixed):
            self.unload(name)


def play(case: Case, shape: tuple[str, dict[str, Any]]) -> None:
    """Every step with adapters.  The trainer is this process; the server gets the model's weights by an update."""
    tiny = case.args.tiny
    trainer = Rank(0, 1, *shape, "cpu" if tiny else "cuda")
    with case.run.step("the model's weights"):
        trainer.connect("model", [case.server.url], {"transport": "ipc", "pause": "retract"})
        trainer.update("model", 1, 1)
        trainer.disconnect("model")
    adapters = Adapters(trainer.model, 0.3 if tiny else 0.05)
    trainer.model = None
    if not tiny:
        torch.cuda.empty_cache()
    lora = LoraCase(case, adapters, case.args.folder / "adapters")
    plain = lora.answers("of the model alone", "m")
    case.run.attempt("adapters, idle", lora.idle)
    case.run.attempt("comparison with a folder", lambda: lora.compared(plain))
    for names, pause in ((NAMES[:1], "in_place"), (NAMES[:1], "retract"), (NAMES, "in_place")):
        case.run.attempt(
            f"{len(names)} adapters under load, {pause}",
            lambda names=names, pause=pause: lora.under_load(names, pause),
        )
    case.run.attempt("vLLM's own route", lora.own_route)
    found = lora.answers("of the model alone, at the end", "m")
    case.run.check("the model itself answers as at the start", found == plain, found)


def synchronize(tiny: bool) -> None:
    """Waits for the device."""
    if not tiny:
        torch.cuda.synchronize()
