"""``weightcast verify`` tells apart what differs, what cannot be read and what an engine has no use for."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weightcast.cli.app import app
from weightcast.digest.definition import tensor_digest
from weightcast.wire.answers import Ack
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import PROTOCOL

WEIGHTS = {name: torch.randn(3, 4) for name in ("embed", "norm", "experts", "mtp.fc")}


class Engine:
    """Answers of an engine, by path."""

    def __init__(self, *, kept: tuple[str, ...], optional: tuple[str, ...] = (), resident: dict[str, str]) -> None:
        specs = {name: TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()}
        self.answers = {
            "/weightcast/info": EngineInfo(
                protocol=PROTOCOL,
                engine="vllm 0.32.0",
                model="tiny",
                state="serving",
                version=3,
                digest=None,
                tp_size=1,
                host_id="h",
                ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
                staging="device",
                transports=("ipc",),
                specs=tuple(specs[name] for name in kept),
                optional=tuple(specs[name] for name in optional),
            ),
            "/weightcast/digests": Ack(ok=True, version=3, ranks=1, resident=resident),
        }


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(engine: Engine) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = engine.answers.get(self.path.partition("?")[0])
                body = encode(found) if found is not None else b"{}"
                self.send_response(200 if found is not None else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def verified(checkpoint: Path, url: str) -> tuple[int, dict[str, Any], str]:
    found = CliRunner().invoke(app, ["verify", str(checkpoint), "--at", url, "--json"])
    words = CliRunner().invoke(app, ["verify", str(checkpoint), "--at", url])
    assert found.exit_code == words.exit_code, words.output
    return found.exit_code, json.loads(found.stdout), words.stdout


def digests(*names: str) -> dict[str, str]:
    return {name: tensor_digest(WEIGHTS[name]) for name in names}


def test_all_equal_is_0_and_tensors_without_a_use_are_no_difference(serve, checkpoint):
    engine = Engine(
        kept=("embed", "norm", "experts"), optional=("mtp.fc",), resident=digests("embed", "norm", "experts")
    )
    code, found, words = verified(checkpoint, serve(engine))
    assert (code, found["ok"], found["equal"], found["tensors"]) == (0, True, 3, 4)
    assert found["not_kept"] == ["mtp.fc"]
    assert "1 tensor is not kept by this engine: mtp.fc" in words


def test_a_tensor_that_cannot_be_read_is_counted_by_itself_and_is_1(serve, checkpoint):
    engine = Engine(kept=tuple(WEIGHTS), resident=digests("embed", "norm", "mtp.fc"))
    code, found, words = verified(checkpoint, serve(engine))
    assert (code, found["ok"], found["equal"]) == (1, False, 3)
    assert (found["differences"], found["unreadable"]) == ([], ["experts"])
    assert "no tensor differs" in words
    assert "1 tensor cannot be read back: experts" in words


def test_a_difference_is_3_whatever_else_cannot_be_read(serve, checkpoint):
    resident = digests("embed", "mtp.fc") | {"norm": tensor_digest(WEIGHTS["norm"] + 1)}
    code, found, words = verified(checkpoint, serve(Engine(kept=tuple(WEIGHTS), resident=resident)))
    assert (code, found["equal"], found["unreadable"]) == (3, 2, ["experts"])
    assert [(entry["name"], entry["why"]) for entry in found["differences"]] == [("norm", "digest")]
    assert "1 of 4 tensors differ" in words
