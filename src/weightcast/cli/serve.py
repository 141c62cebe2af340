"""``weightcast serve``: the reference engine."""

from __future__ import annotations

from typing import Annotated

import typer

from weightcast.cli.options import Json, Traceback
from weightcast.errors import ConfigError

_EXTRA = frozenset({"fastapi", "starlette", "uvicorn", "transformers", "prometheus_client", "psutil"})


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face model folder.", show_default=False)],
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="Port to listen on.", min=1, max=65535)] = 8000,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks; has to divide the heads.")] = 1,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto takes GPUs where there are any.")] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of the weights; auto: as in the model.")
    ] = "auto",
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="local|mp",
            help="local: everything in this process; mp: a process for each rank.",
            show_default=False,
        ),
    ] = None,
    staging: Annotated[
        str,
        typer.Option(
            metavar="auto|device|host|none",
            help="Where a new version waits for its switch, so that a failed update leaves the old one serving.",
        ),
    ] = "auto",
    max_batch: Annotated[int, typer.Option("--max-batch", metavar="N", help="Requests decoded at once.", min=1)] = 32,
    max_len: Annotated[
        int, typer.Option("--max-len", metavar="N", help="Longest prompt and completion together, in tokens.", min=1)
    ] = 2048,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="WEIGHTCAST_API_KEY", help="Ask every caller for this key."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in answers; its folder's name by default.")
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Serve a Hugging Face model with an OpenAI-compatible API and a receiver for new weights.

    Llama, Qwen2 and Qwen3 families; CPU or GPUs. Ends on Ctrl-C or SIGTERM, with all its processes.

    \b
    weightcast serve ./SmolLM2-135M-Instruct --port 8000
    weightcast serve ./Qwen3-8B --tp 4 --device cuda --host 0.0.0.0 --api-key $KEY
    curl http://127.0.0.1:8000/v1/models
    """
    if tp < 1:
        raise ConfigError(f"--tp {tp}: an engine has at least one rank")
