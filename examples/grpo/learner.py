"""Training: one ``Learner`` on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from .rollouts import Group


class Learner:
    """Trains with FSDP2, AdamW and GRPO.  weightcast sends the weights of ``model``."""

    def __init__(
        self,
        device: torch.device,
        *,
        model: str,
        lr: float,
        seed: int,
        clip: tuple[float, float] = (0.2, 0.28),
        kl: float = 0.0,
    ) -> None:
        """Builds the model.

        Args:
            device: Device of this rank.
            model: Hugging Face folder.
            lr: Learning rate.
            seed: Seed of torch.
            clip: How far the ratio of probabilities may fall below 1 and rise above it before it is clipped.
            kl: Weight of the KL divergence from the model in the folder.  0 keeps no second model.
        """
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        transformers.logging.disable_progress_bar()
        self.device = device
        self.source = model
        self.clip = clip
        self.kl = kl
        self.model = self.sharded(model).train()
        self.reference = self.sharded(model).eval().requires_grad_(False) if kl else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def sharded(self, folder: str) -> Any:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        module = module.to(self.device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if self.device.type == "cuda" else None)
        for layer in module.model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
        return fully_shard(module, mp_policy=policy, reshard_after_forward=False)

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Runs one optimiser step; every rank trains on its share of the groups."""
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = groups[rank::world]
        tokens = sum(len(completion) for group in groups for completion in group.completions)
        totals = torch.zeros(3, device=self.device)
        for number, group in enumerate(mine):
            last = number == len(mine) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
            loss, gap, kl = self.loss(group)
            (loss * world / tokens).backward()  # FSDP2 averages over ranks; the factor gives a token mean
            totals += torch.stack([loss.detach(), gap, kl])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(totals)
        loss, gap, kl = (totals / tokens).tolist()
        return {"loss": loss, "grad_norm": float(norm.full_tensor()), "logprob_gap": gap, "kl": kl}

    def loss(self, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns, summed over tokens: loss, gap to the engine's log-probabilities, KL divergence.

        The prompt comes once, then every completion; a mask keeps completions from attending to each other.
        """
        rewards = torch.tensor(group.rewards)
        advantage = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        ids, positions, owner = list(group.prompt), list(range(len(group.prompt))), [-1] * len(group.prompt)
        source: list[int] = []  # position that predicts each completion token
        for number, completion in enumerate(group.completions):
            source += [len(group.prompt) - 1, *range(len(ids), len(ids) + len(completion) - 1)][: len(completion)]
            positions += range(len(group.prompt), len(group.prompt) + len(completion))
            owner += [number] * len(completion)
            ids += completion
        of = torch.tensor(owner)
        mask = ((of[:, None] == of[None, :]) | (of[None, :] == -1)) & torch.ones(len(ids), len(ids)).tril().bool()
        inputs = {
            "input_ids": torch.tensor([ids], device=self.device),
            "position_ids": torch.tensor([positions], device=self.device),
            "attention_mask": mask[None, None].to(self.device),
            "logits_to_keep": torch.tensor(source, device=self.device),
            "use_cache": False,
        }
        target = torch.tensor(ids[len(group.prompt) :], device=self.device)
        logprobs = chosen(self.model(**inputs).logits[0], target)
        behaviour = torch.tensor([value for row in group.logprobs for value in row], device=self.device)
        weight = advantage[of[len(group.prompt) :]].to(self.device)
        # Clamped: an engine may report -9999 for a token that it sampled, and infinity times an advantage of 0 is NaN.
        ratio = torch.exp((logprobs - behaviour).clamp(-20, 20))
        low, high = self.clip
        loss = -torch.minimum(ratio * weight, ratio.clamp(1 - low, 1 + high) * weight).sum()
        kl = torch.zeros((), device=self.device)
        if self.reference is not None:
            with torch.no_grad():
                anchor = chosen(self.reference(**inputs).logits[0], target)
            kl = (torch.exp(anchor - logprobs) - (anchor - logprobs) - 1).sum()  # unbiased, and never negative
            loss = loss + self.kl * kl
        return loss, (logprobs.detach() - behaviour).abs().sum(), kl.detach()

    def save(self, folder: str) -> None:
        """Saves a checkpoint from which ``load`` continues, in shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def export(self, folder: str, dtype: str) -> None:
        """Saves a Hugging Face folder, which every engine can serve; rank 0 writes."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if dist.get_rank() == 0:
            whole = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32)
            whole.load_state_dict(weights)
            whole.to(getattr(torch, dtype)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.source).save_pretrained(folder)
        dist.barrier()


def chosen(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, target[:, None])[:, 0]
