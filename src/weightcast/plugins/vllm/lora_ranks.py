"""The LoRA adapters that weightcast updates in one vLLM worker: a slot, a receiver and a connection for each."""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import set_current_vllm_config

from weightcast.comm.authenticated import Secret
from weightcast.errors import ConfigError, Refused, WeightcastError, error_words
from weightcast.plugins.vllm.lora_slot import LoraSlot, manager_of
from weightcast.plugins.vllm.rank import VllmRank
from weightcast.plugins.vllm.rank_protocol import AdapterOrder
from weightcast.plugins.vllm.two_sets import TwoSets
from weightcast.receiver import WeightReceiver
from weightcast.wire.adapters import AdapterRequest

log = logging.getLogger("vllm.weightcast")


@dataclass(frozen=True, slots=True)
class _Adapter:
    slot: LoraSlot
    rank: VllmRank


class LoraRanks(TwoSets):
    """The adapters of one worker.  All methods run on its main thread."""

    def __init__(self, *, rank: int, device: torch.device, vllm_config: Any, secret: Secret | None) -> None:
        self._rank = rank
        self._device = device
        self._config = vllm_config
        self._secret = secret
        self._adapters: dict[str, _Adapter] = {}

    def carry_out(self, runner: Any, order: str) -> str:
        """Carries out an ``AdapterOrder`` in JSON; returns the reason why it could not, or nothing.

        The reason is no exception: vLLM takes the exceptions of further workers for answers to later calls.
        """
        known = msgspec.json.decode(order, type=AdapterOrder)
        try:
            if known.request is None:
                self._remove(known.name)
            else:
                self._add(runner, known, known.request)
        except WeightcastError as error:
            return error_words(error)
        except OSError as error:
            self._remove(known.name)
            return f"rank {self._rank} cannot listen for the API server: {error}"
        return ""

    def step(self, why_not: str) -> str:
        """Switches the adapter that waits, unless there is a ``why_not``; returns the failure in words, or nothing."""
        return "; ".join(filter(None, (adapter.rank.step_unless(why_not)[1] for adapter in self._adapters.values())))

    def keep(self) -> None:
        """Puts the adapters back after vLLM has dropped its own, because the model's weights were replaced."""
        for adapter in self._adapters.values():
            adapter.slot.keep()

    def fall_asleep(self, *, discard: bool) -> None:
        """Implements ``TwoSets.fall_asleep``; with ``discard`` the adapters are gone."""
        for adapter in self._adapters.values():
            adapter.rank.fall_asleep(discard=False)
        if discard:
            for name in list(self._adapters):
                self._remove(name)

    def wake(self) -> None:
        """Implements ``TwoSets.wake``."""
        for adapter in self._adapters.values():
            adapter.rank.wake()

    def close(self) -> None:
        """Releases groups and mapped memory."""
        for adapter in self._adapters.values():
            adapter.rank.receiver.interrupt("the engine is shutting down")
            adapter.rank.receiver.close()

    def _add(self, runner: Any, order: AdapterOrder, request: AdapterRequest) -> None:
        slot = LoraSlot(runner.get_model(), manager_of(runner), request, order.lora_id, others=order.others)
        try:
            with set_current_vllm_config(self._config):
                receiver = self._receiver(slot, request)
        except ConfigError as error:
            slot.free()
            raise Refused(str(error), hint=error.hint) from error
        rank = VllmRank(receiver, self._config)
        self._adapters[order.name] = _Adapter(slot, rank)
        assert order.invitation is not None
        rank.answer(order.invitation, self._secret)
        log.info(
            "weightcast: rank %d has a slot for the adapter %s, staged on: %s, %.2f MiB",
            self._rank,
            order.name,
            receiver.loader.staging.place,
            receiver.loader.staging.size_bytes / 2**20,
        )

    def _receiver(self, slot: LoraSlot, request: AdapterRequest) -> WeightReceiver:
        receiver = WeightReceiver(
            nn.Module(),
            load_weights=slot.load_weights,
            expected=request.specs,
            tp_rank=self._rank,
            tp_size=int(self._config.parallel_config.world_size),
            device=self._device,
            residents=slot.residents,
            finishers=(slot.check_slot,),
            checks=(slot.check,),
            keep_storage=True,
            between_steps=lambda do: self._adapters[request.name].rank.between_steps(do),
        )
        loader = receiver.loader
        if not loader.staging.staged and loader.residents:
            why = loader.unstaged_because(keep_storage=True) or "there is no memory for a second set"
            raise ConfigError(f"a new version of the adapter {request.name} cannot wait beside the old one: {why}")
        loader.expect_kept_dtypes()
        return receiver

    def _remove(self, name: str) -> None:
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            return
        adapter.rank.stop_listening()
        adapter.rank.receiver.close()
        adapter.slot.free()
