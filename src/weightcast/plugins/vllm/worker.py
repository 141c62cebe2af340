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
from collections.abc import Iterator
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
from weightcast.errors import ConfigError, WeightcastError, error_words, some
from weightcast.plugins.engine_needs import reason_logged
from weightcast.plugins.hook_points import check_worker
from weightcast.plugins.other_hosts import SET_A_SECRET, RankInvitation, engine_secret
from weightcast.plugins.vllm import share_log_handlers
from weightcast.plugins.vllm.layer_kinds import check_cache_scales
from weightcast.plugins.vllm.loaded_models import CheckpointSpecs, LoadedModels, check_draft, draft_model_of
from weightcast.plugins.vllm.lora_ranks import LoraRanks
from weightcast.plugins.vllm.rank import VllmRank
from weightcast.plugins.vllm.rank_protocol import (
    EPLB_HINT,
    EPLB_REFUSED,
    check_generates,
    check_replicas,
    end_vllm,
    keeps_draft,
    on_several_hosts,
    rank_among_replicas,
    settings_of,
)
from weightcast.plugins.vllm.second_sets import SecondSets
from weightcast.plugins.vllm.start_up import gib, warm_up
from weightcast.plugins.vllm.stores import check_stores
from weightcast.plugins.vllm.unpacked_model import UnpackedModel
from weightcast.plugins.vllm.weights_pool import WeightsPool
from weightcast.plugins.vllm.worker_hooks import wrap_worker
from weightcast.receiver import WeightReceiver
from weightcast.receiver.layout_check import changed_since_load

# In the tree of vLLM: its worker processes have no handler for others.
log = logging.getLogger("vllm.weightcast")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The rendezvous of the API server and the ranks: an ``RankInvitation`` in JSON."""

    invitation: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """An empty message: buckets are announced under ``/weightcast``."""


class WeightcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One rank's receiver, as vLLM's weight-transfer backend.

    Attributes:
        rank_server: Answers the messages of the API server; it has the receiver.
        adapters: LoRA adapters, each with a receiver of its own.
        sets: The second sets of weights.
    """

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
        with reason_logged(log, "update this model"):
            check_worker(worker_class)
            check_generates(vllm_config)
            self._settings = settings_of(vllm_config.additional_config)
            pool = WeightsPool(vllm_config)
            self._secret = _shared_secret(self._settings.secret_file, vllm_config.parallel_config, self._rank)
            if self._settings.draft == "update":
                check_draft(vllm_config.speculative_config)
            with set_current_vllm_config(vllm_config):
                receiver = self._make_receiver()
            self.rank_server = VllmRank(
                receiver,
                vllm_config,
                not_updated=("the draft model",) if keeps_draft(vllm_config) else (),
                ends_with_server=True,
            )
            self.adapters = LoraRanks(rank=self._rank, device=self.device, vllm_config=vllm_config, secret=self._secret)
            self.sets = SecondSets(
                self.rank_server,
                self.adapters,
                self._models.unpacked,
                pool,
                vllm_config=vllm_config,
                settings=self._settings,
            )
        wrap_worker(worker_class, WeightcastEngine)

    # -- vLLM's side, on the main thread

    def take_room(self, worker: Any, cache_bytes: int) -> int:
        """Makes the draft a part of what an update writes, if it is asked for; then as ``SecondSets.take_room``."""
        if self._settings.draft == "update":
            self._add_draft(worker.model_runner)
        return self.sets.take_room(worker, cache_bytes)

    def warm_up(self, worker: Any) -> None:
        """Runs the model on batches of many sizes, if the setting asks for it."""
        if self._settings.warm_up:
            warm_up(worker)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Listens for the API server."""
        if self._listens:
            raise RuntimeError("weightcast listens already: several API servers cannot update one engine")
        if not self.sets.staged:  # a model without a KV cache, whose memory vLLM does not measure
            self.sets.stage(0, 0, fixed=True)
        try:
            self.rank_server.answer(msgspec.json.decode(init_info.invitation, type=RankInvitation), self._secret)
        except OSError as error:
            raise RuntimeError(f"rank {self._rank} cannot listen for the API server: {error}") from error
        except WeightcastError as error:
            words = error_words(error)
            end_vllm(words)
            raise RuntimeError(words) from error
        self._listens = True

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
        self.rank_server.receiver.interrupt("the engine is shutting down")
        self.rank_server.receiver.close()
        self.adapters.close()

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
        if unpacked.quantised_bytes:
            log.info(
                "weightcast: rank %d keeps the loaded form of quantised layers beside the model: %s",
                self._rank,
                gib(unpacked.quantised_bytes),
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
            finishers=models.finishers,
            residents=models.residents,
            # As vLLM's own processing of weights, which reads its current configuration.
            checks=tuple(map(set_current_vllm_config(self.vllm_config), models.checks)),
            before_commit=[models.unpacked.derivation.run_ahead] if models.unpacked.quantised_bytes else (),
            between_steps=lambda do: self.rank_server.between_steps(do),
            staging="none",  # until vLLM has measured its memory; see ``SecondSets.take_room``
        )
        loader = receiver.loader
        loader.expect_kept_dtypes()
        changed = changed_since_load(loader, models.values_of(loader.computed))
        if changed:
            raise ConfigError(
                f"vLLM has changed {some(changed)} after loading, so that an update through its loader would be wrong",
                hint="use another kernel for that layer (--linear-backend, --moe-backend), or vLLM's own transfer",
            )
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
        self.rank_server.receiver.close()
        self.rank_server.receiver = receiver
        log.info("weightcast: rank %d updates the draft model with the model", self._rank)


def _shared_secret(secret_file: str, parallel: Any, rank: int) -> Secret | None:
    """Reads the secret.  Collective if ranks are on several hosts: all raise ``ConfigError`` if one has none."""
    error: ConfigError | None = None
    secret = None
    try:
        secret = engine_secret(secret_file)
    except ConfigError as found:
        error = found
    without: list[int] = []
    if on_several_hosts(parallel):
        # A rank that refused alone would leave the others waiting for it in vLLM's own collectives.
        group = get_world_group().cpu_group
        mine = torch.tensor([secret is not None], dtype=torch.uint8)
        said = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([said], [mine]).wait()
        without = [number for number, has in enumerate(said) if not has.item()]
    if error is not None:
        raise error
    if without:
        names = ", ".join(map(str, without))
        raise ConfigError(
            f"the ranks of this vLLM are on several hosts, and ranks without an engine secret are: {names} "
            f"(this is rank {rank} on host {socket.gethostname()})",
            hint=SET_A_SECRET,
        )
    return secret
