"""``weightcast push``: a checkpoint on disk into running engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli.options import (
    ApiKeys,
    BucketBytes,
    CaFile,
    CertFile,
    Checkpoint,
    EngineKind,
    Json,
    KeyFile,
    Traceback,
    WireDtype,
    targets,
    torch_dtype,
)
from weightcast.cli.render import note, parse_size, progress, say, say_json
from weightcast.config import Target
from weightcast.errors import ConfigError, WeightcastError

if TYPE_CHECKING:
    import torch

    from weightcast.wire.messages import EngineInfo


def push(
    checkpoint: Checkpoint,
    to: Annotated[list[str], typer.Option("--to", metavar="URL", help="Engine; repeat for several.")],
    version: Annotated[int, typer.Option(metavar="N", help="Number of the new version; counts up.")],
    via: Annotated[
        str,
        typer.Option(
            metavar="auto|ipc|broadcast|disk|checkpoint-engine",
            help="ipc: shared memory on one host; broadcast: a process group; disk: a checkpoint folder, for engines "
            "that load one while they run; checkpoint-engine: that project's wire, for engines that have its receiver; "
            "auto: ipc where every engine is on this host, else broadcast.",
        ),
    ] = "auto",
    engine: EngineKind = "auto",
    api_key: ApiKeys = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    bucket_bytes: BucketBytes = "512MiB",
    pause: Annotated[
        str,
        typer.Option(
            metavar="abort|retract|in_place|wait",
            help="Requests running at the switch: drop them, recompute them, let them go on with their cache, or let "
            "them finish first.",
        ),
    ] = "abort",
    verify: Annotated[
        str,
        typer.Option(
            metavar="none|received|resident|behaviour",
            help="Highest level of proof wanted; behaviour takes a trainer's forward pass, which a checkpoint has not.",
        ),
    ] = "resident",
    digest: Annotated[str, typer.Option(metavar="fast|sha256", help="Digest of what is sent.")] = "fast",
    timeout: Annotated[float, typer.Option(metavar="S", help="Deadline of each single wait, in seconds.")] = 120.0,
    on_failure: Annotated[
        str,
        typer.Option(
            metavar="raise|quarantine", help="One engine fails: end the update, or go on with the healthy ones."
        ),
    ] = "raise",
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Accept a version lower than the one served.")
    ] = False,
    dtype: WireDtype = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda[:N]", help="Where the buckets are filled; auto goes by where the engines are."
        ),
    ] = "auto",
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Address of this machine that engines can reach; for broadcast."),
    ] = None,
    disk_folder: Annotated[
        str | None,
        typer.Option(
            "--disk-folder", metavar="DIR", help="For --via disk: a folder that the engines see under the same path."
        ),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Send a safetensors checkpoint to running engines, prove that it arrived, and make it live.

    An update is a transaction: if it fails before the switch, an engine goes on serving the old version. The exit code
    is 0 only if every engine serves the new one.

    \b
    weightcast push runs/step-412 --to http://10.0.3.7:8000 --version 412
    weightcast push runs/step-412 --to http://10.0.3.7:8000 --to http://10.0.3.8:8000 --version 412 --via broadcast
    weightcast push runs/step-90 --to http://127.0.0.1:8000 --version 90 --allow-older --pause wait --json
    """
    size_bytes = parse_size(bucket_bytes)
    found = targets(to, api_key, ca_file=ca_file, cert_file=cert_file, key_file=key_file, engine=engine)
    if version < 0:
        raise ConfigError(f"version {version} is negative")

    from weightcast.exporters.checkpoint import CheckpointExporter
    from weightcast.updater import WeightUpdater

    wire_dtype = torch_dtype(dtype)
    with (
        CheckpointExporter(
            checkpoint, wire_dtype=wire_dtype, device=bucket_device(device, found, via=via, timeout_s=timeout)
        ) as exporter,
        progress("push") as advance,
    ):
        updater = WeightUpdater.connect(
            exporter,
            targets=found,
            transport=via,
            bucket_bytes=size_bytes,
            pause=pause,
            verify=verify,
            digest=digest,
            timeout_s=timeout,
            on_failure=on_failure,
            allow_older=allow_older,
            rendezvous_host=rendezvous,
            disk_folder=disk_folder,
            progress=advance,
        )
        try:
            report = updater.update(version=version)
        finally:
            updater.close()
    if as_json:
        say_json(report)
    else:
        say(str(report))
    if not report.ok:
        failed = sum(row.status != "serving" or row.version_after != version for row in report.targets)
        note(f"error: {failed} of {len(report.targets)} engines do not serve version {version}")
        raise typer.Exit(1)


def bucket_device(choice: str, engines: Sequence[Target], *, via: str, timeout_s: float) -> torch.device:
    """Where buckets should be for these engines.

    Engines on the CPU, and engines on this host that map shared memory, are served from host memory or their own GPU.
    NCCL needs a GPU that no engine rank has.

    Args:
        choice: ``auto``, or a device by name.
        engines: Who will receive.
        via: The transport asked for.
        timeout_s: Longest wait for an engine's answer.

    Raises:
        ConfigError: The device does not exist, or no GPU is free for engines that need one.
    """
    import torch

    from weightcast.comm.ipc import device_of, device_uuid, host_id

    if choice != "auto":
        return _named_device(choice)
    infos = [info for info in (_info(engine, timeout_s) for engine in engines) if info is not None]
    used = list(dict.fromkeys(rank.device for info in infos for rank in info.ranks if rank.device != "cpu"))
    if not used:
        return torch.device("cpu")
    if via != "broadcast" and all(info.host_id == host_id() for info in infos):
        return next((found for found in map(device_of, used) if found is not None), torch.device("cpu"))
    free = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    free = [device for device in free if device_uuid(device) not in used]
    if not free:
        raise ConfigError(
            "these engines keep their weights on GPUs; a broadcast to them needs a GPU here that none of them uses",
            hint="run this on their host with --via ipc, or where there is a GPU to spare",
        )
    return free[0]


def _named_device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: choose auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: this process sees {torch.cuda.device_count()} GPUs",
            hint="use --device cpu, or check CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", device.index or 0)


def _info(engine: Target, timeout_s: float) -> EngineInfo | None:
    """What the engine says of itself; None if it says nothing, which the update will find out by itself."""
    from weightcast.comm.http import Client
    from weightcast.kinds import recognise

    client = Client(engine, timeout_s=timeout_s)
    try:
        return recognise(client)
    except WeightcastError:
        return None
    finally:
        client.close()
