"""Options of an update: targets, transport, memory, proof and deadlines.

The classes hold plain data and validate it once.  Nothing here reads an environment variable or opens a socket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

from weightcast.errors import ConfigError

TransportName = Literal["auto", "ipc", "direct", "broadcast", "disk", "checkpoint-engine"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]
PauseChoice = Literal["auto", "abort", "retract", "in_place", "wait"]
VerifyLevel = Literal["none", "received", "resident", "behaviour"]
OnFailure = Literal["raise", "quarantine"]
DigestKind = Literal["fast", "sha256"]
DiskReaders = Literal["user", "group", "all"]
DirectBy = Literal["auto", "memory", "messages", "mixed", "rdma", "relay", "shards"]
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
        engine: Kind of engine: ``"auto"`` probes the server; ``"native"`` (our receiver), ``"sglang"``, ``"vllm"`` or
            ``"lmdeploy"`` treats it as that kind.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """Options of all updates; the keyword arguments of ``WeightUpdater.connect``.

    Attributes:
        transport: ``"ipc"`` (same host: CUDA IPC or shared memory), ``"broadcast"`` (an nccl or gloo process group of
            trainer and engines), ``"disk"`` (a checkpoint folder, for engines that load one while they run),
            ``"checkpoint-engine"`` (that project's protocol, same host, for engines that have its receiver),
            ``"direct"`` (shards to the engine ranks that keep them, without a gather) or ``"auto"`` (direct with
            ``keep_mapped`` where every target is on this host and can read shards; else ipc to the targets on this
            host and broadcast to the others, in one update).  With ``"auto"``, a target that refuses ipc gets the same
            update by broadcast.
        bucket_bytes: Size of one bucket, in bytes.  A trainer rank uses at most two buckets for any model, and
            up to 64 MiB for sums and casts.  None lets ``connect`` choose: 512 MiB; by ``ipc`` to our receivers on GPUs
            an eighth of the weights of one trainer rank, from 512 MiB to 2 GiB.  It keeps two buckets and the scratch
            buffer of a gather within a quarter of the free memory of each trainer GPU, and chooses a larger one than
            512 MiB for a tensor that an engine takes only whole.
        max_extra_bytes: Most extra memory that a trainer rank may take, in bytes; None for no limit.  Buckets are made
            smaller than ``bucket_bytes`` where it asks for that.  ``connect`` refuses a limit that is too low, with the
            bytes that it needs.  NCCL's own memory does not count.
        max_connections: Most connections to all engines together; None takes half of the process's limit of open files,
            at most 4,096.  The open session of an engine and requests that engines answer together go above it.
        pause: Fate of the requests that run at the moment of the switch.  ``"auto"`` is ``"retract"`` on each target
            that can, so that they go on with the new weights; on another one they end (``"abort"``), and ``connect``
            logs why.
        verify: Highest level of proof to reach; the report has the level of each target.
        digest: ``"fast"`` (64 bits, at memory speed, adds up across shards) or ``"sha256"``.
        timeout_s: Deadline of each single wait, in seconds; at most six hours.
        on_failure: ``"raise"``, or ``"quarantine"``, which updates the healthy targets and reports the rest.
        check_finite: True refuses weights that are NaN or infinite before any engine switches; False sends them; None
            checks where the pass over each bucket hides behind its digest: on CPUs, with proof.
        wire_dtype: Dtype to which a module's floating-point tensors are cast before they are sent, e.g. ``"bfloat16"``;
            None casts a tensor to the smaller float, other than float16, in which every engine keeps it, if there is
            one.  An exporter object sets its own.
        require: Lowest level of proof that each target must be able to reach; ``connect`` refuses the others.
        first_version: Number of the first update, if it is known.  ``connect`` refuses it if a target serves a higher
            one, so that a run does not train for nothing.
        allow_older: True accepts a lower version than the one an engine serves (a trainer resumed from a checkpoint).
        behaviour_tolerance: Largest difference of a log-probability, in nats, that ``verify="behaviour"`` accepts.
        min_proven_share: Smallest share of tensors, from 0 to 1, that ``verify="resident"`` has to prove on a target
            that can read weights back.  A tensor that the engine's loader computes with cannot be read back.  A target
            that would prove less is refused before anything is sent.
        rendezvous_host: Address of this process that engines can reach; None asks the routing table.
        disk_folder: Folder for ``"disk"``, under the same path for trainer and engines; None takes the folder for
            temporary files, for engines on this host.
        disk_readers: Users that may read the weights of ``"disk"``: ``"user"`` (this process's own), ``"group"`` (also
            its group, or the folder's group if the folder has the setgid bit) or ``"all"``.  An engine that runs as
            another user needs one of the last two.
        direct_by: The way of ``"direct"``: ``"shards"`` (engine ranks on this host read the weights where the trainer
            ranks keep them, see ``keep_mapped``), ``"memory"`` (they read trainer ranks' buffers), ``"messages"``
            (every trainer rank sends to every engine rank, by nccl or gloo), ``"mixed"`` (an engine rank reads the
            buffers of trainer ranks on its host and gets messages from the others), ``"relay"`` (as messages, but
            engines that keep the same pass it on), ``"rdma"`` (engine ranks read trainer ranks' buffers through NIXL,
            on any hosts) or ``"auto"`` (the first that works of ``shards``, ``memory``, ``mixed`` and ``messages``).
        keep_mapped: True if the weights stay where they are between updates, so that engine ranks may keep them mapped;
            for ``direct``.  Call ``release`` before the trainer frees or moves them.
        cell_ranks: Most engine ranks in one process group of ``broadcast``, and of ``direct`` by messages, relay or
            mixed.  Engines beyond it get groups of their own, which fail alone.  An engine is never divided: one with
            more ranks is a cell by itself.  None takes 256 for ``broadcast`` and relay, which send all weights once
            more for each group, and 64 for the others.
    """

    transport: TransportName = "auto"
    bucket_bytes: int | None = None
    max_extra_bytes: int | None = None
    max_connections: int | None = None
    pause: PauseChoice = "auto"
    verify: VerifyLevel = "resident"
    digest: DigestKind = "fast"
    timeout_s: float = 120.0
    on_failure: OnFailure = "raise"
    check_finite: bool | None = None
    wire_dtype: str | None = None
    require: VerifyLevel = "none"
    first_version: int | None = None
    allow_older: bool = False
    behaviour_tolerance: float = 0.1
    min_proven_share: float = 1.0
    rendezvous_host: str | None = None
    disk_folder: str | None = None
    disk_readers: DiskReaders = "user"
    direct_by: DirectBy = "auto"
    keep_mapped: bool = False
    cell_ranks: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("transport", TransportName),
            ("pause", PauseChoice),
            ("verify", VerifyLevel),
            ("require", VerifyLevel),
            ("digest", DigestKind),
            ("on_failure", OnFailure),
            ("disk_readers", DiskReaders),
            ("direct_by", DirectBy),
        ):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ConfigError(f"{name}={value!r}: choose one of {', '.join(get_args(allowed))}")
        if self.direct_by == "shards" and not self.keep_mapped:
            raise ConfigError(
                'direct_by="shards" lets engine ranks keep the trainer\'s weights mapped', hint="set keep_mapped=True"
            )
        levels = get_args(VerifyLevel)
        if levels.index(self.require) > levels.index(self.verify):
            raise ConfigError(
                f"require={self.require!r} is more than verify={self.verify!r}", hint=f"use verify={self.require!r}"
            )
        if self.bucket_bytes is not None and self.bucket_bytes < 4096:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes}: a bucket has at least 4096 bytes")
        if self.max_extra_bytes is not None and self.max_extra_bytes < 1:
            raise ConfigError(f"max_extra_bytes={self.max_extra_bytes}: a limit is a positive number of bytes")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError(f"max_connections={self.max_connections}: a limit is a positive number of connections")
        if self.cell_ranks is not None and self.cell_ranks < 1:
            raise ConfigError(f"cell_ranks={self.cell_ranks}: a cell has at least one engine rank")
        if self.first_version is not None:
            check_version("first_version", self.first_version)
        if not 0 <= self.min_proven_share <= 1:
            raise ConfigError(f"min_proven_share={self.min_proven_share}: a share is a number from 0 to 1")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: a deadline is a positive number of seconds")
        if self.timeout_s > MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={self.timeout_s:g}: a deadline is at most {MAX_TIMEOUT_S} seconds (six hours)",
                hint="timeout_s is the deadline of each single wait, not of the whole update",
            )
