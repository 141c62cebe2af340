"""Options that several commands share, and the values that they become."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args, get_type_hints

import typer

from weightcast.config import ENGINE_KINDS, GONE, AdvancedOptions, Target, check_names
from weightcast.errors import ConfigError
from weightcast.runtime.entry_points import ENGINES, names_in

SUCCESS: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
DIFFERS: Final = 3
UNWRITTEN: Final = 4
INTERRUPTED: Final = 130

MEANING: Final = {
    SUCCESS: "what was asked is done",
    FAILURE: "it failed: an engine, the network, a disk or a check",
    USAGE: "wrong usage: what was asked cannot work as asked, and nothing has moved",
    DIFFERS: "the comparison was made, and the weights differ (`verify`)",
    UNWRITTEN: "what was asked is done and said on stdout, but a file beside the result could not be written",
    INTERRUPTED: "interrupted by Ctrl-C",
}


if TYPE_CHECKING:
    import torch

# Files that a command writes beside its result.
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a self-contained page with plots."),
]
JSON_KEY = "weightcast.as_json"
STACK_KEY = "weightcast.traceback"


def name_engine_kinds(parameters: Sequence[Any]) -> None:
    """Adds other packages' kinds of engine to the help of ``--engine``.  Imports none of them."""
    for parameter in parameters:
        if parameter.name == "engine":
            parameter.metavar = "|".join((parameter.metavar, *names_in(ENGINES)))


def _remember(context: typer.Context, option: typer.CallbackParam, value: bool) -> bool:
    context.meta[f"weightcast.{option.name}"] = value
    return value


