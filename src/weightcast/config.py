"""Options of an update: targets, transport, memory, proof and deadlines.

The classes hold plain data and validate it once.  Nothing here reads an environment variable or opens a socket.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from weightcast.errors import ConfigError

ENGINE_KINDS = ("native", "sglang", "lmdeploy", "vllm")  # weightcast's own, in the order of a probe

TransportName = Literal["auto", "ipc", "broadcast", "direct", "rdma", "disk", "checkpoint-engine"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]
PauseChoice = Literal["auto", "abort", "retract", "in_place", "wait"]
VerifyLevel = Literal["none", "received", "resident", "behaviour"]
OnFailure = Literal["raise", "quarantine"]
DiskReaders = Literal["user", "group", "all"]
DirectBy = Literal["auto", "memory", "messages", "mixed", "relay", "shards"]
MAX_TIMEOUT_S = 21_600  # engines accept a lease of a day, and a lease is four deadlines
MAX_VERSION = 1 << 53  # JSON readers that know only floating-point numbers still read it exactly

_UNITS = {
    "": 1,
    "b": 1,
    **{name: 1024**power for power, letter in enumerate("kmgt", start=1) for name in (letter, f"{letter}ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}


def check_version(name: str, version: object) -> None:
    """Raises ConfigError, with the ``name`` of the option, unless engines take this number as a version."""
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise ConfigError(f"{name}={version!r}: a version is a whole number from 0 to {MAX_VERSION} (2**53)")


def parse_size(text: str) -> int:
    """Converts ``"512MiB"`` to bytes.  MiB (or M) is a power of 1024, MB a power of 1000; no unit means bytes.

    Raises:
        ConfigError: The text is not a size, or the size is less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size", hint="write 512MiB, 1.5GiB, 64MB or a number of bytes")
    size_bytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size_bytes < 1:
        raise ConfigError(f"{text!r} is less than one byte")
    return size_bytes


