"""``weightcast serve``: the reference engine."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightcast.cli.options import Json, Traceback
from weightcast.cli.render import say_json
from weightcast.errors import ConfigError

if TYPE_CHECKING:
    from weightcast.receiver.rank import StagingChoice
    from weightcast.rollout.launch import ExecutorName

_EXTRA = frozenset({"fastapi", "starlette", "uvicorn", "h11", "transformers", "prometheus_client"})


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face model folder.", show_default=False)],
    # The option's name is spelled out where the metavar is its name in capitals: typer 0.27 would call it --HOST.
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0 takes a free one.")] = 8000,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks; must divide the heads.")] = 1,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto uses GPUs if there are any.")] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Dtype of the weights; auto: the model's own.")
    ] = "auto",
    executor: Annotated[
        str,
        typer.Option(
            metavar="auto|local|mp|ray",
            help="local: one rank in this process. mp: one process per rank. ray: one Ray actor per rank. "
            "auto: local for one rank, else mp.",
        ),
    ] = "auto",
    ray_address: Annotated[
        str,
        typer.Option(
            "--ray-address",
            metavar="auto|local|HOST:PORT",
            help="Ray cluster; local starts one for this command.",
        ),
    ] = "auto",
    placement_group: Annotated[
        str | None,
        typer.Option("--placement-group", metavar="NAMESPACE/NAME", help="Existing placement group for the ranks."),
    ] = None,
    bundles: Annotated[
        str | None,
        typer.Option(metavar="I,J,...", help="Bundles of the placement group for ranks 0, 1, ..."),
    ] = None,
    staging: Annotated[
        str,
        typer.Option(
            metavar="auto|device|host|none",
            help="Memory for a second set of weights. With staging, a failed update leaves the old version serving.",
        ),
    ] = "auto",
    max_batch: Annotated[int, typer.Option("--max-batch", metavar="N", help="Requests decoded at once.")] = 32,
    max_len: Annotated[
        int, typer.Option("--max-len", metavar="N", help="Longest prompt and completion together, in tokens.")
    ] = 2048,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="WEIGHTCAST_API_KEY", help="Require this key of every caller."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", metavar="FILE", help="Serve TLS with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option("--tls-key", metavar="FILE", help="Private key, if it is in another file."),
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option("--tls-client-ca", metavar="FILE", help="Require a client certificate of this authority."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Model name in answers; the folder's name by default."),
    ] = None,
    version: Annotated[int, typer.Option(metavar="N", help="Weight version of the model folder.", min=0)] = 0,
    threads: Annotated[
        int, typer.Option(metavar="N", help="CPU threads of each rank; 0 divides the cores among them.", min=0)
    ] = 0,
    dialect: Annotated[
        str,
        typer.Option(
            metavar="ENGINE", help="For tests: imitate the weight routes of a stock engine: sglang, lmdeploy."
        ),
    ] = "none",
    faults: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="For tests: faults to inject into those routes, such as die@/update_weights#2."
        ),
    ] = "",
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Serves a Hugging Face model with an OpenAI-compatible API and a receiver for new weights.

    The engine runs the Llama, Mistral, Qwen2 and Qwen3 families on a CPU or on GPUs. Ctrl-C or SIGTERM ends it with
    all its processes. With --json the document (url, pid) is printed as soon as requests are accepted.

    \b
    weightcast serve ./SmolLM2-135M-Instruct --port 8000
    weightcast serve ./Qwen3-8B --tp 4 --device cuda --host 0.0.0.0 --api-key $KEY
    weightcast serve ./Qwen3-8B --tp 2 --device cuda --executor ray --placement-group jobs/rollout --bundles 3,2
    weightcast serve ./Qwen3-8B --host 0.0.0.0 --tls-cert engine.pem --tls-key engine.key --tls-client-ca trainers.pem
    curl http://127.0.0.1:8000/v1/models
    """
    try:
        from weightcast.rollout import launch
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        raise ConfigError(
            f"the engine needs {error.name}, which is not installed", hint='pip install "weightcast[serve]"'
        ) from error

    config = launch.ServeConfig(
        model_dir=model,
        host=host,
        port=port,
        tp=tp,
        device=device,
        dtype=dtype,
        executor=cast("ExecutorName", executor),
        api_key=api_key,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        max_batch=max_batch,
        max_len=max_len,
        staging=cast("StagingChoice", staging),
        name=name,
        version=version,
        threads=threads,
    )
    _check_files(Path(model))
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("weightcast").setLevel(logging.INFO)
    on_ready = _say_where if as_json else None
    extra_routes = None
    if dialect != "none" or faults:
        from weightcast.lab.dialects import routes_of

        extra_routes = routes_of(dialect, faults)
    if executor == "ray":
        from weightcast.ray.cluster import cluster
        from weightcast.ray.executor import parse_place

        place = parse_place(placement_group, bundles)
        with cluster(ray_address, namespace=place.namespace, cpus=tp):
            code = launch.serve(config, on_ready=on_ready, make_executor=place.make_executor, extra_routes=extra_routes)
    else:
        if placement_group or bundles:
            raise ConfigError("--placement-group and --bundles need --executor ray")
        code = launch.serve(config, on_ready=on_ready, extra_routes=extra_routes)
    if code:
        raise typer.Exit(code)


def _check_files(model: Path) -> None:
    """Refuses broken weight files with the words of `push`, before any process starts."""
    from weightcast.exporters.safetensors_file import SafetensorsFile
    from weightcast.rollout.checkpoint import weight_files

    if (model / "config.json").is_file():
        for path in weight_files(model):
            SafetensorsFile(path).close()


def _say_where(url: str) -> None:
    say_json({"url": url, "pid": os.getpid()})
    sys.stdout.flush()
