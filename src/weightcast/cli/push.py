"""``weightcast push``: sends a checkpoint on disk to running engines."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightcast.cli import options
from weightcast.cli.render import note, parse_size, progress, say, say_json, write_beside
from weightcast.config import Target, check_version
from weightcast.errors import ConfigError, WeightcastError
from weightcast.page import write_page
from weightcast.report import count_of

if TYPE_CHECKING:
    import torch

    from weightcast.config import OnFailure, PauseChoice, TransportName, VerifyLevel
    from weightcast.report import UpdateReport
    from weightcast.watch.events import Event


def push(
    checkpoint: options.Checkpoint,
    to: Annotated[list[str], typer.Option("--to", metavar="URL", help="Engine to update; repeat for several.")],
    version: Annotated[
        int, typer.Option(metavar="N", help="Weight version of the checkpoint; higher than the one served.")
    ],
    via: Annotated[
        str,
        typer.Option(
            metavar="auto|ipc|broadcast|disk|checkpoint-engine",
            help="Transport. ipc: shared memory on one host. broadcast: a process group. disk: a checkpoint folder "
            "that the engines load. checkpoint-engine: for engines that have that project's receiver. "
            "auto: ipc to engines on this host, broadcast to the others.",
        ),
    ] = "auto",
    draft: options.Draft = None,
    engine: options.EngineName = "auto",
    api_key: options.ApiKeys = None,
    ca_file: options.CaFile = None,
    cert_file: options.CertFile = None,
    key_file: options.KeyFile = None,
    bucket_bytes: options.BucketBytes = None,
    max_extra_bytes: options.MaxExtraBytes = None,
    pause: Annotated[
        str,
        typer.Option(
            metavar="auto|abort|retract|in_place|wait",
            help="Running requests at the switch. abort: drop them. retract: recompute their KV cache. in_place: "
            "continue with the old KV cache. wait: let them finish first. auto: retract where the engine can, else "
            "abort.",
        ),
    ] = "auto",
    verify: Annotated[
        str,
        typer.Option(
            metavar="none|received|resident|behaviour",
            help="Level of proof. received: the engine digests the data that arrived. resident: it digests its live "
            "parameters. behaviour: needs a trainer's forward pass, so push cannot provide it.",
        ),
    ] = "resident",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse an engine that cannot prove the level of --verify for every tensor. One that then does not "
            "makes the exit code 1.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="S", help="Deadline of each single wait, in seconds.")] = 120.0,
    on_failure: Annotated[
        str,
        typer.Option(
            metavar="raise|quarantine",
            help="When one engine fails. raise: end the update. quarantine: continue with the healthy engines.",
        ),
    ] = "raise",
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Accept a version lower than the one served.")
    ] = False,
    dtype: options.WireDtype = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda[:N]", help="Device that buckets are filled on; auto follows the engines' devices."
        ),
    ] = "auto",
    advanced: options.Advanced = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write what every rank did, as a trace for https://ui.perfetto.dev."),
    ] = None,
    html: options.HtmlFile = None,
    as_json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Sends a safetensors checkpoint to running engines, proves that it arrived, and makes it live.

    An update is a transaction: if it fails before the switch, an engine with staging keeps serving the old version.
    The exit code is 0 only if every engine serves the new one; with --strict, if every tensor is proven too.

    \b
    weightcast push runs/step-412 --to http://10.0.3.7:8000 --version 412
    weightcast push runs/step-412 --to http://10.0.3.7:8000 --to http://10.0.3.8:8000 --version 412 --via broadcast
    weightcast push runs/step-412 --to http://10.0.3.7:8000 --version 412 --trace trace.json --html update.html
    weightcast push runs/step-412 --draft runs/head-412 --to http://10.0.3.7:8000 --version 412
    weightcast push runs/step-90 --to http://127.0.0.1:8000 --version 90 --allow-older --pause wait --json
    """
    size_bytes = None if bucket_bytes is None else parse_size(bucket_bytes)
    limit_bytes = None if max_extra_bytes is None else parse_size(max_extra_bytes)
    found = options.targets(to, api_key, ca_file=ca_file, cert_file=cert_file, key_file=key_file, engine=engine)
    check_version("--version", version)
    more = options.advanced(advanced)
    for path in (trace, html):
        if path is not None:
            options.check_writable(path)

    from weightcast.exporters.checkpoint import CheckpointExporter
    from weightcast.update.updater import WeightUpdater
    from weightcast.watch.events import StepEnded

    wire_dtype = options.torch_dtype(dtype)
    filled_on = bucket_device(device, found, via=via, timeout_s=timeout)
    with (
        CheckpointExporter(checkpoint, wire_dtype=wire_dtype, device=filled_on) as exporter,
        nullcontext()
        if draft is None
        else CheckpointExporter(draft, wire_dtype=wire_dtype, device=filled_on) as of_draft,
        progress("push") as advance,
    ):

        def shown(event: Event) -> None:
            if isinstance(event, StepEnded) and event.total_bytes:
                advance(event.sent_bytes, event.total_bytes)

        updater = WeightUpdater.connect(
            exporter,
            targets=found,
            draft=of_draft,
            transport=cast("TransportName", via),
            bucket_bytes=size_bytes,
            max_extra_bytes=limit_bytes,
            pause=cast("PauseChoice", pause),
            verify=cast("VerifyLevel", verify),
            strict=strict,
            timeout_s=timeout,
            on_failure=cast("OnFailure", on_failure),
            allow_older=allow_older,
            on_event=shown,
            advanced=more,
        )
        try:
            with _without_the_line_of_failure():
                report = updater.update(version=version)
        except WeightcastError as error:
            if error.report is not None:
                _written(error.report, trace, html)
            raise
        finally:
            updater.close()
    if as_json:
        say_json(report.to_dict())
    else:
        say(str(report))
    written = _written(report, trace, html)
    if not report.ok:
        failed = sum(row.status != "serving" or row.version_after != version for row in report.targets)
        note(f"error: {failed} of {count_of(len(report.targets), 'engine')} do not serve version {version}")
        raise typer.Exit(options.FAILURE)
    short = report.short_of(verify) if strict else ()
    if short:
        names = ", ".join(f"{row.url} ({row.proof})" for row in short)
        note(f"error: the new version serves, but its proof is below --verify {verify} on {names}")
        raise typer.Exit(options.FAILURE)
    if not written:
        note(f"error: every engine serves version {version}; only the file is missing")
        raise typer.Exit(options.UNWRITTEN)


