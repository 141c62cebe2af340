"""Our part of SGLang, without SGLang: two ranks are threads here, and one loop plays their schedulers' passes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from tests.helpers.clock import PATIENCE_S
from tests.helpers.models import FusedModel, ScalingModel, weights_of
from tests.helpers.sessions import Sender
from tests.helpers.torn import OUT_OF_MEMORY, FailingCopy
from weightcast.errors import ConfigError
from weightcast.plugins.rank_sockets import SwitchExecutor, tables_of
from weightcast.plugins.sglang import FOLDER
from weightcast.plugins.sglang.endpoints import _no_pause
from weightcast.plugins.sglang.rank import SglangRank
from weightcast.plugins.sglang.requests_at_switch import SglangRequests
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.session import SessionHandler
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.messages import Message, Prepare, Revert
from weightcast.wire.plans import UpdateTables

PARALLEL: list[Any] = [None]  # of the rank that is being made


class Dispatcher:
    """SGLang's ``TypeBasedDispatcher``."""

    def __init__(self, mapping: list[tuple[type, Callable[[Any], None]]]) -> None:
        self.mapping = dict(mapping)

    def __iadd__(self, other: Dispatcher) -> Dispatcher:
        self.mapping |= other.mapping
        return self

    def __call__(self, request: Any) -> None:
        self.mapping[type(request)](request)


class Scheduler:
    """Has the attributes of SGLang's scheduler that our code uses, and logs its calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._engine_paused = False
        self._request_dispatcher = Dispatcher([])
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.idle_sleeper = None
        self.idle = True
        self.request_receiver = SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None)
        self.running_batch = SimpleNamespace(reqs=[])
        self.tree_cache = None
        self.waiting_queue: list[Any] = []

    def is_fully_idle(self) -> bool:
        return self.idle

    def pause_generation(self, message: Any) -> None:
        self._engine_paused = True
        self.log.append(f"pause {message.mode}")

    def continue_generation(self, message: Any) -> None:
        assert message.torch_empty_cache is False
        self._engine_paused = False
        self.log.append("continue")

    def abort_request(self, message: Any) -> None:
        self.log.append("abort all")

    def flush_cache(self, empty_cache: bool = True) -> bool:
        assert not self.waiting_queue
        self.log.append("flush")
        return True


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The modules of SGLang that our code imports."""

    def message(*names: str) -> Any:
        return lambda **fields: SimpleNamespace(**fields)

    contents: dict[str, dict[str, Any]] = {
        "sglang.utils": {"TypeBasedDispatcher": Dispatcher},
        "sglang.srt.runtime_context": {"get_parallel": lambda: PARALLEL[0]},
        "sglang.srt.managers.io_struct": {
            name: message() for name in ("AbortReq", "PauseGenerationReqInput", "ContinueGenerationReqInput")
        },
    }
    for name, found in contents.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(FOLDER, str(tmp_path))


