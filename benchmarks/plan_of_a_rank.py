"""Measures what one trainer rank of a large job plans at connect, and what its sums cost it in an update.

    python benchmarks/plan_of_a_rank.py --rank 0 --shards 64 --expert-groups 32

The job has Kimi-K2's tensors: dense ones sharded over all ranks, experts over the ranks of their group.  The other
ranks are played: nothing is gathered, so a rank needs only the table of parts that all ranks agree on.  Adding up is
measured as an inner rank of the tree does it, which hears from 16 others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src")]

import torch  # noqa: E402

from weightcast.comm.trainer_group import TrainerGroup  # noqa: E402
from weightcast.digest.source_sums import AllSums, SourceSums  # noqa: E402
from weightcast.exporters.gather import Gatherer  # noqa: E402
from weightcast.exporters.ownership import SharedPart  # noqa: E402
from weightcast.protocols import BucketUse  # noqa: E402
from weightcast.wire.box import Box  # noqa: E402
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets  # noqa: E402

_LAYERS, _EXPERTS, _DENSE = 61, 384, 14
_HIDDEN, _INNER = 7168, 2048
_BRANCHES = 16


class _Table:
    """The parts of all tensors, as ranks agree on them."""

    def __init__(self, shards: int, expert_groups: int) -> None:
        self._everybody = range(shards * expert_groups)
        self._groups = [self._everybody[first * shards : (first + 1) * shards] for first in range(expert_groups)]
        self.specs: list[TensorSpec] = []
        self._parts: list[Sequence[SharedPart]] = []
        for layer in range(_LAYERS):
            for number in range(_DENSE):
                self._add(f"model.layers.{layer}.dense.{number}", (4096, _HIDDEN), self._everybody)
            for expert in range(_EXPERTS if layer else 0):
                ranks = self._groups[expert * expert_groups // _EXPERTS]
                for name, shape in (
                    ("gate", (_INNER, _HIDDEN)),
                    ("up", (_INNER, _HIDDEN)),
                    ("down", (_HIDDEN, _INNER)),
                ):
                    self._add(f"model.layers.{layer}.mlp.experts.{expert}.{name}", shape, ranks)

    def agree(self, group: TrainerGroup) -> None:
        """Does nothing: the ranks are played."""

    def parts(self, number: int) -> Sequence[SharedPart]:
        return self._parts[number]

    def _add(self, name: str, shape: tuple[int, int], ranks: range) -> None:
        self.specs.append(TensorSpec(name=name, dtype="bfloat16", shape=shape))
        self._parts.append(_rows_each(shape, ranks))


@cache
def _rows_each(shape: tuple[int, int], ranks: range) -> list[SharedPart]:
    """Rows of a tensor on each rank."""
    first = [shape[0] * number // len(ranks) for number in range(len(ranks) + 1)]
    boxes = (Box(offset=(a, 0), shape=(b - a, shape[1])) for a, b in itertools.pairwise(first))
    return [
        SharedPart(box, (rank,), ready=True, computed=False)
        for rank, box in zip(ranks, boxes, strict=True)
        if box.shape[0]
    ]


class _Rank:
    """The part of ``TrainerGroup`` that a plan needs."""

    uses_nccl = False
    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.hosts = tuple(f"host-{number // 8}" for number in range(world_size))


def _measure(rank: int, shards: int, expert_groups: int, bucket_bytes: int) -> dict[str, Any]:
    table, group = _Table(shards, expert_groups), cast(TrainerGroup, _Rank(rank, shards * expert_groups))
    layouts = plan_buckets(table.specs, bucket_bytes=bucket_bytes, packing=Packing())
    gatherer = Gatherer(table.specs, lambda _: [], table)
    gatherer.prepare(group)
    before, began = _peak_mib(), time.process_time()
    planned = [gatherer.plan(layout, group, BucketUse(scattered=True)) for layout in layouts]
    found: dict[str, Any] = {"plan_s": time.process_time() - began, "plan_mib": _peak_mib() - before}
    began = time.process_time()
    own = SourceSums([one.sum_places for one in planned])
    share = own.to_add_up()
    found["share_s"] = time.process_time() - began
    began, total = time.process_time(), share
    for _ in range(_BRANCHES):
        total = total + share
    AllSums.of(own, total, {})
    found["add_up_s"] = time.process_time() - began
    return found | {"tensors": len(table.specs), "buckets": len(layouts), "message_bytes": share.nbytes}


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--shards", type=int, default=64, help="ranks that share an expert")
    parser.add_argument("--expert-groups", type=int, default=32)
    parser.add_argument("--bucket-mib", type=int, default=512)
    given = parser.parse_args()
    print(json.dumps(_measure(given.rank, given.shards, given.expert_groups, given.bucket_mib << 20)))


if __name__ == "__main__":
    main()
