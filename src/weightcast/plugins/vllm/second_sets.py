"""All second sets of weights in one vLLM worker: their memory inside vLLM's budget, and their sleep.

They are the staging set, what is derived ahead of a commit, and the staging sets of LoRA adapters.  Other engines stage
as their receiver is made (``staged_receiver``).  vLLM measures its model first, and must count what each set takes.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from weightcast.plugins.engine_needs import reason_logged
from weightcast.plugins.vllm.derivation import why_not_ahead
from weightcast.plugins.vllm.lora_ranks import LoraRanks
from weightcast.plugins.vllm.rank import VllmRank
from weightcast.plugins.vllm.rank_protocol import VllmSettings, loads_into_pool, reads_in_order
from weightcast.plugins.vllm.start_up import Budget, gib
from weightcast.plugins.vllm.two_sets import TwoSets
from weightcast.plugins.vllm.unpacked_model import UnpackedModel
from weightcast.plugins.vllm.weights_pool import WeightsPool
from weightcast.receiver.loader import Loader
from weightcast.receiver.rank import StagingChoice
from weightcast.runtime.free_memory import free_host_bytes
from weightcast.runtime.recorded_launches import LaunchRecorder

log = logging.getLogger("vllm.weightcast")
_LANES = 3  # layers that are derived side by side; each takes the memory that deriving a layer takes


class SecondSets:
    """The second sets of one worker.  All methods run on its main thread.

    Attributes:
        staged: True once the staging set was allocated, or found to have no room.
    """

    def __init__(
        self,
        rank: VllmRank,
        adapters: LoraRanks,
        unpacked: UnpackedModel,
        pool: WeightsPool,
        *,
        vllm_config: Any,
        settings: VllmSettings,
    ) -> None:
        """Allocates nothing yet."""
        self._rank = rank
        self._unpacked = unpacked
        self._config = vllm_config
        self._settings = settings
        self._device = rank.device
        self._pool = pool
        self._all: list[TwoSets] = [rank, unpacked.derivation, adapters]
        self._asleep: set[str] = set()
        self.staged = False

    def take_room(self, worker: Any, cache_bytes: int) -> int:
        """Allocates them after vLLM has measured its model and before it sizes its KV cache.

        ``cache_bytes`` is what vLLM would give its KV cache; its account of its memory is corrected.  Returns the bytes
        that are left for the KV cache; all of them if its size was set by hand.

        Raises:
            ConfigError: The place that the setting asks for has not enough memory.
        """
        specs = worker.get_kv_cache_spec()
        with set_current_vllm_config(self._config):
            least = sum(int(spec.max_memory_usage_bytes(self._config)) for spec in specs.values())
        fixed = self._config.cache_config.kv_cache_memory_bytes is not None
        # Where vLLM measures what its processes consume, the loaded form of quantised layers is in it already; and a
        # size that was set by hand is what the KV cache gets.
        beside = 0 if fixed or hasattr(worker, "total_consumed") else self._unpacked.quantised_bytes
        least += least // 16
        taken = beside + self.stage(cache_bytes - beside, least, fixed=fixed)
        taken += self._derive_ahead(self._budget(cache_bytes - (0 if fixed else taken), least, fixed=fixed))
        if fixed:
            return cache_bytes
        for account, name in (
            (worker, "total_consumed"),
            (worker.model_runner, "model_memory_usage"),
        ):  # vLLM computes its advice on --kv-cache-memory from one or the other, depending on its version
            if hasattr(account, name):
                setattr(account, name, getattr(account, name) + taken)
        left = cache_bytes - taken
        if hasattr(worker, "available_kv_cache_memory_bytes"):
            worker.available_kv_cache_memory_bytes = left
        return left

    def stage(self, cache_bytes: int, least_bytes: int, *, fixed: bool) -> int:
        """Allocates and logs the staging set; returns its bytes in the KV cache's memory."""
        loader = self._loader
        asked = self._settings.staging
        budget = self._budget(cache_bytes, least_bytes, fixed=fixed)
        reason = loader.unstaged_because(keep_storage=True) if asked == "auto" else ""
        wanted: StagingChoice = "none" if reason else asked
        with reason_logged(log, "stage updates"):
            place, why = budget.place(wanted, loader.size_bytes + loader.held_bytes)
            why = reason or why
            before = self._taken_bytes()
            loader.stage(
                place,
                keep_storage=True,
                in_order=reads_in_order(self._config),
                may_move=self._pool.may_leave,
                after_move=self._pool.free_left,
            )
        self.staged = True
        self._rank.receiver.staging_note = ""
        if why and place != "device":
            where = "not staged" if place == "none" else "staged in host memory"
            self._rank.receiver.staging_note = f"a new version is {where} before its commit: {why}"
        size_bytes = loader.staging.size_bytes
        taken = (size_bytes if budget.on_host else self._taken_bytes() - before) if place != "none" else 0
        if place == "device":
            taken += loader.held_bytes  # taken when they arrive, until the commit
        log.info(
            "weightcast: rank %d stages updates on: %s (setting: %s), %s%s; KV cache: %s",
            self._rank.rank,
            place,
            asked,
            gib(size_bytes),
            f"; {why}" if why else "",
            f"{gib(cache_bytes)}, as set" if fixed else f"{gib(cache_bytes - taken)} of {gib(cache_bytes)}",
        )
        if loader.staging.mapped_bytes:
            log.info(
                "weightcast: rank %d switches %s without a copy", self._rank.rank, gib(loader.staging.mapped_bytes)
            )
        if place == "none":
            log.warning(
                "weightcast: rank %d stages nothing: an update pauses the engine from its start, "
                "and an update that fails half way quarantines it",
                self._rank.rank,
            )
        return taken

    def fall_asleep(self, level: int) -> None:
        """Frees what waits, before vLLM frees the weights; raises ``Refused`` during an update."""
        if "weights" not in self._asleep:
            for one in self._all:
                one.fall_asleep(discard=level >= 2)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        self._asleep |= {"weights", "kv_cache"}

    def let_go(self) -> None:
        """Frees the weights that lie outside of vLLM's pool, after vLLM has freed the others."""
        if freed := sum(one.let_go() for one in self._all):
            log.info(
                "weightcast: rank %d freed %s of weights that vLLM's sleep does not know", self._rank.rank, gib(freed)
            )

    def restore(self, tags: Sequence[str] | None) -> str:
        """Brings them back, before vLLM wakes; returns why there is no room for them, or nothing."""
        if "weights" in self._woken(tags):
            try:
                for one in self._all:
                    one.restore()
            except torch.OutOfMemoryError as error:
                return (
                    f"rank {self._rank.rank} has no room for its weights, which sleep on: {error}; "
                    "free memory, then wake"
                )
        return ""

    def wake(self, tags: Sequence[str] | None) -> None:
        """Allocates what waits again once the weights are back; the KV cache alone changes nothing here."""
        woken = self._woken(tags)
        if "weights" in woken:
            for one in self._all:  # none raises: vLLM would lose track of the other ranks' answers
                one.wake()
        self._asleep -= woken

    def _woken(self, tags: Sequence[str] | None) -> set[str]:
        return self._asleep & ({"weights", "kv_cache"} if tags is None else set(tags))

    @property
    def _loader(self) -> Loader:
        return self._rank.receiver.loader

    def _budget(self, cache_bytes: int, least_bytes: int, *, fixed: bool) -> Budget:
        on_host = self._device.type == "cpu"
        host_bytes = free_host_bytes()
        free_bytes = host_bytes if on_host else torch.cuda.mem_get_info(self._device)[0]
        return Budget(
            cache_bytes=cache_bytes,
            least_bytes=least_bytes,
            fixed_bytes=free_bytes - cache_bytes - self._loader.size_bytes // 5 if fixed else None,
            host_bytes=host_bytes,
            on_host=on_host,
        )

    def _derive_ahead(self, budget: Budget) -> int:
        """Records how quantised layers are derived, ahead of a commit if it can be; returns the bytes for that.

        Where weights stay in the pool of vLLM's sleep mode nothing is recorded: a second set would not sleep.
        """
        stays = loads_into_pool(self._config) and not self._pool.may_leave
        if self._device.type != "cuda" or stays or not self._unpacked.quantised_bytes:
            return 0
        derivation = self._unpacked.derivation
        why = why_not_ahead(derivation.derived, self._loader.staging, budget)
        why = why if self._settings.derive_ahead else "as set"
        before = self._taken_bytes()
        with set_current_vllm_config(self._config):
            if not why:  # tensors move to where they stay before anything is recorded
                derivation.add_second_set(
                    self._loader.staging,
                    in_order=reads_in_order(self._config),
                    may_move=self._pool.may_leave,
                    after_move=self._pool.free_left,
                )
            recorded = derivation.record([LaunchRecorder(self._device) for _ in range(_LANES)])
        taken = self._taken_bytes() - before
        log.info(
            "weightcast: rank %d recorded how %d of %d quantised layers are derived, %s, with %s of memory",
            self._rank.rank,
            recorded,
            len(derivation.layers),
            "ahead of the commit" if derivation.derives_ahead else "at the commit" + (f" ({why})" if why else ""),
            gib(taken),
        )
        return taken

    def _taken_bytes(self) -> int:
        if self._device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        mapped_bytes = 2 * self._loader.staging.mapped_bytes + self._unpacked.derivation.outside_bytes
        return torch.cuda.memory_reserved(self._device) + mapped_bytes - self._pool.freed_bytes
