"""A vLLM server with our plug-in for the demo: ``python -m weightcast.lab.demo.vllm_engine``.

It behaves like ``weightcast serve --json``: it prints its URL when it serves, and ends on SIGTERM.  vLLM has an
environment of its own.  weightcast need not be installed there, since this module puts it on vLLM's path.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

import weightcast
from weightcast.comm.http import Client
from weightcast.comm.ports import quiet_port
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, WeightcastError
from weightcast.version import __version__

# Packages that vLLM's environment must have; our plug-in needs the last two.
_NEEDED = ("vllm", "torch", "msgspec", "safetensors")
_GET_VLLM = (
    "point --engine-python at a Python that has vLLM: `pip install vllm` into an environment of its own (NVIDIA GPUs), "
    "or, from a checkout of weightcast, `python -m tests.engines.environment vllm-0.32.0-cpu`: it makes one for CPUs "
    "(1.8 GB) and prints its Python"
)
_POLL_S = 0.5
_START_S = 600.0
# As in pyproject.toml.
ENTRY_POINTS = {"vllm.general_plugins": "weightcast.plugins.vllm:register"}


def engine_python(given: Path | None) -> Path:
    """Finds a Python that has vLLM: the given one, this one, or one of the tests' environments in the cache.

    Raises:
        ConfigError: No Python has vLLM; the hint says how to get one.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightcast" / "engines"
    cached = [folder / "bin" / "python" for folder in sorted(cache.glob("vllm-*-py*")) if (folder / ".ready").exists()]
    candidates = [given] if given is not None else [Path(sys.executable), *reversed(cached)]
    missing: list[str] = []
    for python in candidates:
        missing = _missing(python)
        if not missing:
            return python
    where = candidates[0] if given is not None else f"{sys.executable} (and no environment of {cache})"
    raise ConfigError(f"{where} has no {', '.join(missing)}", hint=_GET_VLLM)


def _missing(python: Path) -> list[str]:
    look = f"import importlib.util as u; print(*[n for n in {_NEEDED!r} if u.find_spec(n) is None])"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    except OSError as error:
        raise ConfigError(f"--engine-python {python}: {error.strerror}", hint=_GET_VLLM) from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python {python} is not a working Python: {error}", hint=_GET_VLLM) from error
    return done.stdout.split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a vLLM server until it ends or this process receives a signal."""
    parser = argparse.ArgumentParser(prog="weightcast.lab.demo.vllm_engine")
    parser.add_argument("model")
    parser.add_argument("--python", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="weightcast-vllm-") as lent:
        _lend(Path(lent))
        port = quiet_port()
        url = f"http://127.0.0.1:{port}"
        server = subprocess.Popen(
            _command(chosen, port), env=_environment(chosen, lent), stdout=sys.stderr, start_new_session=False
        )
        signal.signal(signal.SIGTERM, _passing_on(server))
        try:
            _wait(server, url)
        except WeightcastError as error:
            print(error, file=sys.stderr)
            server.terminate()
            server.wait()
            return 1
        print(msgspec.json.encode({"url": url}).decode(), flush=True)
        return 0 if server.wait() in (0, -signal.SIGTERM) else 1


def _lend(folder: Path) -> None:
    """Links this weightcast and its entry points into a folder, without the packages that would shadow vLLM's."""
    (folder / "weightcast").symlink_to(Path(weightcast.__file__).parent, target_is_directory=True)
    metadata = folder / f"weightcast-{__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weightcast\nVersion: {__version__}\n")
    lines = [f"[{group}]\nweightcast = {place}\n" for group, place in ENTRY_POINTS.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def _command(chosen: argparse.Namespace, port: int) -> list[str]:
    command = [chosen.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={chosen.model}"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--tensor-parallel-size={chosen.tp}", f"--dtype={chosen.dtype}"]
    command += ["--max-model-len=512", "--max-num-seqs=64", "--generation-config=vllm"]
    command += ["--weight-transfer-config", '{"backend": "weightcast"}']
    # On a CPU a compiled graph would keep the weights that it was compiled with; on a GPU the trainer needs room too.
    command += ["--enforce-eager"] if chosen.device == "cpu" else ["--gpu-memory-utilization=0.3"]
    return command


def _environment(chosen: argparse.Namespace, lent: str) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given |= {"PYTHONPATH": lent, "VLLM_NO_USAGE_STATS": "1"}
    if chosen.device == "cpu":
        given |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return given


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    """Waits until the server serves.

    Raises:
        EngineFailure: The server ended; its own output above says why.
        DeadlineExceeded: The server did not serve in time.
    """
    client = Client(Target(url), timeout_s=10.0)
    deadline = time.monotonic() + _START_S
    try:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise EngineFailure(f"vLLM ended with exit code {server.returncode} before it served")
            try:
                client.get_json("/weightcast/info")
            except WeightcastError:
                time.sleep(_POLL_S)
            else:
                return
    finally:
        client.close()
    raise DeadlineExceeded(who="vLLM", waiting_for="it to serve", timeout_s=_START_S)


def _passing_on(server: subprocess.Popen[bytes]):
    def stop(number: int, frame: FrameType | None) -> None:
        server.terminate()

    return stop


if __name__ == "__main__":
    sys.exit(main())
