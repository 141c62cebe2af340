"""Our receiver in a scheduler process of SGLang, beside the model; the draft model; and our hooks in SGLang.

Only the exchange and the finishers run on the scheduler's thread, when a ``Step`` comes (``requests_at_switch``).
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.plugins.drafts import TABLE, DraftModel, Weights
from weightcast.plugins.engine_needs import dotted, reason_logged
from weightcast.plugins.hook_points import ENGINE, HTTP, RECEIVER, RUNNER, SCHEDULER, SGLANG, UPDATER
from weightcast.plugins.pause_state import WEIGHTS
from weightcast.plugins.sglang import FOLDER
from weightcast.plugins.sglang.requests_at_switch import Boundary, SglangRequests
from weightcast.plugins.sglang.settings import (
    WAKE_FIRST,
    check_settings,
    has_draft,
    loses_weights,
    ranks_of,
    resolved,
    tags_of,
    updates_draft,
)
from weightcast.plugins.staged_receiver import staged_receiver
from weightcast.plugins.switch_rank import SwitchRank
from weightcast.receiver import WeightReceiver
from weightcast.receiver.loader import residents_of
from weightcast.wire.layout import DRAFT_PREFIX
from weightcast.wire.messages import Open

log = logging.getLogger("weightcast.plugins.sglang")


class SglangRank(SwitchRank):
    """One rank's receiver."""

    engine = "SGLang"

    def __init__(self, runner: Any, draft_runner: Any = None) -> None:
        """Makes the receiver and the staging set; SGLang sizes its KV cache afterwards.

        Args:
            draft_runner: That of a draft model which is updated with the model; None for none.

        Raises:
            ConfigError: SGLang's settings or this model cannot be updated through our receiver.
        """
        from sglang.srt.runtime_context import get_parallel

        check_settings(runner.server_args)
        parallel = get_parallel()
        stages = int(parallel.pp_size)
        ranks, within = ranks_of(runner.server_args), int(parallel.tp_size * parallel.pp_rank + parallel.tp_rank)
        # Each data-parallel engine has a scheduler of its own that broadcasts requests.
        self._broadcasts = within == 0
        device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device("cpu")
        super().__init__(within + replica_of(runner, parallel) * int(parallel.tp_size) * stages, device)
        self._loses_weights = loses_weights(resolved(runner.server_args))
        self._boundary = Boundary(self.step)
        self._requests: SglangRequests | None = None
        # Stamps of what is served, and of what the staging set has.
        self._version = self._other = str(getattr(resolved(runner.server_args), "weight_version", None) or "default")
        self._draft = SglangDraft(draft_runner) if draft_runner is not None else None
        self.receiver = self._make_receiver(runner, ranks)
        if has_draft(runner.server_args) and self._draft is None:
            self.receiver.loader.not_updated += ("the draft model",)

    def attach(self, scheduler: Any) -> None:
        """Adds the switch to a scheduler and listens for the API server."""
        self._requests = SglangRequests(scheduler, self.device)
        self._boundary.attach(scheduler)
        if self._draft is not None:
            self._draft.attach(scheduler)
        self.listen(os.environ[FOLDER])

    def requests_pulled(self, requests: list[Any] | None) -> None:
        """Called in each pass with the requests that the first rank is about to broadcast; the others wait for them."""
        if self._broadcasts:
            if self.at_work and (requests or not self._boundary.rest()):
                self.yield_interpreter()
            self._boundary.pulled(requests)

    def request_made(self, request: Any) -> None:
        """Called with every new request."""
        if self._requests is not None:
            self._requests.name(request)

    def carry_out(self, do: Callable[[], None], session: Open, *, forward: bool) -> None:
        """Implements ``SwitchRank.carry_out``."""
        assert self._requests is not None
        version = str(session.version) if forward else self._other
        self._requests.switch(do, mode=session.pause, version=version, served=self._version)
        self._version, self._other = version, self._version

    def memory_released(self, request: Any) -> None:
        """Frees the staging set if the weights sleep.

        Raises:
            Refused: An update is under way, although the API server took it for over; SGLang ends itself.
        """
        if WEIGHTS in tags_of(request):
            self.weights_fall_asleep(discard=self._loses_weights, hint=WAKE_FIRST)

    def memory_resumed(self, request: Any) -> None:
        """Allocates the staging set again once the weights are back."""
        if WEIGHTS in tags_of(request):
            self.stage_again()

    def told_to_switch(self) -> None:
        """Implements ``SwitchRank.told_to_switch``."""
        if self._broadcasts:
            self._boundary.inject()

    # -- once, when the model is loaded

    def _make_receiver(self, runner: Any, world: int) -> WeightReceiver:
        if getattr(runner.model_config, "quantization", None):
            raise ConfigError(
                f"the model is quantised ({runner.model_config.quantization}), and what SGLang derives from quantised "
                "weights would stay as it was",
                hint="serve the model unquantised",
            )
        if getattr(runner.model_config, "is_multimodal", False):
            raise ConfigError(
                "SGLang caches what its vision encoder computed, and an update would leave it in that cache",
                hint=SGLANG.without,
            )
        read = getattr(runner.loader, "_get_all_weights", None)
        if read is None:
            raise ConfigError(
                f"load format {runner.load_config.load_format} has no checkpoint to read the names of weights from",
                hint="start SGLang from a checkpoint in safetensors files",
            )
        return staged_receiver(
            runner.model,
            load_weights=runner.model.load_weights,
            checkpoint=lambda: read(runner.model_config, runner.model),
            draft=self._draft,
            draft_checkpoint=self._draft.checkpoint if self._draft is not None else None,
            rank=self.rank,
            world_size=world,
            device=self.device,
            between_steps=self.between_steps,
            # The memory saver frees what it has allocated itself, and nothing else.
            may_move=not getattr(resolved(runner.server_args), "enable_memory_saver", False),
            engine=self.engine,
            without=SGLANG.without,
        )


