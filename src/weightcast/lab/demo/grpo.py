"""GRPO: group-normalised advantages and a clipped policy gradient, as pure functions of tensors.

The completions of one prompt share it: a group is packed into one row, the prompt first, then every completion.  A mask
keeps completions from attending to each other.  The results equal those of one row per completion, at a third of the
cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, its sampled completions and their rewards.

    Attributes:
        completions: Token ids of each completion, its end-of-text token included; none is empty.
        logprobs: Log-probability of each of those tokens under the policy that sampled it.
    """

    prompt: list[int]
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroups:
    """Groups packed into one row of L tokens, T of them completion tokens.

    Attributes:
        input_ids: ``(1, L)`` int64.
        position_ids: ``(1, L)`` int64; the positions of each completion continue those of its prompt.
        mask: ``(1, 1, L, L)`` bool, True where a token (row) may attend to another (column).
        source: ``(T,)`` int64, position in the row that predicts each completion token.
        target: ``(T,)`` int64, completion tokens.
        behaviour_logprobs: ``(T,)`` float32, log-probabilities under the policy that sampled the tokens.
        advantages: ``(T,)`` float32.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    source: Tensor
    target: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor

    def to(self, device: torch.device) -> PackedGroups:
        """Moves the tensors to another device."""
        return PackedGroups(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            mask=self.mask.to(device),
            source=self.source.to(device),
            target=self.target.to(device),
            behaviour_logprobs=self.behaviour_logprobs.to(device),
            advantages=self.advantages.to(device),
        )


def group_advantages(rewards: Tensor) -> Tensor:
    """Normalises (groups, group size) rewards by each group's mean and standard deviation; 0 where all are equal."""
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    return centred / (rewards.std(dim=-1, keepdim=True, correction=0) + 1e-4)


def clipped_loss(
    logprobs: Tensor,
    *,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    num_tokens: float,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Computes PPO's clipped policy-gradient loss, averaged over tokens; the ratio is against the sampling policy.

    Args:
        logprobs: ``(T,)`` under the policy that is being trained.
        behaviour_logprobs: ``(T,)`` under the policy that sampled the tokens.
        advantages: ``(T,)``.
        num_tokens: Token count of the whole batch, so that tokens of all processes and micro-batches weigh the same.
    """
    ratio = torch.exp((logprobs - behaviour_logprobs).clamp(-20, 20))  # infinity times an advantage of 0 is NaN
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum() / num_tokens


def pack_groups(groups: Sequence[Group]) -> PackedGroups:
    """Packs groups into one row; no token attends to another group or to another completion of its group."""
    input_ids: list[int] = []
    position_ids: list[int] = []
    owners: list[tuple[int, int]] = []  # (group, completion), completion 0 is the prompt
    source: list[int] = []
    target: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    for number, group in enumerate(groups):
        prompt_end = len(input_ids) + len(group.prompt)
        input_ids += group.prompt
        position_ids += range(len(group.prompt))
        owners += [(number, 0)] * len(group.prompt)
        gained = group_advantages(torch.tensor(group.rewards)).tolist()
        for index, completion in enumerate(group.completions):
            start = len(input_ids)
            source += [prompt_end - 1, *range(start, start + len(completion) - 1)]
            target += completion
            behaviour += group.logprobs[index]
            advantages += [gained[index]] * len(completion)
            input_ids += completion
            position_ids += range(len(group.prompt), len(group.prompt) + len(completion))
            owners += [(number, index + 1)] * len(completion)
    return PackedGroups(
        input_ids=torch.tensor([input_ids]),
        position_ids=torch.tensor([position_ids]),
        mask=_visibility(torch.tensor(owners))[None, None],
        source=torch.tensor(source),
        target=torch.tensor(target),
        behaviour_logprobs=torch.tensor(behaviour),
        advantages=torch.tensor(advantages),
    )


def token_logprobs(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the log-probability of each of T targets, in float32, from (T, vocabulary) logits at temperature 1."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, target[:, None])[:, 0]


def _visibility(owners: Tensor) -> Tensor:
    group, completion = owners[:, 0], owners[:, 1]
    same_group = group[:, None] == group[None, :]
    same_or_prompt = (completion[:, None] == completion[None, :]) | (completion[None, :] == 0)
    causal = torch.ones(len(owners), len(owners), dtype=torch.bool).tril()
    return same_group & same_or_prompt & causal
