"""One vLLM whose two tensor-parallel ranks are on hosts of their own; this process is on neither."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.engines import Engine
from tests.engines.forked import Forked, start
from tests.engines.vllm_server import IMPORTED, as_command, vllm_command
from tests.hosts import INTERFACE, Host
from tests.procs import end
from weightcast.comm.ports import quiet_port

START_S = 600.0
SECRET = "ZmlmdHkgbWlsZXMgZnJvbSBoZXJl"


@dataclass(frozen=True, slots=True)
class Node:
    """vLLM's processes on one host.

    Attributes:
        host: The host.
        process: The first of them.
        log: Their log.
    """

    host: Host
    process: Forked | subprocess.Popen[Any]
    log: Path

    def words(self) -> str:
        """Returns the log so far."""
        return self.log.read_text()


@contextmanager
def nodes(
    model: Path,
    logs: Path,
    places: Sequence[Host],
    *options: str,
    settings: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[list[Node]]:
    """Starts one vLLM on several hosts, one rank on each, and ends it; the first host has the API server.

    Args:
        model: Folder of the model.
        logs: Folder of the logs.
        places: The hosts.
        options: More of vLLM's options.
        settings: More of each host's environment; by default the engine's secret.
    """
    master = f"--master-addr={places[0].address}", f"--master-port={quiet_port()}"
    found: list[Node] = []
    try:
        for number, host in enumerate(places):
            command, environment = vllm_command(model, logs, 8000, *master, *options, tp=len(places))
            environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "VLLM_HOST_IP": host.address}
            environment |= settings[number] if settings else {"WEIGHTCAST_ENGINE_SECRET": SECRET}
            python, *argv = as_command(command)
            argv = [word if not word.startswith("--host=") else f"--host={host.address}" for word in argv]
            argv += [f"--nnodes={len(places)}", f"--node-rank={number}", *(["--headless"] if number else [])]
            log = logs / f"{host.name}.log"
            with log.open("w") as output:
                process = start(Path(python), host.command(argv), modules=IMPORTED, env=environment, output=output)
            found.append(Node(host, process, log))
        yield found
    finally:
        for node in found:
            _end(node)


@contextmanager
def engine_of(found: Sequence[Node], model: Path) -> Iterator[Engine]:
    """Waits until the API server answers."""
    url = f"http://{found[0].host.address}:8000"
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        deadline = time.monotonic() + START_S
        while True:
            for node in found:
                assert node.process.poll() is None, f"{node.host.name} did not start:\n{node.words()[-6000:]}"
            assert time.monotonic() < deadline, "\n".join(node.words()[-3000:] for node in found)
            try:
                if client.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield Engine(process=found[0].process, url=url, folder=model, tp=len(found), client=client)


def _end(node: Node) -> None:
    """Asks vLLM to end, and then ends what is left of its session."""
    end(node.process, 30)
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == node.process.pid:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
