"""The command line's frame: which commands there are, and what an error looks like.

An error is one line and, where there is a remedy, a hint; a stack is shown on request only, and for what we did not
foresee.  Exit codes: 0 success, 1 failure, 2 wrong usage; ``verify`` follows ``cmp``: 1 is an answer, 2 is trouble.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from weightcast import __version__
from weightcast.cli import bench, demo_command, doctor, plan, push, serve, status, verify
from weightcast.cli.options import JSON_KEY, STACK_KEY
from weightcast.cli.render import note, say, show_error
from weightcast.errors import WeightcastError

_USAGE = 2
_INTERRUPTED = 130
_FAILURE = {"verify": 2}

# typer brings click along, or depends on it, by version; the base of its usage errors is public in neither form.
_ClickError: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


class _Group(TyperGroup):
    """Shows errors the house's way."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> NoReturn:
        """Parse, run, exit."""
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = _INTERRUPTED
        except BrokenPipeError:
            # Whoever read our output has gone; keep the interpreter from complaining when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except _ClickError as error:
            self._show_usage_error(error)
            sys.exit(_USAGE)
        if code == _INTERRUPTED:
            note("interrupted")
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it raises on purpose becomes a line."""
        try:
            return super().invoke(ctx)
        except (WeightcastError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            show_error(error, as_json=ctx.meta.get(JSON_KEY, False), with_stack=ctx.meta.get(STACK_KEY, False))
            raise typer.Exit(_FAILURE.get(ctx.invoked_subcommand or "", 1)) from error

    def _show_usage_error(self, error: Any) -> None:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "weightcast"
        text = error.format_message().rstrip(".")
        note(f"error: {text[:1].lower()}{text[1:]}")
        note(f"\nhint: see `{path} --help`")


app = typer.Typer(
    name="weightcast",
    cls=_Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(value: bool) -> None:
    if value:
        say(f"weightcast {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Move freshly trained weights into running LLM rollout engines, verified.

    \b
    Try it on this machine:            weightcast demo
    Start an engine:                   weightcast serve ./model --port 8000
    Send it other weights:             weightcast push ./step-7 --to http://127.0.0.1:8000 --version 7
    Prove that it has them:            weightcast verify ./step-7 --at http://127.0.0.1:8000

    Data goes to stdout, logs and progress to stderr; --json makes the data one JSON document. The exit code is 0 only
    on success.
    """
    if context.invoked_subcommand is None:
        note(context.get_help())
        raise typer.Exit(_USAGE)


app.command(short_help="Train a small model while two engines follow, on this machine")(demo_command.demo)
app.command(short_help="Start the reference engine")(serve.serve)
app.command(short_help="Send a checkpoint to running engines")(push.push)
app.command(short_help="Do an engine's weights equal a checkpoint?")(verify.verify)
app.command(short_help="What would an update take?")(plan.plan)
app.command(short_help="Can these engines be updated from here? What to fix")(doctor.doctor)
app.command(short_help="What does each engine serve?")(status.status)
app.add_typer(bench.bench, name="bench", short_help="Measure, and try to break")


def run() -> int:
    """Run on ``sys.argv``.

    Returns:
        The exit code.
    """
    try:
        app(prog_name="weightcast")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    return 0
