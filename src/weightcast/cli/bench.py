"""``weightcast bench``: what this machine and these engines can do and bear."""

from __future__ import annotations

import typer

from weightcast.cli import measure, soak

bench = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure, and try to break.")


@bench.callback()
def _bench() -> None:
    """Measure, and try to break."""


bench.command(name="soak", short_help="Updates under load with faults at random; counts what goes wrong")(soak.soak)
bench.command(name="updates", short_help="Measured updates beside measured limits of this machine")(measure.updates)
