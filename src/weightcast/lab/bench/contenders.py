"""weightcast's own contenders: one for each level of proof, with several bucket sizes."""

from __future__ import annotations

from weightcast.lab.bench.case import Contender
from weightcast.lab.bench.methods import Layout, Method

_OURS = "weightcast.lab.bench.ours"


def ours(
    layout: Layout,
    *,
    bucket_bytes: tuple[int, ...],
    levels: tuple[str, ...] = ("resident", "none"),
    staging: str = "auto",
) -> list[Contender]:
    """Returns one contender for each level of proof.

    Args:
        layout: Processes and devices; it decides the transport.
        bucket_bytes: Bucket sizes to sweep.
        levels: Levels of proof, as in ``UpdateConfig.verify``.
        staging: Staging of the engines; see ``WeightReceiver``.
    """
    transport = "ipc" if layout.placement == "colocated" else "broadcast"
    found: list[Contender] = []
    for level in levels:
        name = f"weightcast {transport}" + ("" if level == "resident" else f", verify {level}")
        settings = tuple(
            Method(
                name=f"{name}, {size >> 20} MiB",
                trainer=f"{_OURS}:Trainer",
                engine=f"{_OURS}:Engine",
                options=dict(transport=transport, bucket_bytes=size, verify=level, staging=staging),
                pauses=False,
            )
            for size in bucket_bytes
        )
        found.append(Contender(name=name, settings=settings, ours=True))
    if layout.placement == "colocated" and layout.device == "cuda":
        found += [_mapped(level, bucket_bytes[0], staging) for level in levels]
    return found


def _mapped(level: str, bucket_bytes: int, staging: str) -> Contender:
    """``direct`` with ``keep_mapped``, which has no buckets: an engine reads the trainer's weights where they are."""
    name = "weightcast direct" + ("" if level == "resident" else f", verify {level}")
    method = Method(
        name=f"{name}, keep_mapped",
        trainer=f"{_OURS}:Trainer",
        engine=f"{_OURS}:Engine",
        options=dict(transport="direct", bucket_bytes=bucket_bytes, verify=level, staging=staging, direct_by="shards"),
        pauses=False,
    )
    return Contender(name=name, settings=(method,), ours=True)
