"""Makes the receiver of an engine that goes on generating: new weights wait beside those that serve, or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import torch
from torch import nn

from weightcast.errors import ConfigError, some
from weightcast.plugins.drafts import DraftModel, Weights, apart
from weightcast.receiver import WeightReceiver
from weightcast.receiver.layout_check import changed_since_load
from weightcast.receiver.loader import residents_of
from weightcast.receiver.rank import StagingChoice
from weightcast.receiver.recorder import LoadWeights
from weightcast.wire.layout import DRAFT_PREFIX, TensorSpec

log = logging.getLogger("weightcast.plugins")

ReadCheckpoint = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def staged_receiver(
    model: nn.Module,
    *,
    load_weights: LoadWeights,
    checkpoint: ReadCheckpoint,
    draft: DraftModel | None = None,
    draft_checkpoint: ReadCheckpoint | None = None,
    rank: int,
    world_size: int,
    device: torch.device,
    between_steps: Callable[[Callable[[], None]], None],
    engine: str,
    without: str,
    **more: Any,
) -> WeightReceiver:
    """Makes a receiver whose parameters stay at their addresses, because captured graphs know them.

    Args:
        checkpoint: Reads the checkpoint: name and whole tensor, in the dtypes of its files.
        draft: Draft model that an update writes too; None without one, and on ranks that have none.
        draft_checkpoint: Reads the draft's checkpoint likewise; None if no update writes a draft.
        without: Advice on how to start the engine without our receiver.

    Raises:
        ConfigError: This model's new weights cannot wait, or the engine changed its weights after loading.
    """

    def load_both(weights: Weights) -> None:
        of_model, of_draft = apart(weights)
        load_weights(of_model)
        if draft is not None:
            draft.load_weights(of_draft)

    def read_both() -> Iterator[tuple[str, torch.Tensor]]:
        yield from checkpoint()
        if draft_checkpoint is not None:
            yield from ((f"{DRAFT_PREFIX}{name}", tensor) for name, tensor in draft_checkpoint())

    if draft is not None:
        residents = residents_of(model) | draft.residents
        more |= {"residents": residents, "finishers": (draft.renew,), "checks": (draft.check,)}
    receiver = WeightReceiver(
        model,
        load_weights=load_weights if draft_checkpoint is None else load_both,
        expected=[TensorSpec.of(name, tensor) for name, tensor in read_both()],
        tp_rank=rank,
        tp_size=world_size,
        device=device,
        staging=staging_setting(),
        keep_storage=True,
        between_steps=between_steps,
        **more,
    )
    loader = receiver.loader
    if not loader.staging.staged:
        why = loader.unstaged_because(keep_storage=True) or "there is no memory for a second set of weights"
        raise ConfigError(f"new weights of this model cannot wait beside those that serve: {why}", hint=without)
    loader.expect_kept_dtypes()
    changed = changed_since_load(loader, read_both())
    if changed:
        raise ConfigError(
            f"{engine} has changed {some(changed)} after loading, so that an update through the loader's own copies "
            "would be wrong",
            hint="use an attention and MoE backend that keeps weights as they are loaded",
        )
    log.info(
        "weightcast: rank %d stages updates on: %s, %.2f GiB (%.2f GiB switch without a copy); %d tensors",
        rank,
        loader.staging.place,
        loader.staging.size_bytes / 2**30,
        loader.staging.mapped_bytes / 2**30,
        len(loader.expected),
    )
    return receiver


def staging_setting() -> StagingChoice:
    """Reads ``WEIGHTCAST_STAGING``, where new weights wait: auto, device or host; ``ConfigError`` for others."""
    value = os.environ.get("WEIGHTCAST_STAGING") or "auto"
    choices = [choice for choice in get_args(StagingChoice) if choice != "none"]
    for choice in choices:
        if value == choice:
            return choice
    raise ConfigError(f"WEIGHTCAST_STAGING is {value!r}", hint=f"use one of {', '.join(choices)}")
