"""``weightcast bench``: measures updates, and stresses them with faults."""

from __future__ import annotations

import typer

from weightcast.cli import bench_soak, bench_updates

_HELP = "Measures updates on this machine, or stresses them with random faults."

bench = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help=_HELP)


@bench.callback(help=_HELP)
def _bench() -> None: ...


bench.command(name="soak", short_help="Repeat updates under load with random faults and count the errors")(
    bench_soak.soak
)
bench.command(name="updates", short_help="Time updates and compare them with the limits of this machine")(
    bench_updates.updates
)
