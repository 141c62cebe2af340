"""The weight-transfer backend in a vLLM worker, which holds our receiver.

Weight messages come over a socket from the API server, on a thread of their own.  So vLLM goes on generating while
buckets arrive and while weights are read back, and an interrupt reaches a rank that waits in a collective.  Only the
exchange of weights and the finishers run on the worker's main thread, in one call of the engine core, which every rank
takes between the same two steps.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.utils.import_utils import resolve_obj_by_qualname

from weightcast.comm.authenticated import Secret
from weightcast.errors import ConfigError, WeightcastError, error_words
from weightcast.plugins.engine_needs import reason_logged
from weightcast.plugins.hook_points import check_worker
from weightcast.plugins.other_hosts import SET_A_SECRET, RankInvitation, engine_secret
from weightcast.plugins.vllm import share_log_handlers
from weightcast.plugins.vllm.derived_ahead import DerivedAhead, why_not_ahead
from weightcast.plugins.vllm.loaded_models import CheckpointSpecs, LoadedModels, check_draft, draft_model_of
from weightcast.plugins.vllm.lora_ranks import LoraRanks
from weightcast.plugins.vllm.packed_weights import UnpackedModel
from weightcast.plugins.vllm.quantised_layers import QuantisedLayer, check_cache_scales
from weightcast.plugins.vllm.rank import VllmRank
from weightcast.plugins.vllm.rank_protocol import (
    EPLB_HINT,
    EPLB_REFUSED,
    check_generates,
    check_replicas,
    end_vllm,
    keeps_draft,
    loads_into_pool,
    on_several_hosts,
    rank_among_replicas,
    reads_in_order,
    settings_of,
)
from weightcast.plugins.vllm.start_up import Budget, gib, warm_up
from weightcast.plugins.vllm.stores import check_stores
from weightcast.plugins.vllm.weights_pool import WeightsPool
from weightcast.plugins.vllm.worker_hooks import wrap_worker
from weightcast.receiver import WeightReceiver
from weightcast.receiver.rank import StagingChoice
from weightcast.runtime.free_memory import free_host_bytes
from weightcast.runtime.steps import StepCounter

# In the tree of vLLM: its worker processes have no handler for others.
log = logging.getLogger("vllm.weightcast")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The rendezvous of the API server and the ranks: an ``RankInvitation`` in JSON."""

    invitation: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """An empty message: buckets are announced under ``/weightcast``."""


