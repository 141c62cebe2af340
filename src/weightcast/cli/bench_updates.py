"""``weightcast bench updates``: times updates and compares them with the limits of this machine."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from weightcast.cli.options import FAILURE, UNWRITTEN, HtmlFile, Json, Traceback, check_writable
from weightcast.cli.render import note, parse_size, say, say_json, table, write_beside
from weightcast.errors import ConfigError
from weightcast.report import count_of, format_bytes

if TYPE_CHECKING:
    from weightcast.lab.bench.methods import Layout


_COLUMNS = """\
median    time until every engine can use the new weights
fastest   the shortest of these times
GB/s      bytes of one model divided by the median, in 10^9 bytes per second
of limit  the limit's median divided by this one; the limit moves the same bytes by the same kind of copy, as above
stall     time in which an engine could not generate"""


def updates(
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Size of the synthetic model.")] = "256MiB",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Use the shapes of a known model instead, such as qwen3-8b.")
    ] = "",
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of trainer processes, and of engines.", min=1)] = 1,
    placement: Annotated[
        str,
        typer.Option(metavar="colocated|disaggregated", help="By default both, if there are enough devices."),
    ] = "",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="By default cuda if there is a GPU.")] = "",
    bucket_bytes: Annotated[
        list[str] | None,
        typer.Option("--bucket-bytes", metavar="SIZE", help="Size of one bucket; repeat to compare several sizes."),
    ] = None,
    turns: Annotated[int, typer.Option(metavar="N", help="Timed updates of each method.", min=1)] = 10,
    html: HtmlFile = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Times updates with synthetic weights and compares them with plain copies of the same bytes.

    It measures colocated (ipc) and disaggregated (broadcast) updates, with and without proof. Trainers and engines are
    separate processes, and each engine keeps the whole model. Before each timed update the engine's weights are
    overwritten; afterwards they are compared bit for bit.

    \b
    weightcast bench updates
    weightcast bench updates --size 1GiB --ranks 2 --json
    weightcast bench updates --html bench.html
    weightcast bench updates --model qwen3-8b --ranks 4 --device cuda
    """
    try:
        import torch

        from weightcast.lab.bench.case import TurnLimits, run_case
        from weightcast.lab.bench.contenders import ours
        from weightcast.lab.bench.page import write_page
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`bench updates` needs {error.name}, which is not installed", hint='pip install "weightcast[serve]"'
        ) from error
    if html is not None:
        check_writable(html)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is unknown: choose cpu or cuda")
    if placement not in ("", "colocated", "disaggregated"):
        raise ConfigError(f"--placement {placement} is unknown: choose colocated or disaggregated")
    name = model or f"dense-{parse_size(size)}"
    sizes = tuple(parse_size(text) for text in bucket_bytes or (("512MiB", "1GiB") if device == "cuda" else ("64MiB",)))
    results: list[dict[str, Any]] = []
    for layout in _layouts(name, ranks, device, torch.cuda.device_count()):
        if placement not in ("", layout.placement):
            continue
        who = f"{count_of(layout.trainers, 'trainer')}, {count_of(layout.engines, 'engine')}"
        note(f"{layout.placement}: {who}, {layout.model}, {count_of(turns, 'timed update')} of each method")
        results.append(run_case(layout, ours(layout, bucket_bytes=sizes), TurnLimits(turns=turns), say=note))
    if as_json:
        say_json(results)
    else:
        say("\n\n".join([*(_shown(result) for result in results), _COLUMNS]))
    written = True
    if html is not None and results:
        page = partial(write_page, results, command=shlex.join(sys.argv))
        written = write_beside(html, page, "open it in a browser")
    if not all(result["ok"] for result in results):
        raise typer.Exit(FAILURE)
    if not written:
        raise typer.Exit(UNWRITTEN)


def _layouts(model: str, ranks: int, device: str, gpus: int) -> list[Layout]:
    from weightcast.lab.bench.methods import Layout

    kind = cast(Literal["cpu", "cuda"], device)
    colocated = Layout(model=model, placement="colocated", trainers=ranks, engines=ranks, device=kind)
    apart = Layout(model=model, placement="disaggregated", trainers=ranks, engines=ranks, device=kind)
    if device == "cpu":
        return [colocated, apart]
    if gpus < ranks:
        raise ConfigError(
            f"--ranks {ranks} needs {ranks} GPUs, and this process sees {gpus}", hint=f"use --ranks {max(gpus, 1)}"
        )
    if gpus < 2 * ranks:
        note(f"skipped: the disaggregated placement needs {2 * ranks} GPUs, and this process sees {gpus}")
        return [colocated]
    return [colocated, apart]


def _shown(result: dict[str, Any]) -> str:
    case, floor = result["case"], result["floor_s"]
    head = (
        f"{case['placement']}, {count_of(case['trainers'], 'trainer')}, {count_of(case['engines'], 'engine')}, "
        f"{case['model']}: {format_bytes(case['bytes'])} in {count_of(case['tensors'], 'tensor')}"
    )
    rows = [[f"limit: {name}", *_cells(found, case["bytes"], floor)] for name, found in result["limits"].items()]
    rows += [[row["name"], *_cells(row, case["bytes"], floor)] for row in result["methods"]]
    lines = [head, table(("", "median", "fastest", "GB/s", "of limit", "stall"), rows)]
    lines += [f"failed: {name}: {why}" for name, why in result["failed"].items()]
    return "\n".join(lines)


def _cells(found: dict[str, Any], size_bytes: int, floor: float | None) -> list[str]:
    median = found["usable_s"]["median"]
    return [
        f"{median:.4f} s",
        f"{found['usable_s']['min']:.4f} s",
        f"{size_bytes / median / 1e9:.2f}",
        f"{floor / median:.0%}" if floor else "",
        f"{found['phases']['stall_s']:.4f} s" if "stall_s" in found["phases"] else "",
    ]
