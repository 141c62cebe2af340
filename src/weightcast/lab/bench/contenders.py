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
    """Returns one contender for each level of proof; the layout decides the transport."""
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
    if layout.device == "cuda":
        # With weights that stay mapped there are no buckets: engines read the trainer's weights where they are.
        by = "shards" if layout.placement == "colocated" else "messages"
        found += [_direct(level, by, bucket_bytes, staging) for level in levels]
    return found


def _direct(level: str, by: str, bucket_bytes: tuple[int, ...], staging: str) -> Contender:
    """``direct``: by ``shards`` with ``keep_mapped``, or by ``messages`` with the bucket sizes to sweep."""
    name = "weightcast direct" + ("" if level == "resident" else f", verify {level}")
    settings = tuple(
        Method(
            name=f"{name}, {by}, {size >> 20} MiB",
            trainer=f"{_OURS}:Trainer",
            engine=f"{_OURS}:Engine",
            options=dict(transport="direct", bucket_bytes=size, verify=level, staging=staging, direct_by=by),
            pauses=False,
        )
        for size in (bucket_bytes[:1] if by == "shards" else bucket_bytes)
    )
    return Contender(name=name, settings=settings, ours=True)
