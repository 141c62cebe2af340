"""weightcast's own entries: proof on and off, and the bucket sizes that they may choose from."""

from __future__ import annotations

from weightcast.cli.measuring.case import Contender
from weightcast.cli.measuring.rig import Layout, Method

_OURS = "weightcast.cli.measuring.ours"


def ours(
    layout: Layout,
    *,
    bucket_bytes: tuple[int, ...],
    levels: tuple[str, ...] = ("resident", "none"),
    staging: str = "auto",
) -> list[Contender]:
    """One contender for each level of proof.

    Args:
        layout: Who is where; it decides the transport.
        bucket_bytes: The sweep.
        levels: Of proof, as ``UpdateConfig.verify``.
        staging: Where engines keep the second set; see ``WeightReceiver``.
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
    return found