def replica_of(runner: Any, parallel: Any) -> int:
    """Number of the data-parallel engine of a scheduler process; ``ConfigError`` if SGLang does not say it."""
    # Version 0.5.17 has it beside the runner's other ranks.
    number = getattr(getattr(runner, "ps", parallel), "dp_rank", None)
    if number is None and (getattr(resolved(runner.server_args), "dp_size", None) or 1) > 1:
        raise ConfigError("SGLang does not say which data-parallel engine this process belongs to", hint=SGLANG.without)
    return int(number or 0)


# SGLang calls plain functions, and each scheduler process has one model that is updated.
_rank: SglangRank | None = None
# The model's runner, while its draft is not loaded yet.
_waiting: Any = None


def model_loaded(result: Any, runner: Any, *arguments: Any, **named: Any) -> None:
    """After ``ModelRunner.load_model``."""
    global _rank, _waiting
    with reason_logged(log, "update this model"):
        both = updates_draft(runner.server_args)
        if runner.is_draft_worker and not both:
            return
        if both and not runner.is_draft_worker:
            _waiting = runner
            return
        _rank = SglangRank(_waiting, runner) if both else SglangRank(runner)
        _waiting = None


def _told(method: str, which: int) -> Callable[..., None]:
    """A hook that calls a method of this process's rank, if there is one, with one of the hook's arguments.

    After a function of SGLang's, the first argument is the function's result.
    """

    def hook(*arguments: Any, **named: Any) -> None:
        if _rank is not None:
            getattr(_rank, method)(arguments[which])

    return hook