# Over 350 lines: what vLLM calls, and what our hooks call around that, is on one object with one receiver.
class WeightcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One rank's receiver, as vLLM's weight-transfer backend."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        """vLLM calls it after loading the model and before it measures the memory that is left.

        Raises:
            ConfigError: This model, or vLLM as it was started, cannot be updated natively.  vLLM does not start.
        """
        super().__init__(config, vllm_config, device, model)
        share_log_handlers()
        worker_class: type[Any] = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
        self._rank = rank_among_replicas(vllm_config.parallel_config)
        self._listens = False
        self._staged = False
        self._beside_bytes = 0
        self._asleep: set[str] = set()
        with reason_logged(log, "update this model"):
            check_worker(worker_class)
            check_generates(vllm_config)
            self._settings = settings_of(vllm_config.additional_config)
            self._staging: StagingChoice = self._settings.staging
            self._pool = WeightsPool(vllm_config)
            self._secret = _shared_secret(self._settings.secret_file, vllm_config.parallel_config, self._rank)
            if self._settings.draft == "update":
                check_draft(vllm_config.speculative_config)
            with set_current_vllm_config(vllm_config):
                self._receiver = self._make_receiver()
            self._rank_server = VllmRank(
                self._receiver,
                vllm_config,
                not_updated=("the draft model",) if keeps_draft(vllm_config) else (),
                ends_with_server=True,
            )
            self._adapters = LoraRanks(
                rank=self._rank, device=self.device, vllm_config=vllm_config, secret=self._secret
            )
        wrap_worker(worker_class, WeightcastEngine)

    # -- vLLM's side, on the main thread

    def take_room(self, worker: Any, cache_bytes: int) -> int:
        """Allocates the staging set after vLLM has measured its model and before it sizes its KV cache.

        ``cache_bytes`` is what vLLM would give its KV cache; its account of its memory is corrected.  Returns the bytes
        that are left for the KV cache; all of them if its size was set by hand.

        Raises:
            ConfigError: The place that the setting asks for has not enough memory.
        """
        if self._settings.draft == "update":
            self._add_draft(worker.model_runner)
        specs = worker.get_kv_cache_spec()
        with set_current_vllm_config(self.vllm_config):
            least = sum(int(spec.max_memory_usage_bytes(self.vllm_config)) for spec in specs.values())
        fixed = self.vllm_config.cache_config.kv_cache_memory_bytes is not None
        # Where vLLM measures what its processes consume, the loaded form of quantised layers is in it already; and a
        # size that was set by hand is what the KV cache gets.
        beside = 0 if fixed or hasattr(worker, "total_consumed") else self._beside_bytes
        least += least // 16
        taken = beside + self._stage(cache_bytes - beside, least, fixed=fixed)
        taken += self._record(cache_bytes - (0 if fixed else taken), least, fixed=fixed)
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

    def warm_up(self, worker: Any) -> None:
        """Runs the model on batches of many sizes, if the setting asks for it."""
        if self._settings.warm_up:
            warm_up(worker)

    def fall_asleep(self, level: int) -> None:
        """Frees the staging set on the device, before vLLM frees the weights; raises ``Refused`` during an update."""
        if "weights" not in self._asleep:
            self._receiver.sleep(
                discard=level >= 2,
                lets_go=True,
                hint="POST /wake_up?tags=weights, then update; /wake_up?tags=kv_cache comes last",
            )
            self._models.unpacked.fall_asleep(discard=level >= 2)
            self._adapters.sleep(discard=level >= 2, hint="POST /wake_up?tags=weights first")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self._asleep |= {"weights", "kv_cache"}

    def let_go(self) -> None:
        """Frees the weights that lie outside of vLLM's pool, after vLLM has freed the others."""
        if freed := self._receiver.loader.staging.let_go() + self._models.unpacked.let_go():
            log.info("weightcast: rank %d freed %s of weights that vLLM's sleep does not know", self._rank, gib(freed))

    def restore(self, tags: Sequence[str] | None) -> str:
        """Brings them back, before vLLM wakes; returns why there is no room for them, or nothing."""
        if "weights" in self._woken(tags):
            try:
                self._receiver.loader.staging.restore()
                self._models.unpacked.restore()
            except torch.OutOfMemoryError as error:
                return f"rank {self._rank} has no room for its weights, which sleep on: {error}; free memory, then wake"
        return ""

    def wake(self, tags: Sequence[str] | None) -> None:
        """Allocates the staging set again once the weights are back; the KV cache alone changes nothing here."""
        woken = self._woken(tags)
        if "weights" in woken:
            # Neither raises: vLLM would lose track of the other ranks' answers.
            if self._rank_server.stage_again():
                self._models.unpacked.wake()
            self._adapters.wake()
        self._asleep -= woken

    def _woken(self, tags: Sequence[str] | None) -> set[str]:
        return self._asleep & ({"weights", "kv_cache"} if tags is None else set(tags))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Listens for the API server."""
        if self._listens:
            raise RuntimeError("weightcast listens already: several API servers cannot update one engine")
        if not self._staged:  # a model without a KV cache, whose memory vLLM does not measure
            self._stage(0, 0, fixed=True)
        try:
            self._rank_server.answer(msgspec.json.decode(init_info.invitation, type=RankInvitation), self._secret)
        except OSError as error:
            raise RuntimeError(f"rank {self._rank} cannot listen for the API server: {error}") from error
        except WeightcastError as error:
            words = error_words(error)
            end_vllm(words)
            raise RuntimeError(words) from error
        self._listens = True

    def switch(self, why_not: str, *, goes_on: bool) -> tuple[bool, str]:
        """Carries out what waits for the main thread, or refuses it for the reason ``why_not``; answers use sockets.

        With ``goes_on`` vLLM's next step comes at once.  Returns whether the model's weights were switched; and the
        failure in words, or nothing.
        """
        adapter = self._adapters.step(why_not)
        switched, failure = self._rank_server.step_unless(why_not, goes_on=goes_on)
        return switched, adapter or failure

    @property
    def steps(self) -> StepCounter:
        """Those of vLLM's model."""
        return self._rank_server.steps

    def adapters_dropped(self) -> None:
        """Puts weightcast's adapters back after vLLM has dropped all of them."""
        self._adapters.keep()

    def adapter(self, runner: Any, order: str) -> str:
        """Carries out the API server's order about a LoRA adapter; returns why it could not, or nothing."""
        return self._adapters.carry_out(runner, order)

    def start_weight_update(self) -> None:
        """Does nothing: updates go to /weightcast."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Refuses updates that do not come from weightcast."""
        raise RuntimeError("with the backend weightcast, updates go to /weightcast, not to /update_weights")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Refuses, as ``update_weights`` does."""
        raise RuntimeError("with the backend weightcast, updates go to /weightcast, not to /update_weights")

    def finish_weight_update(self) -> None:
        """Does nothing: updates go to /weightcast."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Refuses: versions before 0.29 or so expect the trainer's half in this class."""
        raise RuntimeError("with the backend weightcast, updates are sent by weightcast.WeightUpdater")

    def shutdown(self) -> None:
        """Releases groups and mapped memory; vLLM may call it twice."""
        self._receiver.interrupt("the engine is shutting down")
        self._receiver.close()
        self._adapters.close()

    # -- once, when the model is loaded

    def _make_receiver(self) -> WeightReceiver:
        if getattr(self.vllm_config.parallel_config, "enable_eplb", False):
            raise ConfigError(EPLB_REFUSED, hint=EPLB_HINT)
        check_replicas(self.vllm_config.parallel_config)
        check_stores(self.vllm_config)
        if self.device.type == "cpu" and not self.model_config.enforce_eager:
            # A compiled graph keeps the packed weights of its compilation.
            raise ConfigError(
                "on a CPU, weights can only be updated in eager mode", hint="start vLLM with --enforce-eager"
            )
        unpacked = UnpackedModel(self.model, device=self.device)
        self._beside_bytes = unpacked.quantised_bytes
        if self._beside_bytes:
            log.info(
                "weightcast: rank %d keeps the loaded form of quantised layers beside the model: %s",
                self._rank,
                gib(self._beside_bytes),
            )
        checkpoint = CheckpointSpecs(self.vllm_config, self.model, not_updated=self._settings.not_updated)
        if checkpoint.dummy:
            checkpoint.read_specs()
            unpacked.fill_randomly()
        elif unpacked.as_loaded:
            checkpoint.read_specs()
        else:
            unpacked.load_weights(checkpoint.weights())
            unpacked.check_layouts()
        log.info(
            "weightcast: rank %d read the checkpoint's %s",
            self._rank,
            "names and shapes" if checkpoint.dummy or unpacked.as_loaded else "values once more, to compare them",
        )
        unpacked.spot_check()
        self._models = LoadedModels(unpacked, checkpoint)
        return self._receiver_of(self._models)

    def _receiver_of(self, models: LoadedModels) -> WeightReceiver:
        receiver = WeightReceiver(
            self.model,
            load_weights=models.load_weights,
            expected=models.specs,
            tp_rank=self._rank,
            tp_size=int(self.vllm_config.parallel_config.world_size),
            device=self.device,
            finishers=tuple(map(self._configured, models.finishers)),
            residents=models.residents,
            checks=tuple(map(self._configured, models.checks)),
            before_commit=[models.unpacked.derive_ahead] if models.unpacked.quantised_bytes else (),
            between_steps=lambda do: self._rank_server.between_steps(do),
            staging="none",  # until vLLM has measured its memory; see ``take_room``
            hold_computed=True,
        )
        loader = receiver.loader
        loader.expect_kept_dtypes()
        loader.not_updated = tuple(name for name in loader.not_updated if name not in models.constants)
        check_cache_scales(loader.skipped)
        heads = models.heads
        kept = {digest: name for name, digest in heads.items() if name not in loader.skipped}
        loader.copies = {
            name: kept[digest] for name, digest in heads.items() if name in loader.skipped and digest in kept
        } | models.copies(loader.routes)
        for name, original in loader.copies.items():  # a trainer casts both alike, so that their digests are the same
            loader.expected[name] = msgspec.structs.replace(
                loader.expected[name], dtype=loader.expected[original].dtype
            )
        return receiver

    def _add_draft(self, runner: Any) -> None:
        """Makes the draft a part of what an update writes; its checkpoint is read once vLLM has loaded it."""
        draft = draft_model_of(runner)
        if draft is None:
            raise ConfigError(
                "this vLLM has no draft model that an update can reach", hint='leave "draft" out of --additional-config'
            )
        with reason_logged(log, "update the draft model"), set_current_vllm_config(self.vllm_config):
            self._models.add_draft(draft, self.model, self.vllm_config, self.device)
            receiver = self._receiver_of(self._models)
        self._receiver.close()
        self._receiver = self._rank_server.receiver = receiver
        log.info("weightcast: rank %d updates the draft model with the model", self._rank)

    def _stage(self, cache_bytes: int, least_bytes: int, *, fixed: bool) -> int:
        """Allocates and logs the staging set; returns its bytes in the KV cache's memory."""
        loader = self._receiver.loader
        budget = self._budget(cache_bytes, least_bytes, fixed=fixed)
        reason = loader.unstaged_because(keep_storage=True) if self._staging == "auto" else ""
        asked: StagingChoice = "none" if reason else self._staging
        with reason_logged(log, "stage updates"):
            place, why = budget.place(asked, loader.size_bytes + loader.held_bytes)
            why = reason or why
            before = self._taken_bytes()
            loader.stage(
                place,
                keep_storage=True,
                in_order=reads_in_order(self.vllm_config),
                may_move=self._pool.may_leave,
                after_move=self._pool.free_left,
            )
        self._staged = True
        self._receiver.staging_note = ""
        if why and place != "device":
            where = "not staged" if place == "none" else "staged in host memory"
            self._receiver.staging_note = f"a new version is {where} before its commit: {why}"
        size_bytes = loader.staging.size_bytes
        taken = (size_bytes if budget.on_host else self._taken_bytes() - before) if place != "none" else 0
        if place == "device":
            taken += loader.held_bytes  # taken when they arrive, until the commit
        log.info(
            "weightcast: rank %d stages updates on: %s (setting: %s), %s%s; KV cache: %s",
            self._rank,
            place,
            self._staging,
            gib(size_bytes),
            f"; {why}" if why else "",
            f"{gib(cache_bytes)}, as set" if fixed else f"{gib(cache_bytes - taken)} of {gib(cache_bytes)}",
        )
        if loader.staging.mapped_bytes:
            log.info("weightcast: rank %d switches %s without a copy", self._rank, gib(loader.staging.mapped_bytes))
        if place == "none":
            log.warning(
                "weightcast: rank %d stages nothing: an update pauses the engine from its start, "
                "and an update that fails half way quarantines it",
                self._rank,
            )
        return taken

    def _budget(self, cache_bytes: int, least_bytes: int, *, fixed: bool) -> Budget:
        on_host = self.device.type == "cpu"
        host_bytes = free_host_bytes()
        free_bytes = host_bytes if on_host else torch.cuda.mem_get_info(self.device)[0]
        return Budget(
            cache_bytes=cache_bytes,
            least_bytes=least_bytes,
            fixed_bytes=free_bytes - cache_bytes - self._receiver.loader.size_bytes // 5 if fixed else None,
            host_bytes=host_bytes,
            on_host=on_host,
        )

    def _record(self, cache_bytes: int, least_bytes: int, *, fixed: bool) -> int:
        """Records how quantised layers are derived; returns the bytes that are kept for that.

        Where weights stay in the pool of vLLM's sleep mode nothing is recorded: a second set would not sleep.
        """
        unpacked = self._models.unpacked
        stays = loads_into_pool(self.vllm_config) and not self._pool.may_leave
        if self.device.type != "cuda" or stays or not unpacked.quantised_bytes:
            return 0
        budget = self._budget(cache_bytes, least_bytes, fixed=fixed)
        why = why_not_ahead(unpacked.derived, self._receiver.loader.staging, budget)
        why = why if self._settings.derive_ahead else "as set"
        before = self._taken_bytes()
        with set_current_vllm_config(self.vllm_config):
            recorded, layers = unpacked.record(None if why else self._second_set)
        taken = self._taken_bytes() - before
        log.info(
            "weightcast: rank %d recorded how %d of %d quantised layers are derived, %s, with %s of memory",
            self._rank,
            recorded,
            layers,
            "ahead of the commit" if unpacked.derives_ahead else "at the commit" + (f" ({why})" if why else ""),
            gib(taken),
        )
        return taken

    def _second_set(self, layers: Sequence[QuantisedLayer]) -> DerivedAhead:
        return DerivedAhead(
            layers,
            self._receiver.loader.staging,
            in_order=reads_in_order(self.vllm_config),
            may_move=self._pool.may_leave,
            after_move=self._pool.free_left,
        )

    def _configured(self, do: Callable[[], object]) -> Callable[[], None]:
        """Runs something as vLLM runs its own processing of weights, which reads its current configuration."""

        def configured() -> None:
            with set_current_vllm_config(self.vllm_config):
                do()

        return configured

    def _taken_bytes(self) -> int:
        if self.device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        mapped_bytes = 2 * self._receiver.loader.staging.mapped_bytes + self._models.unpacked.outside_bytes
        return torch.cuda.memory_reserved(self.device) + mapped_bytes - self._pool.freed_bytes


def _shared_secret(secret_file: str, parallel: Any, rank: int) -> Secret | None:
    """Reads the secret.  Collective if ranks are on several hosts: all raise ``ConfigError`` if one has none."""
    several = on_several_hosts(parallel)
    error: ConfigError | None = None
    secret = None
    try:
        secret = engine_secret(secret_file)
    except ConfigError as found:
        if not several:
            raise
        error = found
    if not several:
        return secret
    # A rank that refused alone would leave the others waiting for it in vLLM's own collectives.
    group = get_world_group().cpu_group
    mine = torch.tensor([secret is not None], dtype=torch.uint8)
    said = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([said], [mine]).wait()
    if error is not None:
        raise error
    without = [number for number, has in enumerate(said) if not has.item()]
    if without:
        names = ", ".join(map(str, without))
        raise ConfigError(
            f"the ranks of this vLLM are on several hosts, and ranks without an engine secret are: {names} "
            f"(this is rank {rank} on host {socket.gethostname()})",
            hint=SET_A_SECRET,
        )
    return secret
