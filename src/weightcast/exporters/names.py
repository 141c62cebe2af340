"""Names of tensors as Hugging Face has them.

Knows what wrappers put into a path; it does not know any model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from weightcast.errors import ConfigError

_TRAVELS = re.compile(r"[\x21-\x7e]{1,512}")
# Path segments that only wrappers have, whatever they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def strip_wrappers(model: nn.Module, path: str) -> str:
    """A module's path without the segments that ``torch.compile``, checkpointing, DDP and the like put into it.

    Args:
        model: Where the path starts.
        path: As ``named_modules`` gives it.
    """
    kept: list[str] = []
    module: nn.Module | None = model
    for segment in path.split(".") if path else ():
        if not (segment in _WRAPPERS or (segment == "module" and is_wrapper(module))):
            kept.append(segment)
        module = getattr(module, segment, None)
    return ".".join(kept)


def is_wrapper(module: object) -> bool:
    """True if a module's attribute ``module`` is the model itself and no part of its name."""
    return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)


def check_names(names: Iterable[str]) -> None:
    """Refuse names that cannot travel.

    Raises:
        ConfigError: A name has characters other than printable ASCII, is empty or too long, or is there twice.
    """
    seen: set[str] = set()
    for name in names:
        if not _TRAVELS.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be sent: a name is 1 to 512 printable ASCII characters, no spaces")
        if name in seen:
            raise ConfigError(f"two tensors have the name {name}")
        seen.add(name)
