"""Several sets of weights of one engine are updated one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.helpers.clock import PATIENCE_S
from tests.helpers.models import FusedModel, specs_of, weights_of
from tests.helpers.session_bench import Hooks, Ranks
from tests.helpers.sessions import Sender
from weightcast.receiver import WeightReceiver
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.session import SessionHandler
from weightcast.receiver.turns import Turns


def handler(name: str, weights: dict[str, torch.Tensor]) -> SessionHandler:
    model = FusedModel()
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(weights))
    facts = EngineFacts(
        engine="toy",
        model=name,
        host_id="here",
        ranks=(),
        staging="device",
        transports=("ipc",),
        specs=tuple(receiver.loader.expected.values()),
    )
    return SessionHandler(Ranks([receiver]), Hooks(), facts)


def test_the_second_update_waits_for_the_first():
    weights = weights_of(0)
    turns, model, adapter = Turns(), handler("model", weights), handler("adapter", weights)
    first, second = Sender(weights), Sender(weights)
    assert turns.apply(model, first.open).ok
    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()

        def other() -> bool:
            started.set()
            return turns.apply(adapter, second.open).ok

        waits = pool.submit(other)
        assert started.wait(PATIENCE_S)
        # The first one's own messages are not kept waiting.
        for message in list(first.transfer())[1:]:
            assert turns.apply(model, message).ok
        assert not waits.done()
        assert turns.apply(model, first.commit()).ok
        assert waits.result(PATIENCE_S)
    assert turns.apply(adapter, second.abort()).ok
    for one in (model, adapter):
        one.close()


def test_it_is_refused_by_name_after_a_while():
    weights = weights_of(0)
    turns, model, adapter = Turns(), handler("model", weights), handler("adapter", weights)
    first, second = Sender(weights), Sender(weights, timeout_s=0.2)
    assert turns.apply(model, first.open).ok
    refused = turns.apply(adapter, second.open)
    assert not refused.ok
    assert refused.error.startswith("model is being updated by process 1 on here")
    assert refused.state == "serving"
    assert turns.apply(model, first.abort()).ok
    assert turns.apply(adapter, Sender(weights).open).ok
    for one in (model, adapter):
        one.close()
