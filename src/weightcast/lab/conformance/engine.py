"""The engine under test: what it is, updates of it, and its answers."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from weightcast.comm.http import Client
from weightcast.comm.ipc import device_of, host_id
from weightcast.config import AdvancedOptions, Target
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.answers import GenerateRoute, Stream, dialect_of
from weightcast.lab.conformance.result import NotApplicable, need
from weightcast.lab.conformance.trainer import UpdateJob
from weightcast.lab.connect import connect
from weightcast.report import UpdateReport
from weightcast.transports.registry import TRANSPORTS
from weightcast.update.arguments import Model
from weightcast.update.recognise import recognise
from weightcast.update.updater import WeightUpdater
from weightcast.wire.codec import decode_ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import total_bytes

CheckpointName = Literal["A", "B"]
_FEW = 16  # tokens of a short answer
_PROMPT_LENGTHS = (4, 21, 48, 130)
_LONG_LENGTHS = (5, 11, 26, 40)
_LONGEST = 400  # tokens of a long answer
_MAX_LEN = 256  # if the engine does not say how long its requests may be
_BUCKETS = 6
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceSettings:
    """Settings of a run.

    Attributes:
        timeout_s: Deadline of one wait, in seconds.
        bucket_bytes: Size of a bucket; None takes about a sixth of the checkpoint, so that there are several.
        transport: Transport of the updates that are not about a transport.
    """

    timeout_s: float = 60.0
    bucket_bytes: int | None = None
    transport: str = "auto"


@dataclass(slots=True, kw_only=True)
class Baseline:
    """Answers of one checkpoint, taken from the engine after an update to it."""

    short: list[list[int]] = field(default_factory=list[list[int]])
    long: list[list[int]] = field(default_factory=list[list[int]])


class EngineUnderTest:
    """One engine and two checkpoints for it.

    Attributes:
        target: The engine.
        settings: Settings of the run.
        serves: The checkpoint that the engine serves, as far as the run knows; None if it does not.
        baselines: Answers by checkpoint.
        repeatable: Why the engine's answers cannot be compared token by token under load; empty if they can.
    """

    def __init__(self, target: Target, checkpoints: Sequence[Path], settings: ConformanceSettings) -> None:
        """Asks the engine what it is.

        Raises:
            ConfigError: A checkpoint cannot be used, or both have the same weights.
            WeightcastError: The engine does not answer, or is of no known kind.
        """
        self.target = target
        self.settings = settings
        self.folders: dict[CheckpointName, Path] = {"A": Path(checkpoints[0]), "B": Path(checkpoints[1])}
        self.serves: CheckpointName | None = None
        self.baselines: dict[CheckpointName, Baseline] = {}
        self.repeatable = ""
        self._digests: dict[CheckpointName, dict[str, str]] = {}
        self.client = Client(target, timeout_s=settings.timeout_s)
        self.first = self.info()
        self._last_version = self.first.version or 0
        with CheckpointExporter(self.folders["A"]) as a, CheckpointExporter(self.folders["B"]) as b:
            if {spec.name: spec for spec in a.specs()} != {spec.name: spec for spec in b.specs()}:
                raise ConfigError("the two checkpoints have other tensors: pass two of the same model")
            self.specs = a.specs()
        if settings.bucket_bytes is None:
            largest = max(spec.size_bytes for spec in self.specs)
            self.bucket_bytes = max(largest, total_bytes(self.specs) // _BUCKETS, 4096)
        else:
            self.bucket_bytes = settings.bucket_bytes

    def close(self) -> None:
        """Closes the connections."""
        self.client.close()

    # -- what it is

    def info(self) -> EngineInfo:
        """Returns the engine's description of now."""
        return recognise(self.client)

    @property
    def has_receiver(self) -> bool:
        """True if the engine has our receiver."""
        return self.first.has_receiver

    @property
    def is_here(self) -> bool:
        """True if the engine runs on this host."""
        return self.first.host_id == host_id()

    def settled(self) -> EngineInfo:
        """Waits until no update is under way, and returns the engine's description.

        Raises:
            Failed: The deadline passed.
        """
        deadline = time.monotonic() + self.settings.timeout_s
        while (info := self.info()).state == "updating":
            need(time.monotonic() < deadline, f"it is still being updated by {info.session_owner}")
            time.sleep(_POLL_S)
        return info

    # -- updates

    def next_version(self) -> int:
        """Returns a version that the engine has not had yet."""
        self._last_version += 1
        return self._last_version

    def connect(self, model: Model, **options: Any) -> WeightUpdater:
        """Connects an updater; ``options`` are those of ``lab.connect``."""
        settings: dict[str, Any] = {
            "transport": self.settings.transport,
            "timeout_s": self.settings.timeout_s,
            "bucket_bytes": self.bucket_bytes,
        }
        advanced: AdvancedOptions = {"alone": True}
        if loads_folders(str(options.get("transport", self.settings.transport))):
            advanced["disk_folder"] = tempfile.gettempdir()
        return connect(model, [self.target], advanced=advanced, **settings | options)

    def push(self, name: CheckpointName, **options: Any) -> UpdateReport:
        """Updates the engine to a checkpoint.

        Raises:
            Failed: The engine does not serve the new version.
            WeightcastError: The update failed.
        """
        self.serves = None
        version = self.next_version()
        with CheckpointExporter(self.folders[name]) as exporter, self.connect(exporter, **options) as updater:
            report = updater.update(version=version)
        need(report.ok, f"the update to version {version} was not taken: {report}")
        self.serves = name
        return report

    def job(self, name: CheckpointName, *, options: dict[str, Any], **more: Any) -> UpdateJob:
        """An update to a checkpoint by a trainer in other processes; ``more`` are further fields of ``UpdateJob``."""
        places = [rank.device for rank in self.first.ranks if device_of(rank.device) is not None]
        settings = {"timeout_s": self.settings.timeout_s, "bucket_bytes": self.bucket_bytes}
        return UpdateJob(
            target=self.target,
            checkpoint=str(self.folders[name]),
            version=self.next_version(),
            options=settings | options,
            place=places[0] if places else "cpu",
            **more,
        )

    def to(self, name: CheckpointName) -> None:
        """Makes the engine serve a checkpoint, if it does not already."""
        if self.serves != name:
            self.push(name)

    @property
    def other(self) -> CheckpointName:
        """The checkpoint that the engine does not serve."""
        return "B" if self.serves == "A" else "A"

    # -- its weights and answers

    def digests(self) -> dict[str, str]:
        """Returns the digests of the engine's live weights.

        Raises:
            NotApplicable: The engine cannot read its weights back.
        """
        if not self.has_receiver:
            raise NotApplicable("stock servers cannot read their weights back")
        return decode_ack(self.client.get_json("/weightcast/digests")).resident

    def digests_of(self, name: CheckpointName) -> dict[str, str]:
        """Returns the digests that the engine's weights have with a checkpoint."""
        if name not in self._digests:
            kept = {spec.name: spec.torch_dtype for spec in self.first.specs}
            with CheckpointExporter(self.folders[name]) as exporter:
                self._digests[name] = {
                    tensor_name: tensor_digest(tensor.to(kept[tensor_name]))
                    for tensor_name, tensor in exporter.tensors()
                    if tensor_name in kept
                }
        return self._digests[name]

    def keeps(self, name: CheckpointName) -> None:
        """Fails unless every live tensor that can be read back is the checkpoint's.

        Raises:
            Failed: One is not.
        """
        kept, expected = self.digests(), self.digests_of(name)
        wrong = [tensor for tensor, digest in kept.items() if expected.get(tensor) != digest]
        need(kept, "it reads back no tensor")
        need(not wrong, f"{len(wrong)} of {len(kept)} live tensors are not those of {name}: {', '.join(wrong[:4])}")

    def says(self, name: CheckpointName) -> None:
        """Fails unless the engine gives the answers of a checkpoint.

        Raises:
            Failed: It gives others.
        """
        found, expected = self.answers(), self.baselines[name].short
        wrong = sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))
        need(not wrong, f"{wrong} of {len(found)} answers are not those of {name}")

    def unchanged(self, name: CheckpointName, version: int | None) -> None:
        """Fails unless the engine serves a checkpoint under a version, in state, weights and answers.

        Raises:
            Failed: It does not.
        """
        info = self.settled()
        need(info.state == "serving", f"it is {info.state}: {info.message}")
        if info.tells_version:
            need(info.version == version, f"it says version {info.version} instead of {version}")
        if self.has_receiver:
            self.keeps(name)
        self.says(name)

    @contextmanager
    def kept(self, name: CheckpointName) -> Generator[None]:
        """Brings a checkpoint to the engine, which must serve it unchanged at the end of the block.

        Raises:
            Failed: It does not.
        """
        self.to(name)
        version = self.info().version
        yield
        self.unchanged(name, version)

    def answers(self) -> list[list[int]]:
        """Returns the greedy answers to a few prompts of different length, one after the other."""
        return [self.stream(prompt, _FEW).whole() for prompt in self.prompts]

    def long_streams(self) -> list[Stream]:
        """Starts several long answers."""
        return [self.stream(prompt, self.long_count) for prompt in self.long_prompts]

    def stream(self, prompt: Sequence[int], count: int) -> Stream:
        """Starts one greedy answer."""
        return Stream(self.target, self.dialect, self.first.model, prompt, count, timeout_s=2 * self.settings.timeout_s)

    @cached_property
    def dialect(self) -> GenerateRoute:
        """The engine's generation route.

        Raises:
            Failed: It generates over no route that is known here.
        """
        return dialect_of(self.target, self.first.engine, self.first.model, timeout_s=2 * self.settings.timeout_s)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts as token ids."""
        return [self._prompt(length) for length in _PROMPT_LENGTHS if length + _FEW < self.max_len]

    @cached_property
    def long_prompts(self) -> list[list[int]]:
        """Prompts of long answers."""
        return [self._prompt(length, first=7) for length in _LONG_LENGTHS]

    @cached_property
    def long_count(self) -> int:
        """Number of tokens of a long answer."""
        return min(_LONGEST, self.max_len - max(_LONG_LENGTHS) - 8)

    @cached_property
    def max_len(self) -> int:
        """Longest request of the engine, in tokens."""
        try:
            found = msgspec.json.decode(self.client.get_json("/v1/models"), type=dict[str, Any])
            return int(found["data"][0]["max_model_len"])
        except (WeightcastError, msgspec.MsgspecError, LookupError, TypeError, ValueError):
            return _MAX_LEN

    def _prompt(self, length: int, first: int = 5) -> list[int]:
        return [first + (37 * number) % (self._vocabulary - 2 * first) for number in range(length)]

    @cached_property
    def _vocabulary(self) -> int:
        """Number of token ids that are used in prompts."""
        try:
            config = json.loads((self.folders["A"] / "config.json").read_bytes())
            return min(4096, int(config.get("vocab_size") or config["text_config"]["vocab_size"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.folders['A']} has no config.json with a vocab_size ({error})",
                hint="pass folders of whole models",
            ) from error


def loads_folders(transport: str) -> bool:
    """True if engines load a folder with this transport, which both sides must see."""
    return any(spec.name == transport and spec.delivery == "folder" for spec in TRANSPORTS)