def runner(
    rank: int, world: int, model_class: type[FusedModel] = FusedModel, *, stages: int = 1, replicas: int = 1
) -> Any:
    """SGLang's model runner with the weights of version 0 loaded."""
    across, along = (world // stages, stages) if stages > 1 else (world // replicas, 1)
    PARALLEL[0] = SimpleNamespace(
        tp_rank=rank % across,
        tp_size=across,
        pp_rank=rank // across if stages > 1 else 0,
        pp_size=along,
        dp_rank=rank // across if replicas > 1 else None,
    )
    weights = weights_of(0)
    model = model_class(tp_rank=rank % across, tp_size=across)
    with torch.no_grad():
        model.load_weights(weights.items())
    return SimpleNamespace(
        model=model,
        device="cpu",
        gpu_id=0,
        server_args=SimpleNamespace(weight_version="base", dp_size=replicas, tp_size=across, pp_size=along),
        model_config=SimpleNamespace(quantization=None, is_multimodal=False),
        load_config=SimpleNamespace(load_format="auto"),
        loader=SimpleNamespace(_get_all_weights=lambda config, model: iter(weights.items())),
    )


class Server:
    """Two ranks, the loop that plays both schedulers' passes, and the API server's half."""

    def __init__(self, *, stages: int = 1, replicas: int = 1) -> None:
        self.replicas = replicas
        self.ranks = [SglangRank(runner(rank, 2, stages=stages, replicas=replicas)) for rank in range(2)]
        self.schedulers = [Scheduler() for _ in self.ranks]
        for rank, scheduler in zip(self.ranks, self.schedulers, strict=True):
            rank.attach(scheduler)
        self.around: list[Any] = [None, None]  # a context in which a rank's next switch runs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        executor = SwitchExecutor(2, os.environ[FOLDER])
        specs, _ = tables_of(executor.hellos)
        facts = EngineFacts(
            engine="sglang 0",
            model="m",
            host_id="h",
            ranks=executor.rank_infos(),
            staging=executor.staging(),
            transports=("ipc",),
            specs=specs,
            no_pause=_no_pause(SimpleNamespace(pp_size=stages)),
        )
        self.hooks = Hooks()
        self.executor = executor
        self.engine = SessionHandler(executor, self.hooks, facts)

    def _loop(self) -> None:
        while not self._stop.wait(0.002):
            size = len(self.ranks) // self.replicas
            for first in range(0, len(self.ranks), size):
                requests: list[Any] = []
                self.ranks[first].requests_pulled(requests)
                for request in requests:
                    for number in range(first, first + size):
                        with self.around[number] or nullcontext():
                            self.schedulers[number]._request_dispatcher(request)

    def close(self) -> None:
        self.engine.close()
        self.executor.close()
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def tell(self, message: Message) -> Ack:
        ack = self.engine.apply(message)
        assert ack.ok, ack.error
        return ack

    def ready(self, version: int, **changes: Any) -> Sender:
        """A session of which everything has arrived, and nothing is switched."""
        sender = Sender(weights_of(version), version=version, **{"pause": "retract", "timeout_s": PATIENCE_S} | changes)
        for message in sender.transfer():
            self.tell(message)
        return sender

    def serves(self, version: int) -> bool:
        for rank in self.ranks:
            live = rank.receiver.loader.residents
            across = len(self.ranks) // self.replicas
            wanted = FusedModel(tp_rank=rank.rank % across, tp_size=across)
            with torch.no_grad():
                wanted.load_weights(weights_of(version).items())
            if not all(torch.equal(live[name], tensor) for name, tensor in wanted.named_parameters()):
                return False
        return True


class Hooks:
    """The API server's pauses; the ranks do the rest."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paused = False

    def pause(self, mode: str, timeout_s: float) -> None:
        self.calls.append(f"pause {mode}")

    def stop_waiting(self) -> None: ...

    def resume(self) -> None:
        self.calls.append("resume")

    def drop_caches(self) -> None: ...

    def set_version(self, version: int) -> None:
        self.calls.append(f"version {version}")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_all_ranks_switch_in_the_same_pass_and_what_is_kept_is_proven(server: Server) -> None:
    sender = server.ready(1)
    assert server.serves(0)
    ack = server.tell(sender.commit(sender.digests()[1]))
    assert (ack.state, ack.version, ack.resident_ranks) == ("serving", 1, 2)
    assert server.serves(1)
    for scheduler in server.schedulers:
        assert scheduler.log == ["pause retract", "flush", "continue"]


def test_a_commit_that_is_taken_back_brings_the_old_weights_to_all_ranks(server: Server) -> None:
    first = server.ready(1)
    server.tell(first.commit(first.digests()[1]))
    second = server.ready(2)
    server.tell(second.commit(second.digests()[1]))
    server.tell(Revert(session=second.session))
    assert server.serves(1)
    assert server.engine.info().version == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_refuses_the_commit_keeps_all_from_switching(server: Server, rank: int) -> None:
    sender = server.ready(1)
    server.ranks[rank].receiver._steps._committed = sender.session  # it says that it has switched already
    server.ranks[rank]._committed = ""
    ack = server.engine.apply(sender.commit(proven=True))
    assert not ack.ok
    assert "committed before" in ack.error
    assert "not all ranks were ready" in ack.error or rank == 0
    assert server.schedulers[1 - rank].log == []
    assert server.serves(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_switch_that_fails_on_one_rank_is_undone_on_both(server: Server, rank: int) -> None:
    first = server.ready(1)
    server.tell(first.commit(first.digests()[1]))
    sender = server.ready(2)
    server.around[rank] = FailingCopy(at=1)
    ack = server.engine.apply(sender.commit(proven=True))
    server.around[rank] = None
    assert not ack.ok
    assert OUT_OF_MEMORY in ack.error
    assert server.serves(1)
    info = server.engine.info()
    assert (info.state, info.version) == ("serving", 1)
    again = server.ready(3)
    server.tell(again.commit(again.digests()[1]))
    assert server.serves(3)


@pytest.fixture
def replicas() -> Iterator[Server]:
    made = Server(replicas=2)
    yield made
    made.close()


def test_data_parallel_engines_switch_together_each_at_a_mark_of_its_own(replicas: Server) -> None:
    assert [hello.rank for hello in replicas.executor.hellos] == [0, 1]
    sender = replicas.ready(1)
    assert replicas.serves(0)
    ack = replicas.tell(sender.commit(sender.digests()[1]))
    assert (ack.state, ack.version, ack.resident_ranks) == ("serving", 1, 2)
    assert replicas.serves(1)
    for scheduler in replicas.schedulers:
        assert scheduler.log == ["pause retract", "flush", "continue"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_switch_that_fails_on_one_data_parallel_engine_is_undone_on_both(replicas: Server, rank: int) -> None:
    first = replicas.ready(1)
    replicas.tell(first.commit(first.digests()[1]))
    sender = replicas.ready(2)
    replicas.around[rank] = FailingCopy(at=1)
    ack = replicas.engine.apply(sender.commit())
    replicas.around[rank] = None
    assert not ack.ok
    assert OUT_OF_MEMORY in ack.error
    assert replicas.serves(1)
    assert replicas.engine.info().version == 1


def test_a_data_parallel_engine_that_does_not_know_its_number_is_refused() -> None:
    made = runner(0, 2, replicas=2)
    PARALLEL[0].dp_rank = None
    with pytest.raises(ConfigError, match="which data-parallel engine this process belongs to"):
        SglangRank(made)


def test_version_0_5_17_tells_the_number_beside_the_runners_other_ranks() -> None:
    made = runner(0, 2, replicas=2)
    del PARALLEL[0].dp_rank
    made.ps = SimpleNamespace(dp_rank=1)
    assert SglangRank(made).rank == 1


def test_with_stages_a_retraction_is_refused_before_anything_moves() -> None:
    made = Server(stages=2)
    try:
        refused = made.engine.apply(Sender(weights_of(1), version=1, pause="retract", timeout_s=PATIENCE_S).open)
        assert "pipeline parallelism" in refused.error
        assert "in_place" in refused.error
        assert made.engine.info().state == "serving"
    finally:
        made.close()


def test_what_the_engine_changed_after_loading_is_refused_by_name() -> None:
    made = runner(0, 1)
    with torch.no_grad():
        made.model.o.copy_(made.model.o.flip(0))
    with pytest.raises(ConfigError, match=r"changed o after loading"):
        SglangRank(made)


def test_a_model_that_computes_weights_is_taken_unless_the_engine_changed_them() -> None:
    assert SglangRank(runner(0, 1, ScalingModel)).receiver.loader.computed == {"norm.weight"}
    made = runner(0, 1, ScalingModel)
    with torch.no_grad():
        made.model.norm.neg_()
    with pytest.raises(ConfigError, match=r"changed norm after loading"):
        SglangRank(made)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_config": SimpleNamespace(quantization="fp8", is_multimodal=False)}, "quantised"),
        ({"model_config": SimpleNamespace(quantization=None, is_multimodal=True)}, "vision encoder"),
        ({"loader": SimpleNamespace()}, "no checkpoint to read"),
    ],
)
def test_models_that_cannot_be_updated_are_refused(changes: dict[str, Any], words: str) -> None:
    made = runner(0, 1)
    vars(made).update(changes)
    with pytest.raises(ConfigError, match=words):
        SglangRank(made)


class IdleRank:
    """The first rank, its scheduler with a real socket, and a thread that is in one pass of its loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("weightcast.plugins.sglang.requests_at_switch._REST_S", PATIENCE_S)
        self.rank, self.scheduler = SglangRank(runner(0, 1)), Scheduler()
        self._context = zmq.Context()
        requests, self.client = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self.client.connect(f"tcp://127.0.0.1:{requests.bind_to_random_port('tcp://127.0.0.1')}")
        self.scheduler.request_receiver.recv_from_tokenizer = requests
        self.rank.attach(self.scheduler)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def one_pass(self) -> tuple[threading.Thread, list[Any]]:
        pulled: list[Any] = []
        thread = threading.Thread(target=self.rank.requests_pulled, args=(pulled,), daemon=True)
        thread.start()
        return thread, pulled


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleRank]:
    made = IdleRank(monkeypatch)
    yield made
    made.close()


