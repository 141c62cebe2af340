"""Our receiver in a worker of LMDeploy, beside the model, and the draft model as a part of what an update writes.

``install`` is called by the module map (``folder``) just before LMDeploy builds the model.  The exchange of weights
runs where the mark comes in the worker's queue of forwards, on the worker's thread and stream.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightcast.errors import ConfigError, WeightcastError
from weightcast.plugins.drafts import DraftModel, Weights
from weightcast.plugins.hook_points import LMDEPLOY, OWN_UPDATES
from weightcast.plugins.lmdeploy.folder import note_failure, note_written
from weightcast.plugins.lmdeploy.mp_executor import meet_beside_forwards
from weightcast.plugins.lmdeploy.requests_at_switch import MARK, RESET
from weightcast.plugins.lmdeploy.sleeping_weights import TAGS, WAKE_FIRST, SleepingWeights
from weightcast.plugins.pause_state import WEIGHTS
from weightcast.plugins.staged_receiver import staged_receiver
from weightcast.plugins.switch_rank import SwitchRank
from weightcast.receiver.loader import residents_of
from weightcast.wire.answers import RankAck
from weightcast.wire.layout import DRAFT_PREFIX
from weightcast.wire.messages import Message, Open

log = logging.getLogger("weightcast.plugins.lmdeploy")

# A worker has one model that is updated.
_rank: LmdeployRank | None = None
_MADE_OF_TABLE = "draft_id_to_target_id"


class LmdeployRank(SwitchRank):
    """One rank's receiver."""

    engine = "LMDeploy"

    def __init__(self, model: nn.Module, path: str, folder: str, drafts: Any = None, *, updates_draft: bool) -> None:
        """Makes the receiver and the staging set, and listens; LMDeploy sizes its KV cache afterwards.

        Args:
            model: LMDeploy's model with its checkpoint loaded.
            drafts: LMDeploy's agent for a draft model; None if there is none.

        Raises:
            ConfigError: This model cannot be updated through our receiver.
        """
        from lmdeploy.pytorch.distributed import get_dist_manager

        here = get_dist_manager().current_context()
        super().__init__(int(here.rank), next(model.parameters()).device)
        _check_model(model)
        draft: LmdeployDraft | None = None
        of_draft: Callable[[], Weights] | None = None
        if drafts is not None and updates_draft:
            of_draft = functools.partial(_checkpoint, drafts.specdecode_config.model)
            if drafts.proposer is not None:  # with several ranks only the first one has the draft
                _check_model(drafts.proposer.model)
                draft = LmdeployDraft(drafts.proposer, model, load=_load, checkpoint=of_draft)
        self._weights = SleepingWeights(model if draft is None else nn.ModuleList([model, draft.module]))
        self.receiver = staged_receiver(
            model,
            load_weights=functools.partial(_load, model),
            checkpoint=functools.partial(_checkpoint, path),
            draft=draft,
            draft_checkpoint=of_draft,
            rank=self.rank,
            world_size=int(here.dist_config.world_size),
            device=self.device,
            between_steps=self.between_steps,
            # Graphs are captured later, and again after each sleep, for which LMDeploy moves the weights away.
            may_move=True,
            engine=self.engine,
            without=LMDEPLOY.without,
        )
        fixed = set(fixed_scales(model))
        if draft is not None:
            fixed |= {f"{DRAFT_PREFIX}{name}" for name in fixed_scales(draft.module)}
        loader = self.receiver.loader
        loader.not_updated = tuple(name for name in loader.not_updated if name not in fixed)
        if drafts is not None and not updates_draft:
            loader.not_updated += ("the draft model",)
        self.listen(folder)

    def apply(self, message: Message) -> RankAck:
        """Carries out one weight message.  LMDeploy makes its parameters in inference mode, and so they are written."""
        with torch.inference_mode():
            return super().apply(message)

    def carry_out(self, do: Callable[[], None], session: Open, *, forward: bool) -> None:
        """Implements ``SwitchRank.carry_out``."""
        began = time.monotonic()
        do()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        log.info(
            "weightcast: %s version %d; %s; %.1f ms",
            "switched to" if forward else "back from",
            session.version,
            session.pause,
            1e3 * (time.monotonic() - began),
        )

    def sleep(self, *, discard: bool) -> None:
        """Frees the staging set, with ``discard`` the weights too, before LMDeploy moves the weights to the host."""
        with torch.inference_mode():
            self.weights_fall_asleep(discard=discard, hint=WAKE_FIRST)
            if discard:
                self._weights.discard()

    def wake(self) -> None:
        """Called once the weights are on the device again, before LMDeploy captures graphs."""
        with torch.inference_mode():
            self._weights.restore()
            self.stage_again()

    def replaced(self) -> None:
        """Called after each request of LMDeploy's own updates."""
        with torch.inference_mode():
            self._weights.reattach()
        self.receiver.forget()


