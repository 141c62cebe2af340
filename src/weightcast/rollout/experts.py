"""Maps a checkpoint's expert weights to stacked parameters; each rank has its share of every expert's width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """The place of one expert's weight from a checkpoint in a stacked parameter.

    Attributes:
        shape: Unsharded shape of the weight.
        dim: Dimension of the weight that is cut.
        first_row: First row of the expert that the weight fills.
        num_rows: Number of rows that it fills.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    expert: int
    first_row: int
    num_rows: int


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """True for a parameter that holds all experts of a layer."""
    return len(shape) == 3 and name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def local_shape(name: str, shape: tuple[int, ...], tp_size: int) -> tuple[int, int, int]:
    """Shape of a rank's part of a stacked parameter, (experts, 2 x width, hidden) or (experts, hidden, width)."""
    experts, rows, columns = shape
    if name.endswith("gate_up_proj"):
        return experts, rows // tp_size, columns
    return experts, rows, columns // tp_size


def parts(name: str, shape: tuple[int, ...], tp_size: int) -> Iterator[ExpertPart]:
    """Yields the weights that fill a stacked parameter, given by its shape without tensor parallelism."""
    prefix, leaf = name.rsplit(".", 1)
    experts, rows, columns = shape
    for expert in range(experts):
        if leaf == "down_proj":
            yield ExpertPart(
                name=f"{prefix}.{expert}.down_proj.weight",
                shape=(rows, columns),
                dim=1,
                expert=expert,
                first_row=0,
                num_rows=rows,
            )
            continue
        width = rows // 2
        for number, which in enumerate(("gate_proj", "up_proj")):
            yield ExpertPart(
                name=f"{prefix}.{expert}.{which}.weight",
                shape=(width, columns),
                dim=0,
                expert=expert,
                first_row=number * (width // tp_size),
                num_rows=width // tp_size,
            )
