"""``weightcast status``: what each engine is and serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightcast.cli import options
from weightcast.cli.render import note, say, say_json, table
from weightcast.config import Target
from weightcast.errors import WeightcastError, error_words
from weightcast.report import format_bytes, one_line

if TYPE_CHECKING:
    from weightcast.wire.engine_info import EngineInfo

_HEADERS = ("url", "engine", "model", "state", "version", "digest", "parallel", "staging", "updated by")


def status(
    urls: options.Urls,
    engine: options.EngineName = "auto",
    api_key: options.ApiKeys = None,
    ca_file: options.CaFile = None,
    cert_file: options.CertFile = None,
    key_file: options.KeyFile = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait for an answer, in seconds.")] = 10.0,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="Show a live table until Ctrl-C; where stdout is no terminal, a line for each change. With --json, "
            "each line is a JSON document.",
        ),
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="S", help="For --watch: pause between two looks, in seconds.", min=0.05)
    ] = 1.0,
    as_json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Shows each engine's kind, model, weight version, digest and state (serving, paused, updating, quarantined).

    The exit code is 0 if every engine answers and serves, also while an update of it is under way, else 1. With
    --watch it is 0 after Ctrl-C.

    \b
    weightcast status http://10.0.3.7:8000 http://10.0.3.8:8000
    weightcast status http://10.0.3.7:8000 --json | jq .engines[0].version
    weightcast status http://10.0.3.7:8000 http://10.0.3.8:8000 --watch
    """
    found = options.targets(urls, api_key, ca_file=ca_file, cert_file=cert_file, key_file=key_file, engine=engine)
    if watch:
        from weightcast.cli.status_watch import watch as watch_engines

        watch_engines(found, interval_s=interval, timeout_s=timeout, as_json=as_json)
        return
    from weightcast.update.recognise import ask

    with ThreadPoolExecutor(max_workers=min(16, len(found))) as pool:
        answers = list(pool.map(ask, found, [timeout] * len(found)))
    ok = all(not isinstance(answer, WeightcastError) and _serves(answer) for answer in answers)
    if as_json:
        say_json(
            {"ok": ok, "engines": [_fields(target, answer) for target, answer in zip(found, answers, strict=True)]}
        )
    else:
        say(table(_HEADERS, [_row(target, answer) for target, answer in zip(found, answers, strict=True)]))
        for target, answer in zip(found, answers, strict=True):
            if isinstance(answer, WeightcastError):
                note(f"error: {one_line(error_words(answer))}")
            elif answer.message:
                note(f"{target.url}: {one_line(answer.message)}")
    if not ok:
        broken = any(isinstance(answer, WeightcastError) or answer.state == "quarantined" for answer in answers)
        if broken and not as_json:
            note("\nhint: `weightcast doctor URL` says what to fix")
        raise typer.Exit(options.FAILURE)


def _serves(info: EngineInfo) -> bool:
    """True if it generates: an engine that stages an update serves the version before it."""
    return info.state in ("serving", "updating") and not info.paused


def _state(info: EngineInfo) -> str:
    return "paused" if info.paused and info.state == "serving" else info.state


def _row(target: Target, answer: EngineInfo | WeightcastError) -> tuple[str, ...]:
    if isinstance(answer, WeightcastError):
        return (target.url, "-", "-", "no answer", "-", "-", "-", "-", "-")
    version = "?" if answer.version is None else str(answer.version)
    return (
        target.url,
        answer.engine,
        answer.model,
        _state(answer),
        version,
        answer.digest or "not proven",
        answer.sizes,
        f"{answer.staging} {format_bytes(answer.staging_bytes)}" if answer.staging_bytes else answer.staging,
        answer.session_owner or "-",
    )


def _fields(target: Target, answer: EngineInfo | WeightcastError) -> dict[str, Any]:
    if isinstance(answer, WeightcastError):
        error = {"type": type(answer).__name__, "message": one_line(str(answer)), "hint": answer.hint}
        return {"url": target.url, "reachable": False, "error": error}
    return {
        "url": target.url,
        "reachable": True,
        "engine": answer.engine,
        "model": answer.model,
        "state": _state(answer),
        "serves": _serves(answer),
        "version": answer.version,
        "digest": answer.digest,
        "tp": answer.tp_size,
        "dp": answer.dp_size,
        "ep": answer.ep_size,
        "devices": answer.devices,
        "staging": answer.staging,
        "staging_bytes": answer.staging_bytes,
        "transports": answer.transports,
        "session_owner": answer.session_owner,
        "message": answer.message,
    }
