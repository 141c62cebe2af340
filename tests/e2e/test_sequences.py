"""After any sequence of changes on either side, engines hold exactly what was sent.

The real updater and the real receiver run in this process, with HTTP, shared memory and gloo between them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.models import FusedModel, ScalingModel, Weights, differing, specs_of, state, weights_of
from tests.helpers.session_bench import Hooks, Ranks
from weightcast import WeightUpdater
from weightcast.comm.ipc import host_id
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.errors import ConfigError
from weightcast.lab.bench.synthetic import nested
from weightcast.receiver import staging
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.rank import WeightReceiver
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.wire.answers import RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.messages import Message

PLACES = ("device", "host", "none", "device that keeps storage")
EXPERTS = 14  # three buckets of the smallest size
BUCKETS = (4096, 6000, 1 << 20)
TRANSPORTS = ("ipc", "direct", "broadcast")


def weights(seed: int = 0) -> Weights:
    return weights_of(seed, experts=EXPERTS)


class AtOnce(Ranks):
    """Ranks that work at the same time, so that all of them can be in one collective."""

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        with ThreadPoolExecutor(self.tp_size) as threads:
            return list(threads.map(lambda receiver: receiver.apply(message), self.receivers))


class Engine:
    """An engine behind HTTP that can be started again behind the same port."""

    def __init__(self) -> None:
        self.tp_size, self.place, self.kind = 1, "device", FusedModel
        self._started = False
        self.start()
        app = FastAPI()
        app.include_router(weight_routes(_Now(self)))  # type: ignore[arg-type]
        app.include_router(peer_routes(lambda: self.handler))
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def start(self) -> None:
        """As a server of its own would: with the weights of version 0, a new instance and nothing remembered."""
        self.stop()
        self.models = [self.kind(tp_rank=rank, tp_size=self.tp_size, experts=EXPERTS) for rank in range(self.tp_size)]
        first = weights()
        place = self.place.split()[0]
        receivers: list[WeightReceiver] = []
        for rank, model in enumerate(self.models):
            with torch.no_grad():
                model.load_weights(first.items())
            receiver = WeightReceiver(
                model,
                load_weights=model.load_weights,
                expected=specs_of(first),
                tp_rank=rank,
                tp_size=self.tp_size,
                staging="none" if self.kind is ScalingModel else place,  # type: ignore[arg-type]
                keep_storage="keeps" in self.place,
            )
            receivers.append(receiver)
        self.ranks = AtOnce(receivers)
        facts = EngineFacts(
            engine="test 1",
            model="m",
            host_id=host_id(),
            ranks=tuple(RankInfo(rank=rank, pid=1, device="cpu") for rank in range(self.tp_size)),
            staging=receivers[0].loader.staging.place,
            transports=TRANSPORTS,
            specs=tuple(specs_of(first)),
        )
        self.handler = SessionHandler(self.ranks, Hooks(), facts)
        self._started = True

    def stop(self) -> None:
        if self._started:
            self.handler.close()
            self.ranks.close()

    def sleep(self, *, discard: bool) -> None:
        with self.handler.between_updates():
            for receiver in self.ranks.receivers:
                receiver.sleep(discard=discard)
                for tensor in receiver.loader.residents.values() if discard else ():
                    tensor.data = torch.full_like(tensor.data, 3)  # other memory, with nothing of use in it
            for receiver in self.ranks.receivers:
                receiver.wake()
            if discard:
                self.handler.discarded("asleep")

    def move(self, number: int) -> None:
        """The engine puts a parameter into other memory."""
        for model in self.models:
            some = [*model.parameters(), model.steps]
            tensor = some[number % len(some)]
            tensor.data = tensor.data.clone()

    def holds(self, sent: Weights) -> bool:
        for rank, model in enumerate(self.models):
            wanted = self.kind(tp_rank=rank, tp_size=self.tp_size, experts=EXPERTS)
            with torch.no_grad():
                wanted.load_weights(sent.items())
            if differing(model, state(wanted)):
                return False
        return True

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.stop()


class _Now:
    """The session handler of the present start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.handler, name)