def test_an_idle_scheduler_rests_in_a_session_until_a_request_or_a_mark_comes(idle: IdleRank) -> None:
    idle.rank.in_session = True
    resting, pulled = idle.one_pass()
    resting.join(0.2)
    assert resting.is_alive()
    idle.client.send(b"a request")
    resting.join(PATIENCE_S / 2)
    assert (resting.is_alive(), pulled) == (False, [])
    idle.scheduler.request_receiver.recv_from_tokenizer.recv()
    resting, pulled = idle.one_pass()
    idle.rank.told_to_switch()
    resting.join(PATIENCE_S / 2)
    assert (resting.is_alive(), len(pulled)) == (False, 1)
    resting, _ = idle.one_pass()
    resting.join(0.2)
    assert resting.is_alive()  # the mark has woken one pass, and no more
    idle.rank.told_to_switch()
    resting.join(PATIENCE_S / 2)


def test_an_idle_scheduler_rests_while_a_plan_is_worked_out_before_any_session(
    idle: IdleRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def work(message: Message) -> RankAck:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return RankAck(rank=0, ok=True)

    monkeypatch.setattr(idle.rank.receiver, "apply", work)
    preparing = threading.Thread(
        target=idle.rank.apply, args=(Prepare(plan=UpdateTables((), (), ()), verify="none"),), daemon=True
    )
    preparing.start()
    assert began.wait(PATIENCE_S)
    resting, _ = idle.one_pass()
    resting.join(0.2)
    assert resting.is_alive()
    go_on.set()
    preparing.join(PATIENCE_S)
    idle.client.send(b"a request")
    resting.join(PATIENCE_S / 2)
    assert not resting.is_alive()
    running, _ = idle.one_pass()
    running.join(PATIENCE_S / 2)
    assert not running.is_alive()


def test_a_scheduler_without_a_session_or_with_work_does_not_rest(idle: IdleRank) -> None:
    for in_session, nothing_to_do in ((False, True), (True, False)):
        idle.rank.in_session, idle.scheduler.idle = in_session, nothing_to_do
        running, _ = idle.one_pass()
        running.join(PATIENCE_S / 2)
        assert not running.is_alive()


def request(key: str | None = None, *, holds: bool = False) -> Any:
    return SimpleNamespace(extra_key=key, kv=SimpleNamespace(holds_kv=holds))


def test_requests_with_cache_keep_their_name_and_the_others_get_a_new_one() -> None:
    scheduler = Scheduler()
    requests = SglangRequests(scheduler, torch.device("cpu"))
    users, plain, holding = request("tenant"), request(), request(holds=True)
    for each in (users, plain, holding):
        requests.name(each)
    scheduler.waiting_queue = [users, holding]
    scheduler.grammar_manager.grammar_queue = [plain]
    before = [each.extra_key for each in (users, plain, holding)]
    requests.switch(lambda: None, mode="in_place", version="1", served="0")
    assert scheduler.log == []
    assert holding.extra_key == before[2]
    assert users.extra_key != before[0]
    assert users.extra_key.startswith("tenant|")
    assert plain.extra_key != before[1]
    fresh = request("tenant")
    requests.name(fresh)
    assert fresh.extra_key == users.extra_key


@dataclass(frozen=True)
class Event:
    """SGLang's ``WeightVersionEvent``."""

    old_version: str
    num_output_tokens: int


def test_the_token_of_a_step_that_is_computed_and_not_noted_is_one_of_the_old_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("sglang.srt.utils.weight_versions")
    vars(module)["WeightVersionEvent"] = Event
    monkeypatch.setitem(sys.modules, module.__name__, module)
    one, first, half_read = (
        SimpleNamespace(output_ids=tokens, weight_version_events=[], **vars(request()))
        for tokens in ([7, 8, 9], [], [])
    )
    waiting = SimpleNamespace(output_ids=[7], weight_version_events=[], **vars(request(holds=True)))
    scheduler: Any = Scheduler()
    scheduler.chunked_req = half_read
    scheduler.waiting_queue = [waiting]
    scheduler.result_queue = [(SimpleNamespace(reqs=[one, first, half_read]), None)]

    def record(version: str) -> None:
        for each in (one, first, half_read, waiting):
            if each.output_ids:
                each.weight_version_events.append(Event("0", len(each.output_ids)))

    scheduler.record_weight_version_change = record
    requests = SglangRequests(scheduler, torch.device("cpu"))
    requests.switch(lambda: None, mode="in_place", version="1", served="0")
    found = [each.weight_version_events for each in (one, first, half_read, waiting)]
    assert found == [[Event("0", 4)], [Event("0", 1)], [], [Event("0", 1)]]


def test_a_paused_server_stays_paused_and_abort_drops_what_is_left() -> None:
    scheduler = Scheduler()
    scheduler._engine_paused = True
    SglangRequests(scheduler, torch.device("cpu")).switch(lambda: None, mode="abort", version="1", served="0")
    assert scheduler.log == ["pause retract", "abort all", "flush"]
    assert scheduler._engine_paused


def test_a_switch_that_fails_lets_sglang_go_on() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    scheduler = Scheduler()
    with pytest.raises(torch.OutOfMemoryError):
        SglangRequests(scheduler, torch.device("cpu")).switch(fail, mode="retract", version="1", served="0")
    assert scheduler.log[-1] == "continue"


def test_a_scheduler_of_another_version_is_refused_by_name() -> None:
    scheduler = Scheduler()
    del scheduler.grammar_manager
    with pytest.raises(ConfigError, match="Scheduler has no grammar_manager") as caught:
        SglangRequests(scheduler, torch.device("cpu"))
    assert "0.5.23" in str(caught.value.hint)