@dataclass(frozen=True, slots=True)
class Target:
    """One rollout engine behind one URL: its own, not that of a balancer before several engines.

    Attributes:
        url: ``http://host:port`` or ``https://host:port`` of the engine's server, with or without a trailing slash.
        api_key: Key sent as ``Authorization: Bearer``; never printed.
        engine: Kind of engine: ``"auto"`` probes the server; ``"native"`` (our receiver), ``"sglang"``, ``"vllm"``,
            ``"lmdeploy"`` or the kind of another package treats it as that kind.
        devices: UUIDs of the GPUs of its ranks, in order, for ``ipc`` to an engine that does not report them.  Empty if
            it does, or if its ranks sit on the trainer ranks' GPUs in the same order.
        ca_file: PEM file of trusted certificate authorities, for https; None takes the system's.
        cert_file: PEM file of the client certificate, for an https engine that requires one.
        key_file: PEM file of the client's private key, unless ``cert_file`` contains it.
    """

    url: str
    api_key: str | None = field(default=None, kw_only=True, repr=False)
    engine: str = field(default="auto", kw_only=True)
    devices: tuple[str, ...] = field(default=(), kw_only=True)
    ca_file: str | None = field(default=None, kw_only=True)
    cert_file: str | None = field(default=None, kw_only=True)
    key_file: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"target {self.url!r}: {error}", hint="write http://host:port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"target {self.url!r} is not an http URL", hint="write http://host:port")
        if port == 0:
            raise ConfigError(f"target {self.url!r}: port 0 is not a port", hint="use the port that the engine printed")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"target {parts.scheme}://{parts.hostname}: only scheme, host, port and path may be in its URL",
                hint="pass a key as api_key, which is never printed",
            )
        if self.api_key is not None and not (self.api_key and all("!" <= letter <= "~" for letter in self.api_key)):
            raise ConfigError(
                f"target {self.url}: its api_key is empty or has characters that an HTTP header cannot carry",
                hint="use printable ASCII without spaces, and check for a trailing line break",
            )
        if parts.scheme != "https" and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError(f"target {self.url}: certificates need https", hint="write https://host:port")
        if self.key_file and not self.cert_file:
            raise ConfigError(
                f"target {self.url}: key_file has no certificate, because cert_file is not set",
                hint="pass cert_file too",
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    @property
    def host(self) -> str:
        """The host name or address in the URL."""
        return urlsplit(self.url).hostname or ""


class AdvancedOptions(TypedDict, total=False):
    """Options that few runs need, by name: ``connect(advanced={...})``.

    Attributes:
        cell_ranks: Most engine ranks in one process group of ``broadcast``, and of ``direct`` by messages.  Engines
            beyond it get groups of their own.  An engine that fails ends its own group only.  An engine is never
            divided: one with more ranks is a cell by itself.  None takes 256 for ``broadcast``, which sends all weights
            once more for each group, and 64 for ``direct``.
        rendezvous_host: Address of this process that engines can reach; None asks the routing table.
        behaviour_tolerance: Largest difference of a log-probability, in nats, that ``verify="behaviour"`` accepts.
        disk_folder: Folder for ``"disk"``, under the same path for trainer and engines; None takes the folder for
            temporary files, for engines on this host.
        disk_readers: Users that may read the weights of ``"disk"``: ``"user"`` (this process's own), ``"group"`` (also
            its group, or the folder's group if the folder has the setgid bit) or ``"all"``.  An engine that runs as
            another user needs one of the last two.
        check_finite: True refuses weights that are NaN or infinite before any engine switches; False sends them; None
            checks where the pass over each bucket hides behind its digest: on CPUs, with proof.
        alone: True if only this rank of ``torch.distributed`` calls ``connect``, and has all weights whole.
    """

    cell_ranks: int | None
    rendezvous_host: str | None
    behaviour_tolerance: float
    disk_folder: str | None
    disk_readers: DiskReaders
    check_finite: bool | None
    alone: bool


# Options that are gone, each with what to write in its place: in Python, and as a flag where there is one.
GONE: Mapping[str, str] = {
    "digest": "leave it out: there is one kind of digest",
    "direct_by": 'transport names the way: transport="direct" finds it, and takes shards in place with '
    'keep_mapped=True; transport="rdma" reads through NIXL',
    "first_version": "leave it out: update(version=N) refuses a version that is too low",
    "max_connections": "leave it out: the process's limit of open files decides (ulimit -n)",
    "min_proven_share": "leave it out: a target proves all tensors or none; strict=True (--strict) refuses one that "
    "cannot",
    "progress": "write on_event=...: StepEnded has sent_bytes and total_bytes after each bucket",
    "require": "write verify=LEVEL, strict=True (--verify LEVEL --strict): a target that cannot prove it is refused",
}


def check_names(given: Iterable[str], known: Collection[str], *, of: str) -> None:
    """Raises ConfigError for a name that is none of the options ``of`` something, with the nearest one and the list."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{of} has no option {name}", hint=f"{meant}the options are {', '.join(known)}")


def check_options(options: Mapping[str, Any], known: Collection[str], advanced: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option of ``connect`` that is none of those ``known``, or an advanced one.

    The hint says what to write instead of an option that is gone.
    """
    places = AdvancedOptions.__annotations__
    for name, value in options.items():
        if name in GONE:
            raise ConfigError(f"connect has no option {name}", hint=GONE[name])
        if name in places:
            raise ConfigError(f"{name} is an advanced option", hint=f"write advanced={{{name!r}: {value!r}}}")
    check_names(options, known, of="connect")
    for name, value in advanced.items():
        if name in known:
            raise ConfigError(f"{name} is an option of its own", hint=f"write {name}={value!r} beside advanced")
    check_names(advanced, places, of="advanced")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """The options of all updates, checked, with their defaults.

    ``UpdateOptions`` (``update/arguments.py``) and ``AdvancedOptions`` describe them.

    Attributes:
        direct_by: What carries ``transport="direct"``, which ``connect`` finds out.  Only tests and measurements name
            it: ``"shards"`` (engine ranks on this host read the weights where the trainer ranks keep them),
            ``"memory"`` (they read trainer ranks' buffers), ``"messages"`` (every trainer rank sends to every engine
            rank), ``"mixed"`` (an engine rank reads the buffers of trainer ranks on its host and gets messages from the
            others) or ``"relay"`` (as messages, but engines that keep the same pass it on).
    """

    transport: TransportName = "auto"
    pause: PauseChoice = "auto"
    verify: VerifyLevel = "resident"
    strict: bool = False
    on_failure: OnFailure = "raise"
    timeout_s: float = 120.0
    wire_dtype: str | None = None
    bucket_bytes: int | None = None
    max_extra_bytes: int | None = None
    keep_mapped: bool = False
    allow_older: bool = False
    cell_ranks: int | None = None
    rendezvous_host: str | None = None
    behaviour_tolerance: float = 0.1
    disk_folder: str | None = None
    disk_readers: DiskReaders = "user"
    check_finite: bool | None = None
    alone: bool = False
    direct_by: DirectBy = "auto"

    def __post_init__(self) -> None:
        for name, hint in _types().items():
            _check_type(name, getattr(self, name), hint)
        if self.direct_by == "shards" and not self.keep_mapped:
            raise ConfigError(
                'direct_by="shards" lets engine ranks keep the trainer\'s weights mapped', hint="set keep_mapped=True"
            )
        if self.bucket_bytes is not None and self.bucket_bytes < 4096:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes}: a bucket has at least 4096 bytes")
        if self.max_extra_bytes is not None and self.max_extra_bytes < 1:
            raise ConfigError(f"max_extra_bytes={self.max_extra_bytes}: a limit is a positive number of bytes")
        if self.cell_ranks is not None and self.cell_ranks < 1:
            raise ConfigError(f"cell_ranks={self.cell_ranks}: a cell has at least one engine rank")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: a deadline is a positive number of seconds")
        if self.timeout_s > MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={self.timeout_s:g}: a deadline is at most {MAX_TIMEOUT_S} seconds (six hours)",
                hint="timeout_s is the deadline of each single wait, not of the whole update",
            )


_types = cache(lambda: get_type_hints(UpdateConfig))
_IN_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


def _check_type(name: str, value: object, hint: Any) -> None:
    """Raises ConfigError, with the name of the option, for a value that is not of its type."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(get_args(hint))}")
        return
    allowed = get_args(hint) or (hint,)
    [kind] = [one for one in allowed if one is not type(None)]
    fits = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits and not (value is None and len(allowed) > 1):
        raise ConfigError(f"{name}={value!r}: write {_IN_WORDS[kind]}")