# Eager, so that they are known when another option is rejected.
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout.", callback=_remember, is_eager=True),
]
Traceback = Annotated[
    bool,
    typer.Option("--traceback", help="Show the Python stack of an error.", callback=_remember, is_eager=True),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="WEIGHTCAST_API_KEY",
        help="API key: one for all engines, or one for each URL in the same order. The environment variable separates "
        "keys by spaces.",
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        envvar="WEIGHTCAST_CA_FILE",
        help="For https: certificate authorities (PEM) to trust; the system's by default.",
    ),
]
CertFile = Annotated[
    str | None,
    typer.Option(
        "--cert-file",
        metavar="FILE",
        envvar="WEIGHTCAST_CERT_FILE",
        help="For https: client certificate (PEM), for engines that ask for one.",
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar="WEIGHTCAST_KEY_FILE",
        help="For https: private key of the client certificate, if it is in another file.",
    ),
]
Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Engine as http://host:port.", show_default=False)]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(("auto", *ENGINE_KINDS)),
        help="Kind of the engines; auto asks each one. Name a kind to use that engine's own weight routes.",
    ),
]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A .safetensors file, or a folder with one or with model.safetensors.index.json.",
        show_default=False,
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="Checkpoint of a draft model, or of an EAGLE head, that the engines keep up to date with the model.",
    ),
]
BucketBytes = Annotated[
    str | None,
    typer.Option(
        "--bucket-bytes",
        metavar="SIZE",
        help="Size of one bucket, such as 512MiB, 1.5GiB, 64MB. By default 512MiB; by ipc on GPUs up to 2GiB, as the "
        "model and the free memory allow.",
        show_default=False,
    ),
]
MaxExtraBytes = Annotated[
    str | None,
    typer.Option(
        "--max-extra-bytes",
        metavar="SIZE",
        help="Extra memory that this process may take, such as 1GiB; makes buckets smaller where it must.",
        show_default=False,
    ),
]
Advanced = Annotated[
    list[str] | None,
    typer.Option(
        "--advanced",
        metavar="NAME=VALUE",
        help="An option that few runs need; repeat for several. cell_ranks: most engine ranks in one process group of "
        "a broadcast. rendezvous_host: address of this machine that engines can reach. disk_folder: folder for --via "
        "disk that the engines see under the same path. disk_readers: accounts that may read its files, user, group or "
        "all. check_finite: true refuses weights that are NaN or infinite, false sends them.",
        show_default=False,
    ),
]
WireDtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Cast floating-point tensors to this dtype first, such as bfloat16."),
]


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype that ``--dtype`` names, or None; ``ConfigError`` for one that weights cannot be cast to."""
    from weightcast.wire.layout import DTYPES

    if name is None:
        return None
    floats = [known for known, dtype in DTYPES.items() if dtype.is_floating_point and dtype.itemsize >= 2]
    if name not in floats:
        raise ConfigError(f"--dtype {name} is unknown: choose one of {', '.join(floats)}")
    return DTYPES[name]


def advanced(given: Sequence[str] | None) -> AdvancedOptions:
    """Returns the options of ``--advanced NAME=VALUE``; raises ``ConfigError`` for one that is unknown or malformed."""
    types = get_type_hints(AdvancedOptions)
    found: dict[str, object] = {}
    for one in given or ():
        name, equals, text = one.partition("=")
        if not equals:
            raise ConfigError(f"--advanced {one} has no value", hint="write --advanced NAME=VALUE")
        check_names([name], types, of="--advanced")
        found[name] = _value(name, text, [*get_args(types[name]), types[name]])
    return cast("AdvancedOptions", found)


def instead_of(command: str, flag: str) -> str:
    """Words that say how to write a flag of a command that is gone; empty for others."""
    if command == "demo" and flag in ("--engine", "--engine-python"):
        return "leave it out: the demo runs the reference engine; examples/rl_disaggregated.py --engine vllm has vLLM"
    if command != "push":
        return ""
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    name = "rendezvous_host" if name == "rendezvous" else name
    if name in AdvancedOptions.__annotations__:
        value = "false" if flag.startswith("--no-") else "true" if name == "check_finite" else "VALUE"
        return f"write --advanced {name}={value}"
    return GONE.get(name, "")


def _value(name: str, text: str, kinds: Sequence[object]) -> object:
    """The value that a text means for an option of one of these types."""
    try:
        if bool in kinds:
            return {"true": True, "false": False}[text.lower()]
        return int(text) if int in kinds else float(text) if float in kinds else text
    except (KeyError, ValueError):
        what = "true or false" if bool in kinds else "a number"
        raise ConfigError(f"--advanced {name}={text}: write {what}") from None


def targets(
    urls: Sequence[str],
    keys: Sequence[str] | None,
    *,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    engine: str = "auto",
) -> list[Target]:
    """Returns a target for each URL, with its key; https targets also get the certificates.

    Raises:
        ConfigError: A URL is malformed or named twice, or the number of keys is neither one nor one for each URL.
    """
    keys = list(keys or ())
    if len(keys) not in (0, 1, len(urls)):
        raise ConfigError(
            f"{len(keys)} API keys were given for {len(urls)} engines",
            hint="pass --api-key once for all engines, or once for each URL",
        )
    if (ca_file or cert_file or key_file) and not any(_is_https(url) for url in urls):
        raise ConfigError("certificates were given, but no URL begins with https", hint="write https://host:port")
    found: dict[str, Target] = {}
    for index, url in enumerate(urls):
        key = keys[index if len(keys) > 1 else 0] if keys else None
        target = Target(url, api_key=key, engine=engine)
        if _is_https(url):
            target = replace(target, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        if target.url in found:
            raise ConfigError(f"{target.url} is named twice")
        found[target.url] = target
    return list(found.values())


def _is_https(url: str) -> bool:
    return url.lower().startswith("https://")


def check_writable(path: Path) -> None:
    """Checks, before anything long begins, that a file can be written; ``ConfigError`` if not."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="name a file in it")
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: {folder} is no folder", hint="make it first, or name another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied", hint="name another file")


def code_of(error: BaseException) -> int:
    """The exit code for an error that ended a command."""
    return USAGE if isinstance(error, ConfigError) else FAILURE
