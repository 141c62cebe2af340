"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.config import Target
from weightcast.errors import ConfigError

if TYPE_CHECKING:
    import torch

JSON_KEY = "weightcast.json"
STACK_KEY = "weightcast.traceback"


def _remember_json(context: typer.Context, value: bool) -> bool:
    context.meta[JSON_KEY] = value
    return value


def _remember_stack(context: typer.Context, value: bool) -> bool:
    context.meta[STACK_KEY] = value
    return value


# Eager, so that they are known when another option turns out to be wrong.
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout.", callback=_remember_json, is_eager=True),
]
Traceback = Annotated[
    bool,
    typer.Option("--traceback", help="Show the Python stack of an error.", callback=_remember_stack, is_eager=True),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="WEIGHTCAST_API_KEY",
        help="Key of the engines: one for all of them, or one for each URL in the same order (in the variable: "
        "separated by spaces).",
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        envvar="WEIGHTCAST_CA_FILE",
        help="For https: authorities (PEM) that may vouch for the engines; the system's by default.",
    ),
]
CertFile = Annotated[
    str | None,
    typer.Option(
        "--cert-file",
        metavar="FILE",
        envvar="WEIGHTCAST_CERT_FILE",
        help="For https: own certificate (PEM), for engines that ask for one.",
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar="WEIGHTCAST_KEY_FILE",
        help="Its private key, if that is not in the same file.",
    ),
]
Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="http://host:port of an engine.", show_default=False)]
EngineKind = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="auto|native|sglang|vllm|lmdeploy",
        help="What the engines are; auto asks each. The others speak to an engine as its own project shipped it.",
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
BucketBytes = Annotated[
    str, typer.Option("--bucket-bytes", metavar="SIZE", help="Size of one bucket, e.g. 512MiB, 1.5GiB, 64MB.")
]
WireDtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Cast floating-point tensors to this first, e.g. bfloat16."),
]


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that ``--dtype`` names; None for none.

    Raises:
        ConfigError: There is no such dtype, or weights cannot simply be cast to it.
    """
    from weightcast.wire.layout import DTYPES

    if name is None:
        return None
    floats = [known for known, dtype in DTYPES.items() if dtype.is_floating_point and dtype.itemsize >= 2]
    if name not in floats:
        raise ConfigError(f"--dtype {name}: choose one of {', '.join(floats)}")
    return DTYPES[name]


def targets(
    urls: Sequence[str],
    keys: Sequence[str] | None,
    *,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    engine: str = "auto",
) -> list[Target]:
    """URLs with their keys; the certificates are for those that begin with https.

    Raises:
        ConfigError: A URL is none, is named twice, or the number of keys fits neither all nor each.
    """
    keys = list(keys or ())
    if len(keys) not in (0, 1, len(urls)):
        raise ConfigError(
            f"{len(keys)} keys for {len(urls)} engines", hint="pass --api-key once for all, or once for each URL"
        )
    if (ca_file or cert_file or key_file) and not any(_is_https(url) for url in urls):
        raise ConfigError("certificates are for https, and no URL begins with it", hint="write https://host:port")
    found: list[Target] = []
    for index, url in enumerate(urls):
        key = keys[index if len(keys) > 1 else 0] if keys else None
        if _is_https(url):
            found.append(
                Target(url, api_key=key, engine=engine, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
            )
        else:
            found.append(Target(url, api_key=key, engine=engine))
    seen: set[str] = set()
    for target in found:
        if target.url in seen:
            raise ConfigError(f"{target.url} is named twice")
        seen.add(target.url)
    return found


def _is_https(url: str) -> bool:
    return url.lower().startswith("https://")
