"""The command line: registers the commands, prints errors and sets the exit code.

An error is one line, with a hint where there is a remedy.  A stack is shown for ``--traceback`` and for unexpected
exceptions.  ``options.py`` has the exit codes.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from weightcast.cli import bench, catch_up, demo, doctor, options, plan, push, serve, status, trace, verify
from weightcast.cli.options import FAILURE, INTERRUPTED, JSON_KEY, STACK_KEY, USAGE, code_of
from weightcast.cli.render import note, say, show_error
from weightcast.errors import ConfigError, WeightcastError
from weightcast.version import __version__

# Some versions of typer contain click, others depend on it; the base of its usage errors is public in neither.
_ClickError: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


class _Group(TyperGroup):
    """Prints errors as one line and a hint."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> NoReturn:
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:
            # The reader closed our output. Without this the interpreter complains when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(FAILURE)
        except _ClickError as error:
            # Whether it is an option of the command is not known when another one is missing.
            self._show_usage_error(error, as_json="--json" in (extra.get("args") or sys.argv[1:]))
            sys.exit(USAGE)
        if code == INTERRUPTED:
            note("interrupted")
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (WeightcastError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            show_error(error, as_json=ctx.meta.get(JSON_KEY, False), with_stack=ctx.meta.get(STACK_KEY, False))
            raise typer.Exit(code_of(error)) from error

    def _show_usage_error(self, error: Any, *, as_json: bool) -> None:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "weightcast"
        text = error.format_message().rstrip(".")
        hint = f"see `{path} --help`"
        hint = options.instead_of(path.rpartition(" ")[2], getattr(error, "option_name", "")) or hint
        told = ConfigError(f"{text[:1].lower()}{text[1:]}", hint=hint)
        show_error(told, as_json=as_json, with_stack=False)


class _OfEngines(TyperCommand):
    """A command with the option ``--engine``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options.name_engine_kinds(self.params)
        super().format_help(ctx, formatter)


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
    """Moves freshly trained weights into running LLM rollout engines and proves that they are there.

    \b
    Try it on this machine:            weightcast demo
    Start an engine:                   weightcast serve ./model --port 8000
    Send new weights to it:            weightcast push ./step-7 --to http://127.0.0.1:8000 --version 7
    Prove that it has them:            weightcast verify ./step-7 --at http://127.0.0.1:8000

    Results go to stdout, logs and progress to stderr. With --json the result is one JSON document. The exit code is
    0 only on success: 1 is a failure, 2 wrong usage, 3 says that weights differ (verify).
    """
    if context.invoked_subcommand is None:
        note(context.get_help())
        raise typer.Exit(USAGE)


app.command(short_help="Train a small model and update two engines after every step")(demo.demo)
app.command(short_help="Start the reference engine")(serve.serve)
app.command(cls=_OfEngines, short_help="Send a checkpoint to running engines")(push.push)
app.command(short_help="Copy the weights of one engine into another")(catch_up.catch_up)
app.command(short_help="Compare an engine's weights with a checkpoint")(verify.verify)
app.command(cls=_OfEngines, short_help="Estimate the buckets, memory and time of an update")(plan.plan)
app.command(cls=_OfEngines, short_help="Check whether engines can be updated from here, and say what to fix")(
    doctor.doctor
)
app.command(cls=_OfEngines, short_help="Show the state and weight version of each engine")(status.status)
app.command(short_help="Show what every rank did in saved updates: a trace, a page or a table")(trace.trace)
app.add_typer(bench.bench, name="bench", short_help="Measure updates")


def run() -> int:
    """Runs the command of ``sys.argv`` and returns the exit code."""
    try:
        app(prog_name="weightcast")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    return 0
