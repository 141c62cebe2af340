"""``weightcast serve``: the reference engine."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightcast.cli.options import Json, Traceback
from weightcast.cli.render import say_json
from weightcast.errors import ConfigError

if TYPE_CHECKING:
    from weightcast.receiver.agent import StagingChoice
    from weightcast.rollout.launch import ExecutorName

_EXTRA = frozenset({"fastapi", "starlette", "uvicorn", "httptools", "transformers", "prometheus_client", "psutil"})


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face model folder.", show_default=False)],
    # Named where the metavar is the name in capitals: typer 0.27 would call the option --HOST.
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0 takes a free one.")] = 8000,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks; has to divide the heads.")] = 1,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto takes GPUs where there are any.")] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of the weights; auto: as in the model.")
    ] = "auto",
    executor: Annotated[
        str,
        typer.Option(
            metavar="auto|local|mp|ray",
            help="local: one rank, in this process; mp: a process for each rank; ray: a Ray actor for each rank; "
            "auto: local for one rank.",
        ),
    ] = "auto",
    ray_address: Annotated[
        str,
        typer.Option(
            "--ray-address", metavar="auto|local|HOST:PORT", help="Ray cluster; local starts one that ends with this."
        ),
    ] = "auto",
    placement_group: Annotated[
        str | None,
        typer.Option("--placement-group", metavar="NAMESPACE/NAME", help="Your placement group for the ranks."),
    ] = None,
    bundles: Annotated[
        str | None,
        typer.Option(metavar="I,J,...", help="Bundle of rank 0, 1, ... in your placement group, in this order."),
    ] = None,
    staging: Annotated[
        str,
        typer.Option(
            metavar="auto|device|host|none",
            help="Where a new version waits for its switch, so that a failed update leaves the old one serving.",
        ),
    ] = "auto",
    max_batch: Annotated[int, typer.Option("--max-batch", metavar="N", help="Requests decoded at once.")] = 32,
    max_len: Annotated[
        int, typer.Option("--max-len", metavar="N", help="Longest prompt and completion together, in tokens.")
    ] = 2048,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="WEIGHTCAST_API_KEY", help="Ask every caller for this key."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", metavar="FILE", help="Speak TLS with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, if that is not in the same file.")
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option("--tls-client-ca", metavar="FILE", help="Ask every caller for a certificate of this authority."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the model in answers; its folder's name by default."),
    ] = None,
    version: Annotated[int, typer.Option(metavar="N", help="Version of the weights in the folder.", min=0)] = 0,
    threads: Annotated[
        int, typer.Option(metavar="N", help="CPU threads of each rank; 0 divides the cores among them.", min=0)
    ] = 0,
    dialect: Annotated[
        str,
        typer.Option(metavar="ENGINE", help="For tests: have the weight routes of a stock engine: sglang, lmdeploy."),
    ] = "none",
    faults: Annotated[
        str,
        typer.Option(metavar="LIST", help="For tests: what goes wrong with them, e.g. die@/update_weights#2."),
    ] = "",
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Serve a Hugging Face model with an OpenAI-compatible API and a receiver for new weights.

    Llama, Mistral, Qwen2 and Qwen3 families; CPU or GPUs. Ends on Ctrl-C or SIGTERM, with all its processes. With
    --json the document (url, pid) is printed as soon as requests are accepted.

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
        dialect=dialect,
        faults=faults,
    )
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("weightcast").setLevel(logging.INFO)
    on_ready = _say_where if as_json else None
    if executor == "ray":
        from weightcast.ray import serving

        place = serving.parse_place(placement_group, bundles)
        with serving.cluster(ray_address, namespace=place.namespace, cpus=tp):
            code = launch.serve(config, on_ready=on_ready, make_executor=place.make_executor)
    else:
        if placement_group or bundles:
            raise ConfigError("a placement group and its bundles are for --executor ray")
        code = launch.serve(config, on_ready=on_ready)
    if code:
        raise typer.Exit(code)


def _say_where(url: str) -> None:
    say_json({"url": url, "pid": os.getpid()})
    sys.stdout.flush()