def install(folder: str, *, updates_draft: bool = False) -> None:
    """Replaces what a worker calls; ``ConfigError`` if it is not as we know it.  Safe to call twice."""
    from lmdeploy.pytorch.engine.model_agent import agent
    from lmdeploy.pytorch.spec_decode.base import BaseSpecModelAgent
    from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent

    if hasattr(agent.load_model_weights, "weightcast"):
        return
    try:
        LMDEPLOY.check("ranks")
    except WeightcastError as error:
        note_failure(folder, error)
        raise
    load, agent_class = agent.load_model_weights, agent.BaseModelAgent
    run_step, fall_asleep, wake_up = agent_class._async_step, agent_class.sleep, agent_class.wakeup

    loaded: list[tuple[nn.Module, str]] = []

    def load_model_weights(model: nn.Module, checkpoint_path: str, *arguments: Any, **named: Any) -> None:
        load(model, checkpoint_path, *arguments, **named)
        loaded.append((model, checkpoint_path))

    def then_received(build: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(build)
        def build_model(self: Any, *arguments: Any, **named: Any) -> None:
            global _rank
            build(self, *arguments, **named)
            [(model, path)] = loaded
            drafts = self if self.is_enabled() else None
            try:
                with torch.inference_mode():
                    _rank = LmdeployRank(model, path, folder, drafts, updates_draft=updates_draft)
            except WeightcastError as error:
                note_failure(folder, error)  # LMDeploy's own log of a failed start buries the reason
                raise

        return build_model

    async def _async_step(self: Any, *arguments: Any, **inputs: Any) -> None:
        mark = inputs.pop(MARK, None)
        if mark is None:
            return await run_step(self, *arguments, **inputs)
        if mark == RESET:
            self.reset_runtime_state()
        elif _rank is not None:
            _rank.step()

    async def sleep(self: Any, level: int = 1) -> None:
        if _rank is None:
            return await fall_asleep(self, level)
        _rank.sleep(discard=level >= 2)
        # Level 2 would make another model at the wake-up, which the receiver does not know.
        await fall_asleep(self, 1)

    def wakeup(self: Any, tags: Sequence[str] | None = None) -> None:
        tags = TAGS if tags is None else tags
        if WEIGHTS in tags:
            wake_up(self, [WEIGHTS])
            if _rank is not None:
                _rank.wake()
        others = [tag for tag in tags if tag != WEIGHTS]
        if others:  # LMDeploy captures graphs here, which know the addresses of the weights
            wake_up(self, others)

    def then_told(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def updated(self: Any, *arguments: Any, **named: Any) -> Any:
            model = self.patched_model.get_model()
            load = model.load_weights

            def noted(weights: Any) -> Any:
                note_written(folder)
                return load(weights)

            model.load_weights = noted
            try:
                return update(self, *arguments, **named)
            finally:
                del model.load_weights
                if _rank is not None:
                    _rank.replaced()

        return updated

    for name in OWN_UPDATES:
        setattr(agent_class, name, then_told(getattr(agent_class, name)))
    # LMDeploy calls this of one class or the other once the model has its weights, if there is no draft too.
    for drafts in (BaseSpecModelAgent, SpecModelAgent):
        drafts.build_model = then_received(drafts.build_model)
    load_model_weights.weightcast = True  # type: ignore[attr-defined]
    agent.load_model_weights = load_model_weights
    agent_class._async_step, agent_class.sleep, agent_class.wakeup = _async_step, sleep, wakeup
    meet_beside_forwards()


def fixed_scales(model: nn.Module) -> Iterator[str]:
    """Names of buffers that have the only value that LMDeploy ever gives them: 1, the scales of its KV cache."""
    from lmdeploy.pytorch.nn.attention import Attention

    for prefix, module in model.named_modules():
        if isinstance(module, Attention):
            for name in ("k_scale", "v_scale"):
                scale = getattr(module, name, None)
                if isinstance(scale, torch.Tensor) and scale.numel() == 1 and bool(scale == 1):
                    yield f"{prefix}.{name}" if prefix else name


def _check_model(model: nn.Module) -> None:
    """Refuses models whose weights are kept in more than one form, or that cache what they computed with them."""
    for name, module in model.named_modules():
        if hasattr(module, "process_weights_after_loading"):
            raise ConfigError(
                f"{name or type(model).__name__} computes further weights after loading ({type(module).__name__}), and "
                "an update would leave them as they were",
                hint=LMDEPLOY.without,
            )
    processor = getattr(model, "get_input_processor", lambda: None)()
    if processor is not None:
        raise ConfigError(
            "what the vision encoder computed is kept with a request, and an update would leave it there",
            hint=f"start with --language-model-only, or {LMDEPLOY.without}",
        )


def _load(model: Any, weights: Weights) -> None:
    from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader

    model.load_weights(ModelWeightLoader._rename_weights_iterator(weights, model))


def _checkpoint(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader

    loader = ModelWeightLoader(path)
    for shard in sorted(loader._shard_paths):
        yield from loader._get_weights_iterator(shard)


class LmdeployDraft(DraftModel):
    """An EAGLE head whose checkpoint is loaded.  Without embeddings of its own it gets the model's.

    Its table ``d2t`` is no parameter: LMDeploy computes other numbers from it when it loads the head.
    """

    def __init__(
        self,
        proposer: Any,
        model: nn.Module,
        *,
        load: Callable[[nn.Module, Weights], None],
        checkpoint: Callable[[], Weights],
    ) -> None:
        """Learns what is the head's own and writes the same weights once more; ``ConfigError`` if that cannot be done.

        ``load`` loads whole tensors into a model, as LMDeploy does at its start.
        """
        self._proposer, self._load = proposer, load
        self.module: nn.Module = proposer.model
        super().__init__("LMDeploy", self.module, residents_of(self.module).get(_MADE_OF_TABLE))
        if getattr(proposer.specdecode_config.model_config.hf_config, "quantization_config", None):
            raise self._refused("the draft is quantised")
        of_model = {tensor.data_ptr() for tensor in residents_of(model).values() if tensor.numel()}
        own = {name: tensor for name, tensor in self._everything.items() if tensor.data_ptr() not in of_model}
        self._made = own.pop(_MADE_OF_TABLE, None)
        own |= self._tables()
        for name, places in self._destinations(checkpoint()).items():
            if places - own.keys():
                raise self._refused(f"the draft's {name} would be loaded into the model's {min(places - own.keys())}")
        self.residents = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in own.items()}
        self.check()

    def renew(self) -> None:
        """Implements ``DraftModel.renew``."""
        if self._made is not None:
            self._made.copy_(self._computed())
            self._proposer._init_bitmask_translate_constants()

    def _words(self) -> list[Tensor]:
        if self._made is None:
            return []
        proposer = self._proposer
        return [proposer.draft_id_to_target_id, 32 * proposer._d2t_words + proposer._d2t_bits]

    def _load_own(self, weights: Weights) -> None:
        self._load(self.module, self._without_table(weights))
