"""One vLLM whose two tensor-parallel ranks are on hosts of their own; this process is on neither."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.engines.environment import LISTS, engine_python
from tests.engines.forked import Forked, start
from tests.engines.overlays import RAY, RAY_SETTINGS, overlay
from tests.engines.vllm_server import IMPORTED, as_command, vllm_command
from tests.helpers.engines import Engine
from tests.helpers.hosts import INTERFACE, Host
from tests.helpers.procs import end
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
def ray_nodes(
    model: Path,
    logs: Path,
    places: Sequence[Host],
    *options: str,
    gpus: int = 1,
    settings: Mapping[str, str] | None = None,
) -> Iterator[list[Node]]:
    """Starts a node of Ray on each host and one vLLM of two ranks in them, and ends all; the first host serves.

    Args:
        model: Folder of the model.
        logs: Folder of the logs.
        places: The hosts.
        options: More of vLLM's options.
        gpus: How many ranks a host can have.
        settings: More of the environment; by default the engine's secret.
    """
    plugin = logs / "cpu-in-ray" / "cpu_in_ray-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-in-ray\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.platform_plugins]\ncpu_in_ray = cpu_in_ray:platform\n")
    path = [LISTS / "vllm_in_ray", plugin.parent, overlay(engine_python("vllm-0.32.0-cpu"), *RAY)]
    head, token = f"{places[0].address}:{quiet_port()}", secrets.token_hex(32)
    found: list[Node] = []
    try:
        for number, host in enumerate(places):
            command, environment = vllm_command(model, logs, 8000, *options, tp=2)
            del environment["VLLM_TARGET_DEVICE"]  # it would rule the plug-in out
            environment |= RAY_SETTINGS | {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "VLLM_HOST_IP": host.address,
                "VLLM_PLUGINS": "weightcast,cpu_in_ray",
                "ENGINE_STARTS": "python",  # a fork has Ray's threads no more
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], *map(str, path)]),
            }
            environment |= settings if settings is not None else {"WEIGHTCAST_ENGINE_SECRET": SECRET}
            python, _, _, _, *argv = as_command(command)
            argv = [word if not word.startswith("--host=") else f"--host={host.address}" for word in argv]
            serve = [] if number else [*argv, "--distributed-executor-backend=ray"]
            node = ["-m", "vllm_node", str(logs / f"ray-{host.name}"), host.address, str(gpus), head, *serve]
            log = logs / f"{host.name}.log"
            with log.open("w") as output:
                process = subprocess.Popen(
                    [python, *host.command(node)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            found.append(Node(host, process, log))
        yield found
    finally:
        # Ray's processes have sessions of their own.
        for process in psutil.process_iter():
            if any(is_on(host, process.pid) for host in places):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        for node in found:
            node.process.wait(60)


def is_on(host: Host, pid: int) -> bool:
    """Whether a process is on a host; False if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{host.namespace}").st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


@contextmanager
def vllm_on(host: Host, model: Path, logs: Path, *, tp: int) -> Iterator[Engine]:
    """Starts one vLLM with all its ranks on one host, and ends it."""
    command, environment = vllm_command(model, logs, 8000, tp=tp)
    python, *argv = [word if not word.startswith("--host=") else f"--host={host.address}" for word in command]
    environment |= {"VLLM_HOST_IP": "127.0.0.1"}  # its ranks meet on this host
    log = logs / f"{host.name}-{len(list(logs.glob('*.log')))}.log"
    with log.open("w") as output:
        process = start(Path(python), host.command(argv), modules=IMPORTED, env=environment, output=output)
    node = Node(host, process, log)
    try:
        with engine_of([node], model, tp=tp) as engine:
            yield engine
    finally:
        _end(node)


@contextmanager
def engine_of(found: Sequence[Node], model: Path, *, tp: int = 2) -> Iterator[Engine]:
    """Waits until the API server answers; ``tp`` is its number of ranks."""
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
        yield Engine(process=found[0].process, url=url, folder=model, tp=tp, client=client)


def _end(node: Node) -> None:
    """Asks vLLM to end, and then ends what is left of its session."""
    end(node.process, 30)
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == node.process.pid:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
