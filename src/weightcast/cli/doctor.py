"""``weightcast doctor``: checks whether this process can update engines, and says what to fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli import options
from weightcast.cli.render import mark, parse_size, say, say_json
from weightcast.report import one_line

if TYPE_CHECKING:
    from weightcast.update.diagnose import Check, Diagnosis


def doctor(
    urls: options.Urls,
    engine: options.EngineName = "auto",
    api_key: options.ApiKeys = None,
    ca_file: options.CaFile = None,
    cert_file: options.CertFile = None,
    key_file: options.KeyFile = None,
    bucket_bytes: options.BucketBytes = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Address of this machine that engines can reach; by default from the routing table."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Deadline of each single wait, in seconds.")] = 15.0,
    as_json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Checks whether this machine can update these engines, with which transport, and says what to fix.

    The command asks each engine for its description. An engine on the CPU also joins a small process group with this
    process. No weights are changed. The exit code is 1 if a check fails. Reach is judged from this machine: run the
    command on each host that has trainer ranks.

    \b
    weightcast doctor http://10.0.3.7:8000
    weightcast doctor http://10.0.3.7:8000 http://10.0.3.8:8000 --rendezvous 10.0.1.2 --json
    """
    from weightcast.update.diagnose import examine, extensions

    size_bytes = None if bucket_bytes is None else parse_size(bucket_bytes)
    found = options.targets(urls, api_key, ca_file=ca_file, cert_file=cert_file, key_file=key_file, engine=engine)
    results = [examine(target, bucket_bytes=size_bytes, host=rendezvous, timeout_s=timeout) for target in found]
    ok = all(result.ok for result in results)
    others = extensions()
    if as_json:
        say_json({"ok": ok, "engines": results, "extensions": others})
    else:
        if others:
            say("other packages")
            _show_checks(others)
            say()
        for index, result in enumerate(results):
            if index:
                say()
            _show(result)
    if not ok:
        raise typer.Exit(options.FAILURE)


def _show(result: Diagnosis) -> None:
    say(result.url)
    if result.engine:
        say(result.engine)
    _show_checks(result.checks)


def _show_checks(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        say(f"  {check.name.ljust(width)}  {check.text}", lead=f"  {mark(check.level)}")
    for check in checks:
        if check.hint:
            say(f"\nhint: {check.name}: {one_line(check.hint)}")