class SglangDraft(DraftModel):
    """A draft whose checkpoint is loaded, and to which SGLang has not lent the model's layers yet.

    SGLang loads a draft with all of its weights, and then puts the model's embeddings, and for EAGLE the model's head,
    in the place of the draft's own.  The table ``d2t`` of an EAGLE 3 head is no parameter: SGLang computes other
    numbers from it, once.
    """

    def __init__(self, runner: Any) -> None:
        """Learns what is the draft's own, and changes nothing; ``ConfigError`` for a draft that cannot be updated."""
        super().__init__("SGLang", runner.model, getattr(runner.model, "hot_token_id", None))
        self._runner = runner
        if getattr(runner.model_config, "quantization", None):
            raise self._refused(f"the draft is quantised ({runner.model_config.quantization})")
        self._worker: Any = None
        self._skipped: frozenset[str] = frozenset()
        self._lent = _lent(self._model, eagle3=_is_eagle3(runner)) & self._everything.keys()
        places = self._destinations(self.checkpoint())
        self._skipped = frozenset(name for name, found in places.items() if found & self._lent)
        self._own = {name: tensor for name, tensor in self._everything.items() if name not in self._lent}
        self.residents = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in (self._own | self._tables()).items()}

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads the draft's checkpoint: name and whole tensor in the dtype of its file."""
        read = getattr(self._runner.loader, "_get_all_weights", None)
        if read is None:
            raise self._refused("the draft was started without a checkpoint")
        return read(self._runner.model_config, self._model)

    def attach(self, scheduler: Any) -> None:
        """Checks, now that SGLang is ready, that the draft computes with what an update writes.

        Raises:
            ConfigError: SGLang has put other tensors in the place of the draft's, or keeps a copy of the model's.
        """
        self._worker = getattr(scheduler.draft_worker, "draft_worker", None)
        if self._worker is None or self._worker.draft_runner.model is not self._model:
            raise self._refused("SGLang's draft worker is not as this plug-in expects")
        of_model = {tensor.data_ptr() for tensor in residents_of(scheduler.tp_worker.model_runner.model).values()}
        live = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        for name, tensor in self._own.items():
            if name not in live or live[name].data_ptr() != tensor.data_ptr():
                raise self._refused(f"SGLang has put another tensor in the place of the draft's {name}")
        for name in self._lent:
            if name in live and live[name].data_ptr() not in of_model:
                raise self._refused(f"the draft computes with a {name} that is not the model's")
        if (self._worker.hot_token_id is None) != (self._table is None):
            raise self._refused(f"SGLang does not take the draft's words from {TABLE}")
        self.check()

    def renew(self) -> None:
        """Implements ``DraftModel.renew``."""
        for kept in self._words():
            kept.copy_(self._computed())

    def _words(self) -> list[torch.Tensor]:
        """The tensors that SGLang made of the table."""
        if self._table is None or self._worker is None:
            return []
        return [self._worker.hot_token_id, self._model.hot_token_id]  # pyright: ignore[reportReturnType]

    def _load_own(self, weights: Weights) -> None:
        own = ((name, tensor) for name, tensor in self._without_table(weights) if name not in self._skipped)
        self._model.load_weights(own)  # type: ignore[operator]  SGLang's models all have it


def _is_eagle3(runner: Any) -> bool:
    return str(runner.server_args.speculative_algorithm).upper() == "EAGLE3"


def _lent(model: nn.Module, *, eagle3: bool) -> set[str]:
    """Names of the parameters in whose place SGLang will put the model's; ``attach`` checks that it did so."""
    config: Any = model.config
    embeddings, head = "model.embed_tokens.weight", "lm_head.weight"
    if not eagle3 or getattr(model, "load_lm_head_from_target", False):
        return {embeddings, head}
    wide = getattr(config, "target_hidden_size", config.hidden_size) != config.hidden_size
    return set() if wide else {embeddings}


def add_hooks(*, main: bool) -> None:
    """Registers our hooks and applies them now; ``ConfigError`` if SGLang did not apply one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{RUNNER}.load_model", model_loaded, HookType.AFTER),
        (f"{SCHEDULER}.__init__", _told("attach", 1), HookType.AFTER),
        # SGLang calls this for every new request.
        (f"{SCHEDULER}._maybe_namespace_elastic_radix_cache", _told("request_made", 2), HookType.AFTER),
        (f"{RECEIVER}._pull_raw_reqs", _told("requests_pulled", 0), HookType.AFTER),
        (f"{UPDATER}.release_memory_occupation", _told("memory_released", 1), HookType.BEFORE),
        (f"{UPDATER}.resume_memory_occupation", _told("memory_resumed", 2), HookType.AFTER),
    ]
    if main:
        # Only here: to resolve the target imports the API server, which costs a scheduler process seconds.
        from weightcast.plugins.sglang import endpoints

        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="weightcast-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        hooks += [
            (f"{ENGINE}._launch_subprocesses", endpoints.before_loading, HookType.BEFORE),
            (f"{HTTP}_setup_and_run_http_server", endpoints.before_serving, HookType.BEFORE),
        ]
        if SGLANG.version() not in SGLANG.run_versions:
            log.warning(
                "this is SGLang %s; our receiver was run in %s", SGLANG.version(), " and ".join(SGLANG.run_versions)
            )
    for place, hook, kind in hooks:
        HookRegistry.register(dotted(place), hook, kind)
    HookRegistry.apply_hooks()
    lost = [place for place, _, _ in hooks if dotted(place) not in HookRegistry._patched]
    if lost:
        raise SGLANG.other_version([f"the hook on {dotted(place)} did not take" for place in lost])
    # SGLang passes over a function that has hooks already, so a plug-in that comes later would lose its own there.
    for place, _, _ in hooks:
        HookRegistry._hooks.pop(dotted(place), None)
        HookRegistry._patched.discard(dotted(place))
