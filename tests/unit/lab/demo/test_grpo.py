"""GRPO's arithmetic, and that packing a group into one row changes nothing."""

from __future__ import annotations

import pytest
import torch

from weightcast.lab.demo.grpo import Group, clipped_loss, group_advantages, pack_groups, token_logprobs

VOCABULARY = 97


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def groups():
    order = torch.Generator().manual_seed(1)

    def tokens(count):
        return torch.randint(VOCABULARY, (count,), generator=order).tolist()

    return [
        Group(
            prompt=tokens(prompt),
            completions=[tokens(length) for length in lengths],
            logprobs=[[-1.0] * length for length in lengths],
            rewards=[float(index) for index in range(len(lengths))],
        )
        for prompt, lengths in ((5, (4, 1, 7)), (3, (2, 6)))
    ]


def packed_logprobs(model, groups):
    packed = pack_groups(groups)
    logits = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=packed.mask,
        logits_to_keep=packed.source,
        use_cache=False,
    ).logits[0]
    return token_logprobs(logits, packed.target)


def plain_logprobs(model, groups):
    found = []
    for group in groups:
        for completion in group.completions:
            row = torch.tensor([group.prompt + completion])
            logits = model(input_ids=row, use_cache=False).logits[0]
            found.append(token_logprobs(logits[len(group.prompt) - 1 : -1], row[0, len(group.prompt) :]))
    return torch.cat(found)


def test_packed_groups_give_the_log_probabilities_of_separate_rows(model, groups):
    torch.testing.assert_close(packed_logprobs(model, groups), plain_logprobs(model, groups), rtol=1e-4, atol=1e-5)


def test_packed_groups_give_the_gradients_of_separate_rows(model, groups):
    gradients = []
    for logprobs in (packed_logprobs, plain_logprobs):
        model.zero_grad()
        logprobs(model, groups).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert any(gradient.abs().max() > 1 for gradient in gradients[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)


def test_each_token_carries_its_completions_advantage(groups):
    packed = pack_groups(groups)
    first = group_advantages(torch.tensor(groups[0].rewards)).tolist()
    second = group_advantages(torch.tensor(groups[1].rewards)).tolist()
    expected = [first[0]] * 4 + [first[1]] + [first[2]] * 7 + [second[0]] * 2 + [second[1]] * 6
    assert packed.advantages.tolist() == pytest.approx(expected)
    assert packed.target.tolist() == [token for group in groups for each in group.completions for token in each]


def test_advantages_are_normalised_within_each_group():
    advantages = group_advantages(torch.tensor([[0.0, 1.0, 0.0, 1.0], [10.0, 20.0, 30.0, 40.0]]))
    torch.testing.assert_close(advantages.mean(dim=-1), torch.zeros(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(advantages.std(dim=-1, correction=0), torch.ones(2), rtol=1e-3, atol=0)


def test_equal_rewards_teach_nothing():
    assert group_advantages(torch.full((2, 8), 0.7)).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, 0.0),  # already likelier than the clip allows
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 0.0),  # already less likely than the clip allows
        (1.5, -2.0, 3.0),
    ],
)
def test_loss_is_clipped_only_where_the_policy_has_gone_far_enough(ratio, advantage, gradient):
    logprobs = torch.tensor([ratio]).log().requires_grad_()
    loss = clipped_loss(
        logprobs,
        behaviour_logprobs=torch.zeros(1),
        advantages=torch.tensor([advantage]),
        num_tokens=1.0,
        clip_low=0.2,
        clip_high=0.28,
    )
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_gradient_steps_raise_the_rewarded_completion(model, groups):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = plain_logprobs(model, groups[1:]).detach()
    for _ in range(5):
        packed = pack_groups(groups[1:])
        logprobs = packed_logprobs(model, groups[1:])
        loss = clipped_loss(
            logprobs,
            behaviour_logprobs=logprobs.detach(),
            advantages=packed.advantages,
            num_tokens=len(packed.target),
            clip_low=0.2,
            clip_high=0.28,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gained = plain_logprobs(model, groups[1:]).detach() - before
    worse, better = gained[:2].mean(), gained[2:].mean()
    assert better > worse


def test_a_token_that_the_engine_held_to_be_impossible_spoils_no_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    impossible = torch.tensor([-9999.0, -2.0])
    loss = clipped_loss(
        logprobs,
        behaviour_logprobs=impossible,
        advantages=torch.zeros(2),
        num_tokens=2,
        clip_low=0.2,
        clip_high=0.28,
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(logprobs.grad).all()
