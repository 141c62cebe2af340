"""Refuses tensors that are not a full update of this rank's model, or that the model would ignore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from weightcast.errors import Refused, some
from weightcast.wire.casts import why_no_cast
from weightcast.wire.layout import TensorSpec


def check_offer(
    specs: Sequence[TensorSpec],
    expected: Mapping[str, TensorSpec],
    *,
    optional: Collection[str],
    kept_dtypes: Callable[[str], Iterable[torch.dtype]],
) -> None:
    """Refuses tensors of a trainer that are not, in name, shape and dtype, those that the model expects.

    Expected tensors in ``optional`` may be left out.  A cast to the dtype that is expected, or to those of the
    parameters that a tensor is copied into (``kept_dtypes``), must keep its values.  All problems are named.
    """
    offered = {spec.name: spec for spec in specs}
    problems: list[str] = []
    if len(offered) != len(specs):
        problems.append("a name is announced twice")
    missing = [name for name in expected if name not in offered and name not in optional]
    unknown = [name for name in offered if name not in expected]
    if missing:
        problems.append(f"missing {some(missing)}")
    if unknown:
        problems.append(f"unknown to this model: {some(unknown)}")
    for name, spec in offered.items():
        want = expected.get(name)
        if want is None:
            continue
        if want.shape != spec.shape:
            problems.append(f"{name} has shape {spec.shape}, the model's has {want.shape}")
        elif why := _why_no_cast(spec, want, kept_dtypes(name)):
            problems.append(why)
    if problems:
        shown = some(problems, 8, joint="; ")
        raise Refused(f"these weights do not fit the model: {shown}", hint="is it a checkpoint of this model?")


def check_copies(received: Mapping[str, str], copies: Mapping[str, str]) -> None:
    """Refuses an update with another value for a copy than for its original, which the model would ignore.

    ``received`` has the digest of each tensor that arrived, ``copies`` the name of each copy's original.
    """
    for name, original in copies.items():
        if name in received and received[name] != received.get(original):
            raise Refused(
                f"{name} differs from {original}: the engine was started with weights in which they are equal, "
                f"dropped {name}, and would compute with {original} in its place",
                hint="tie the two in the trainer, or start the engine from a checkpoint in which they differ",
            )


def _why_no_cast(spec: TensorSpec, want: TensorSpec, kept_dtypes: Iterable[torch.dtype]) -> str:
    """The reason why a cast to the expected dtype, or to a parameter's own, would not keep values."""
    sent = spec.torch_dtype
    if why := why_no_cast(spec.name, sent, want.torch_dtype):
        return why
    for kept in kept_dtypes:
        # A loader may widen what its own checkpoint has: that is how the model got its first weights.
        if (why := why_no_cast(spec.name, sent, kept)) and why_no_cast(spec.name, torch.float32, kept):
            return why
    return ""
