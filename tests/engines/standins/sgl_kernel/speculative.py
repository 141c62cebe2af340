"""Kernels with which SGLang speculates on a CPU, for chains of draft tokens (``--speculative-eagle-topk 1``).

Its backend ``intel_amx`` computes the attention of drafts on CPUs; here plain torch does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copies rows of the KV caches of all layers; each cache has a row of so many bytes for each place."""
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    """Writes the places of new tokens into the rows of their requests."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = places[taken : taken + end - start].to(table.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    """Reads the places of tokens from the rows of their requests."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[taken : taken + end - start] = table[request, start:end].to(places.dtype)
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    places: torch.Tensor,
    width: int,
    topk: int,
    steps: int,
) -> None:
    """Reads the places of the tokens that a draft will make, from the rows of their requests."""
    count = topk * steps
    for number, (request, start) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        places[number * count : (number + 1) * count] = table[request, start : start + count].to(places.dtype)


def fill_bonus_tokens_cpu(
    accepted: torch.Tensor, lengths: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """Takes the last accepted token of each request."""
    for number, length in enumerate(lengths.tolist()):
        bonus_tokens[number] = accepted.flatten()[number * stride + length - 1]


def fill_accept_out_cache_loc_cpu(index: torch.Tensor, places: torch.Tensor, accepted: torch.Tensor) -> None:
    """Takes the places of the accepted tokens."""
    kept = index.flatten()[index.flatten() > -1]
    accepted[: len(kept)] = places[kept]


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    count: int,
    mode: int = 1,
) -> None:
    """Describes a chain as a tree: each token has one child, the next token."""
    if topk != 1:
        raise RuntimeError(f"this stand-in has chains only, and no trees of {topk} branches")
    for number, length in enumerate(lengths.tolist()):
        row = torch.arange(count)
        positions[number * count : (number + 1) * count] = length + row
        index[number] = number * count + row
        next_token[number] = torch.where(row + 1 < count, row + 1, -1)
    next_sibling.fill_(-1)
    if mode == 1:  # each token sees those before it
        mask.view(-1, count, count).copy_(torch.ones(count, count, dtype=torch.bool).tril())


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accepts the tokens of each chain that the model itself would have made, and adds one of the model."""
    target = target_predict.flatten()
    for number, index in enumerate(retrive_index.tolist()):
        last, at, taken = index[0], 0, 0
        accept_index[number, 0] = last
        for _ in range(1, accept_index.shape[1]):
            at = int(retrive_next_token[number, at])
            if at < 0 or candidates[number, at] != target[last]:
                break
            predicts[last] = target[last]
            taken += 1
            last = index[at]
            accept_index[number, taken] = last
        accept_token_num[number] = taken
        predicts[last] = target[last]


_EXTEND = (
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor keys, Tensor values, float key_scale, "
    "float value_scale, Tensor table, Tensor requests, Tensor lengths, Tensor extends, Tensor starts, int most, "
    "float scaling, float cap, bool cross, int window, Tensor? encoder, Tensor? sinks, Tensor? tree, bool causal) -> ()"
)
_DECODE = (
    "decode_attention_cpu(Tensor q, Tensor(b!) keys, Tensor(c!) values, float key_scale, float value_scale, "
    "Tensor(a!) o, Tensor? k, Tensor? v, Tensor places, Tensor logits, Tensor table, Tensor requests, Tensor lengths, "
    "float scaling, float cap, bool cross, int window, Tensor? encoder, Tensor? sinks) -> ()"
)


def _older(schema: str) -> str:
    """The schema in SGLang 0.5.17, without scales and always causal."""
    schema = schema.replace("_cpu(", "_cpu.older(").replace(", bool causal", "")
    return schema.replace("float key_scale, float value_scale, ", "")


def _extend(*arguments: Any) -> None:
    """Attends to the cache with the new tokens of each request, which SGLang has written into the cache before."""
    q, _, _, o, keys, values, _, _, table, requests, lengths, extends, starts, _, scaling, *_, tree, _ = arguments
    if tree is not None:
        raise RuntimeError("this stand-in attends to chains only")
    for request, length, extend, start in zip(
        requests.tolist(), lengths.tolist(), extends.tolist(), starts.tolist(), strict=True
    ):
        rows = slice(start, start + extend)
        mask = torch.ones(extend, length, dtype=torch.bool).tril(length - extend)
        o[rows] = _attend(q[rows], keys, values, table[request, :length], mask, scaling)


def _decode(*arguments: Any) -> None:
    """Writes one token of each request into the cache, and attends to the cache with it."""
    q, keys, values, _, _, o, k, v, places, _, table, requests, lengths, scaling, *_ = arguments
    if k is not None:
        keys[places] = k.view(len(places), *keys.shape[1:])
        values[places] = v.view(len(places), *values.shape[1:])
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        o[row] = _attend(q[row : row + 1], keys, values, table[request, :length], None, scaling)[0]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    k, v = keys[places].transpose(0, 1)[None], values[places].transpose(0, 1)[None]
    q = q.transpose(0, 1)[None]
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
    return found[0].transpose(0, 1)


def _extend_older(*arguments: Any) -> None:
    """The same for 0.5.17, which names the length before a chain where it checks one.

    So a token of the chain sees less than it should.  The models of these tests hardly depend on that.
    """
    _extend(*arguments[:6], 1.0, 1.0, *arguments[6:], True)


def _decode_older(*arguments: Any) -> None:
    _decode(*arguments[:3], 1.0, 1.0, *arguments[3:])


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _schema, _function in (
    (_EXTEND, _extend),
    (_DECODE, _decode),
    (_older(_EXTEND), _extend_older),
    (_older(_DECODE), _decode_older),
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CPU")