@contextmanager
def _without_the_line_of_failure() -> Generator[None]:
    """Keeps the log line of a failed update back, because the error says the same."""
    logger = logging.getLogger("weightcast.update")

    def is_no_failure(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger.addFilter(is_no_failure)
    try:
        yield
    finally:
        logger.removeFilter(is_no_failure)


def _written(report: UpdateReport, trace: Path | None, html: Path | None) -> bool:
    """Writes the files that were asked for; says which could not be written, and returns False if there is one."""
    written = True
    if trace is not None:
        written &= write_beside(trace, report.to_perfetto, "open it at https://ui.perfetto.dev")
    if html is not None:
        written &= write_beside(html, lambda path: write_page(path, report), "open it in a browser")
    return written


def bucket_device(choice: str, engines: Sequence[Target], *, via: str, timeout_s: float) -> torch.device:
    """Chooses the device that buckets are filled on.

    Engines on the CPU, and engines on this host that map shared memory, are served from host memory or their own GPU.
    NCCL needs a GPU that no engine rank has.

    ``choice`` is ``auto`` or the name of a device.

    Raises:
        ConfigError: The device does not exist, or no GPU is free for engines that need one.
    """
    import torch

    from weightcast.comm.ipc import device_of, device_uuid, host_id
    from weightcast.update.recognise import ask
    from weightcast.wire.engine_info import EngineInfo

    if choice != "auto":
        return _named_device(choice)
    answers = [ask(engine, timeout_s) for engine in engines]
    infos = [info for info in answers if isinstance(info, EngineInfo)]  # the update reports the errors of others
    used = list(dict.fromkeys(rank.device for info in infos for rank in info.ranks if rank.device != "cpu"))
    if not used:
        return torch.device("cpu")
    if not _needs_group(via) and all(info.host_id == host_id() for info in infos):
        return next((found for found in map(device_of, used) if found is not None), torch.device("cpu"))
    free = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    free = [device for device in free if device_uuid(device) not in used]
    if not free:
        raise ConfigError(
            "these engines keep their weights on GPUs; a broadcast to them needs a GPU here that none of them uses",
            hint="run this on their host with --via ipc, or on a machine with a free GPU",
        )
    return free[0]


def _needs_group(via: str) -> bool:
    """True if trainer and engines join one group, in which no two ranks may use the same GPU."""
    from weightcast.transports.registry import TRANSPORTS

    return any(spec.name == via and spec.delivery == "group" for spec in TRANSPORTS)


def _named_device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is unknown: choose auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name} does not exist: this process sees {torch.cuda.device_count()} GPUs",
            hint="use --device cpu, or check CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", device.index or 0)
