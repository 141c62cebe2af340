"""NCCL as one process has it, and what keeps two processes out of one NCCL group.

NCCL reads its variables once in each process.  A group whose members disagree fails while it is made, or at its first
message, with "unhandled cuda error" and no reason.  So they are compared before.  NCCL also reads variables from
``/etc/nccl.conf`` and from the file that ``NCCL_CONF_FILE`` names.  These files are not compared.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from weightcast.wire.fields import Label

_CUMEM, _NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"
_NET = ("NCCL_NET_PLUGIN", "NCCL_NET")
_DEFAULTS = {_CUMEM: "1", _NVLS: "2"}
COMPARED = (_CUMEM, _NVLS, *_NET)
_FEWEST_FOR_NVLS = 3  # NCCL uses NVLink SHARP for more GPUs of one host than two


class NcclSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL in one process.

    Attributes:
        version: Version of the library, such as ``"2.28.9"``; empty if it is not known.
        variables: Values of those environment variables in ``COMPARED`` that are set.
    """

    version: Label = ""
    variables: Annotated[dict[Label, Label], Meta(max_length=16)] = {}

    def is_on(self, name: str) -> bool:
        """True unless the variable turns off what it is about."""
        return self.variables.get(name, "").strip() != "0"


class NcclDifference(NamedTuple):
    """A setting that differs, with both values in words, and what each side would set to agree with the other."""

    ours: str
    theirs: str
    set_ours: str
    set_theirs: str


def differences(ours: NcclSettings, theirs: NcclSettings, *, members: int, one_host: bool) -> list[NcclDifference]:
    """Returns the settings because of which two processes cannot be in one group.

    ``members`` is the size of the group at least; ``one_host`` is True if both processes are on one host.
    """
    found: list[NcclDifference] = []
    if ours.version and theirs.version and ours.version != theirs.version:
        found.append(
            NcclDifference(
                f"NCCL is {ours.version}",
                f"{theirs.version}",
                f"install NCCL {theirs.version} (nvidia-nccl-cu12 or -cu13)",
                f"NCCL {ours.version}",
            )
        )
    names: list[str] = []
    if ours.is_on(_CUMEM) != theirs.is_on(_CUMEM):
        names.append(_CUMEM)
    elif ours.is_on(_CUMEM) and members >= _FEWEST_FOR_NVLS and ours.is_on(_NVLS) != theirs.is_on(_NVLS):
        names.append(_NVLS)  # it needs what the other variable turns on
    if not one_host:
        both = [name for name in _NET if name in ours.variables and name in theirs.variables]
        names += [name for name in both if ours.variables[name] != theirs.variables[name]]
    for name in names:
        mine, other = (one.variables.get(name) for one in (ours, theirs))
        default = _DEFAULTS.get(name, "")
        found.append(
            NcclDifference(
                f"{name} is {mine or 'not set'}",
                other or "not set",
                f"set {name}={other or default}",
                f"{name}={mine or default}",
            )
        )
    return found
