"""``weightcast bench``: measures updates."""

from __future__ import annotations

import typer

from weightcast.cli import bench_updates
from weightcast.errors import ConfigError

_HELP = "Measures updates on this machine."

bench = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help=_HELP)


@bench.callback(help=_HELP)
def _bench() -> None: ...


@bench.command(name="soak", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _soak() -> None:
    raise ConfigError("there is no `weightcast bench soak`", hint="in a checkout of weightcast: make soak")


bench.command(name="updates", short_help="Time updates and compare them with the limits of this machine")(
    bench_updates.updates
)
