"""What a caller decides: which engines, which way, how much memory, how long to wait.

Plain data, validated once.  Nothing here reads an environment variable or opens a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

from weightcast.errors import ConfigError

TransportName = Literal["auto", "ipc", "broadcast", "disk", "checkpoint-engine"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]
VerifyLevel = Literal["none", "received", "resident", "behaviour"]
OnFailure = Literal["raise", "quarantine"]
DigestKind = Literal["fast", "sha256"]


@dataclass(frozen=True, slots=True)
class Target:
    """One rollout engine behind one URL.

    Attributes:
        url: ``http://host:port`` or ``https://host:port`` of the engine's server, with or without a trailing slash.
        api_key: Sent as ``Authorization: Bearer``; never printed.
        engine: What it is: ``"auto"`` asks it; ``"native"`` (our receiver), ``"sglang"``, ``"vllm"`` or ``"lmdeploy"``
            speaks to it as to a stock engine of that kind.
        devices: UUIDs of the GPUs of its ranks, in order, for ``ipc`` to engines that do not tell; empty if they do,
            or if its ranks sit where the trainer's ranks do, in the same order.
        ca_file: For https: PEM file of the authorities that may vouch for the engine; None takes the system's.
        cert_file: For https: PEM file with this process's own certificate, for an engine that asks for one.
        key_file: Its private key, where it is not in ``cert_file``.
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
            raise ConfigError(f"target {self.url!r}: port 0 is no port", hint="use the port that the engine printed")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"target {parts.scheme}://{parts.hostname}: only scheme, host, port and path belong into its URL",
                hint="pass a key as api_key, which is never printed",
            )
        if self.api_key is not None and not (self.api_key and all("!" <= letter <= "~" for letter in self.api_key)):
            raise ConfigError(
                f"target {self.url}: its key is empty or has characters that no header can carry",
                hint="use printable ASCII without spaces; does a line break stick to it?",
            )
        if parts.scheme != "https" and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError(f"target {self.url}: certificates are for https", hint="write https://host:port")
        if self.key_file and not self.cert_file:
            raise ConfigError(f"target {self.url}: a private key without its certificate", hint="pass cert_file too")
        object.__setattr__(self, "url", self.url.rstrip("/"))

    @property
    def host(self) -> str:
        """The host name or address in the URL."""
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """How an update is to be done; the keyword arguments of ``WeightUpdater.connect``.

    Attributes:
        transport: ``"ipc"`` (same host: CUDA IPC or shared memory), ``"broadcast"`` (a process group
            across both worlds: nccl or gloo), ``"disk"`` (a checkpoint folder, for engines that load one while they
            run), ``"checkpoint-engine"`` (that project's wire, same host, for engines that have its receiver) or
            ``"auto"`` (ipc where every target is on this host, else broadcast).
        bucket_bytes: Size of one bucket.  A trainer rank uses at most two of them, whatever the model.
        pause: What happens to requests that are running at the moment of the switch.
        verify: Highest level of proof wanted; the report says which was reached on each target.
        digest: ``"fast"`` (64 bits, at memory speed, adds up across shards) or ``"sha256"``.
        timeout_s: Deadline of each single wait, in seconds.
        on_failure: ``"raise"``, or ``"quarantine"``: go on with the healthy targets and report the rest.
        wire_dtype: Cast a module's floating-point tensors to this before they are sent, e.g. ``"bfloat16"``; None keeps
            them.  An exporter that is passed has its own.
        allow_older: Accept a version lower than the one an engine serves (a trainer resumed from a checkpoint).
        behaviour_tolerance: Largest difference of a log-probability, in nats, that ``verify="behaviour"`` accepts.
        rendezvous_host: Address of this process that engines can reach; None asks the routing table.
        disk_folder: For ``"disk"``: where, under the same path for trainer and engines; None takes the folder for
            temporary files, for engines on this host.
    """

    transport: TransportName = "auto"
    bucket_bytes: int = 512 << 20
    pause: PauseMode = "abort"
    verify: VerifyLevel = "resident"
    digest: DigestKind = "fast"
    timeout_s: float = 120.0
    on_failure: OnFailure = "raise"
    wire_dtype: str | None = None
    allow_older: bool = False
    behaviour_tolerance: float = 0.1
    rendezvous_host: str | None = None
    disk_folder: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("transport", TransportName),
            ("pause", PauseMode),
            ("verify", VerifyLevel),
            ("digest", DigestKind),
            ("on_failure", OnFailure),
        ):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ConfigError(f"{name}={value!r}: choose one of {', '.join(get_args(allowed))}")
        if self.bucket_bytes < 4096:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes}: a bucket has at least 4096 bytes")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: a deadline is a positive number of seconds")