class World:
    """One model with its trainer and its engine."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.bucket_bytes = BUCKETS[0]
        self.transport: Any = TRANSPORTS[0]
        self.updater: WeightUpdater | None = None
        self.begin()

    def begin(self) -> None:
        """A model as a trainer has just loaded it."""
        self.names = list(weights())
        self.model = nested({name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights(1).items()})
        self.kept = {name: tensor.dtype for name, tensor in weights().items()}
        self.wire = dict(self.kept)
        self.version = 0
        self.disconnect()

    def disconnect(self) -> None:
        if self.updater is not None:
            self.updater.close()
        self.updater = None

    def connect(self) -> None:
        """Both sides work out the updates to come; what changes afterwards must be noticed."""
        now = {name: self.parameter(number)[2].dtype for number, name in enumerate(self.names)}
        if self.transport == "direct" and now != self.kept:
            with pytest.raises(ConfigError, match="a cast of shards that are not gathered cannot be proven"):
                self.connected(self.model, self.bucket_bytes)
            self.transport = TRANSPORTS[0]  # as the hint says
        self.updater = self.connected(self.model, self.bucket_bytes)
        self.wire = now

    def connected(self, model: nn.Module, bucket_bytes: int) -> WeightUpdater:
        return WeightUpdater.connect(
            model,
            [self.engine.url],
            transport=self.transport,
            bucket_bytes=bucket_bytes,
            allow_older=True,
        )

    def other_model(self) -> nn.Module:
        return nested({name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights(2).items()})

    def parameter(self, number: int) -> tuple[nn.Module, str, torch.Tensor]:
        name = self.names[number % len(self.names)]
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        return module, leaf, getattr(module, leaf)

    def change(self, what: str, number: int) -> None:
        module, leaf, tensor = self.parameter(number)
        match what:
            case "nothing":
                pass
            case "replace a parameter":
                value = torch.randn(tensor.shape).to(tensor.dtype)
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
            case "move a storage":
                tensor.data = tensor.data.clone()
            case "view of a larger storage":
                tensor.data = torch.stack([tensor.data, tensor.data], dim=-1)[..., 1]
            case "another dtype":
                if tensor.dtype.is_floating_point:
                    dtype = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[tensor.dtype]
                    setattr(module, leaf, nn.Parameter(tensor.data.to(dtype), requires_grad=False))
            case "other strides in the same memory":
                if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
                    tensor.data = tensor.data.t()
            case "engine moves a parameter":
                self.engine.move(number)
            case "engine restarts":
                self.engine.start()
            case "engine with another tp":
                self.engine.tp_size = 3 - self.engine.tp_size
                self.engine.start()
            case "engine with another staging":
                self.engine.place = PLACES[number % len(PLACES)]
                self.engine.start()
            case "engine with another loader":
                self.engine.kind = FusedModel if self.engine.kind is ScalingModel else ScalingModel
                self.engine.start()
            case "engine sleeps":
                self.engine.sleep(discard=False)
            case "engine sleeps without its weights":
                if self.engine.kind is FusedModel:
                    self.engine.sleep(discard=True)
            case "trainer connects again":
                self.disconnect()
            case "trainer has connected":
                self.disconnect()
                self.connect()
            case "another trainer prepares other updates":
                self.connected(self.other_model(), BUCKETS[number % len(BUCKETS)]).close()
            case "another trainer updates the engine":
                other = self.other_model()
                with self.connected(other, BUCKETS[number % len(BUCKETS)]) as updater:
                    for _ in range(1 + number % 2):
                        self.version += 1
                        updater.update(version=self.version)
                assert self.engine.holds(dict(other.named_parameters()))
            case "trainer with another transport":
                self.transport = TRANSPORTS[number % len(TRANSPORTS)]
                self.disconnect()
            case "trainer with other buckets":
                self.bucket_bytes = BUCKETS[number % len(BUCKETS)]
                self.disconnect()
            case _:
                raise AssertionError(what)

    def update(self) -> None:
        """Trains, sends and compares."""
        self.version += 1
        generator = torch.Generator().manual_seed(1000 + self.version)
        for number in range(len(self.names)):
            _, _, tensor = self.parameter(number)
            if tensor.dtype.is_floating_point:
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.data.add_(1)
        if self.updater is None:
            self.connect()
            assert self.updater is not None
        report = self.updater.update(version=self.version)
        sent = {
            name: self.parameter(number)[2].detach().to(self.wire[name]).to(self.kept[name], copy=True)
            for number, name in enumerate(self.names)
        }
        assert self.engine.holds(sent)
        [row] = report.targets
        assert (row.status, row.version_after) == ("serving", self.version)
        info = self.engine.handler.info()
        assert (info.version, info.state) == (self.version, "serving")
        assert row.proof == "resident"
        assert row.digest == info.digest == model_digest({name: tensor_digest(one) for name, one in sent.items()})
        assert row.not_updated == ("embed", "requests_served")

    def close(self) -> None:
        self.disconnect()
        self.engine.close()


CHANGES = (
    "nothing",
    "replace a parameter",
    "move a storage",
    "view of a larger storage",
    "another dtype",
    "other strides in the same memory",
    "engine moves a parameter",
    "engine restarts",
    "engine with another tp",
    "engine with another staging",
    "engine with another loader",
    "engine sleeps",
    "engine sleeps without its weights",
    "trainer connects again",
    "trainer has connected",
    "another trainer prepares other updates",
    "another trainer updates the engine",
    "trainer with other buckets",
    "trainer with another transport",
)
# The model, what changes, a number that says which tensor, and whether an update follows at once.
STEPS = st.tuples(st.integers(0, 1), st.sampled_from(CHANGES), st.integers(0, 1000), st.booleans())


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[World]]:
    """Two models, each with its trainer and its engine, in one process."""
    found = [World(), World()]
    yield found
    for world in found:
        world.close()


@contextmanager
def exchanging(one_launch: bool) -> Iterator[None]:
    """Contents are exchanged in one launch, as on a GPU, or pointers are."""
    before, staging._ONE_LAUNCH = staging._ONE_LAUNCH, frozenset({"cpu"} if one_launch else ())
    try:
        yield
    finally:
        staging._ONE_LAUNCH = before


def play(
    worlds: list[World],
    steps: list[tuple[int, str, int, bool]],
    one_launch: bool,
    transport: str = TRANSPORTS[0],
) -> None:
    with exchanging(one_launch):
        for world in worlds:
            world.engine.tp_size, world.engine.place = 1, "device"
            world.engine.kind, world.bucket_bytes, world.transport = FusedModel, BUCKETS[0], transport
            world.engine.start()
            world.begin()
            world.update()
            world.update()
        for model, what, number, updates in steps:
            world = worlds[model]
            world.change(what, number)
            if updates:
                world.update()
        for world in worlds:
            world.update()
            world.update()


def quiet(cases: int) -> Any:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=cases, deadline=None, suppress_health_check=checks)


@pytest.mark.parametrize("transport", ["ipc", "direct", "broadcast"])
@pytest.mark.parametrize("what", CHANGES)
def test_after_any_one_change_the_engine_holds_what_was_sent(worlds, what, transport):
    play(worlds, [(0, what, 3, True), (1, what, 5, False), (0, what, 4, True)], True, transport)


@quiet(5)
@example(
    steps=[(0, "another dtype", 3, True), (0, "trainer connects again", 0, True)],
    one_launch=True,
    transport="direct",
)
@given(
    steps=st.lists(STEPS, max_size=8),
    one_launch=st.booleans(),
    transport=st.sampled_from(TRANSPORTS),
)
def test_after_any_sequence_of_changes_the_engine_holds_what_was_sent(worlds, steps, one_launch, transport):
    play(worlds, steps, one_launch, transport)


@pytest.mark.wide
@pytest.mark.timeout(7200)
@quiet(300)
@given(
    steps=st.lists(STEPS, max_size=20),
    one_launch=st.booleans(),
    transport=st.sampled_from(TRANSPORTS),
)
def test_after_any_long_sequence_of_changes_the_engine_holds_what_was_sent(worlds, steps, one_launch, transport):
    play(worlds, steps, one_launch, transport)
