"""The model of one trainer rank: FSDP2, AdamW, and one GRPO step on sampled groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from weightcast.lab.demo.grpo import Group, clipped_loss, pack_groups, token_logprobs
from weightcast.lab.demo.settings import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainNumbers:
    """Measurements of one training step, over all ranks.

    Attributes:
        grad_norm: Gradient norm before clipping.
        logprob_gap: Mean absolute difference of log-probabilities between the sampling engine and this model.
    """

    loss: float
    grad_norm: float
    logprob_gap: float


class Learner:
    """The model of one rank, sharded over all ranks of the default process group.

    Weights, gradients and the optimiser's state are float32; on GPUs the forward and backward passes are bfloat16.
    """

    def __init__(self, folder: Path, *, device: torch.device, grpo: GrpoConfig) -> None:
        """Loads the Llama-like causal LM of a Hugging Face folder and shards it; collective."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        model.to(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device.type == "cuda" else None)
        # Unsharded parameters are kept from forward to backward: the model is small, and a second gather is slow.
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        model.train()
        self.model: Any = model
        self._device = device
        self._grpo = grpo
        # The fused step takes a quarter of the time of the other on a CPU.
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=grpo.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, groups: Sequence[Group]) -> TrainNumbers:
        """Runs one optimiser step on the whole batch; collective.

        The groups are the same on every rank, and each trains on its share.  The measurements are over all ranks.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        num_tokens = sum(len(completion) for group in groups for completion in group.completions)
        mine = groups[rank::world_size]
        size = self._grpo.micro_batch_groups
        micro_batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        totals = torch.zeros(2, device=self._device)
        for number, micro_batch in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            # FSDP2 averages gradients over ranks; dividing by the mean tokens of a rank makes that a token mean.
            totals += self._backward(micro_batch, num_tokens=num_tokens / world_size)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._grpo.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.all_reduce(totals)
        loss, gap = totals.tolist()
        return TrainNumbers(loss=loss / world_size, grad_norm=float(norm.full_tensor()), logprob_gap=gap / num_tokens)

    def _backward(self, groups: Sequence[Group], *, num_tokens: float) -> torch.Tensor:
        packed = pack_groups(groups).to(self._device)
        logits = self.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=packed.mask,
            logits_to_keep=packed.source,
            use_cache=False,
        ).logits[0]
        logprobs = token_logprobs(logits, packed.target)
        loss = clipped_loss(
            logprobs,
            behaviour_logprobs=packed.behaviour_logprobs,
            advantages=packed.advantages,
            num_tokens=num_tokens,
            clip_low=self._grpo.clip_low,
            clip_high=self._grpo.clip_high,
        )
        loss.backward()
        gap = (logprobs.detach() - packed.behaviour_logprobs).abs().sum()
        return torch.stack([loss.detach(), gap])
