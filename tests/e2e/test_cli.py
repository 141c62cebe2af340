"""The command line against engines in processes of their own."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.helpers.clock import PATIENCE_S
from tests.helpers.commands import COMMAND, Started
from tests.helpers.commands import run as run_forked
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast.cli.app import app
from weightcast.comm import nixl
from weightcast.config import parse_size
from weightcast.wire.codec import decode_info, encode
from weightcast.wire.messages import Open, Owner
from weightcast.wire.plans import UpdateTables

PROMPT = [5, 17, 301, 44, 9]
KEY = "correct-horse-battery-staple"
_ENV = {name: value for name, value in os.environ.items() if name != "WEIGHTCAST_API_KEY"} | {"OMP_NUM_THREADS": "1"}

versions = count(1)


def run(*args, env=None):
    """A command in this process."""
    env = {"WEIGHTCAST_API_KEY": None} | (env or {})
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="weightcast", env=env)


def run_process(*args, python=True):
    """A command as a user starts it, or without the seconds of its imports."""
    command = [str(arg) for arg in args]
    if not python:
        return run_forked(COMMAND, *command, env=_ENV, timeout_s=600)
    command = [sys.executable, "-m", "weightcast", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=_ENV, check=False)


def error_line(result, code=1):
    """The one line of an error, with nothing but a hint after it."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("error: "))
    rest = lines[first + 1 :]
    assert rest == [] or (len(rest) == 2 and rest[0] == "" and rest[1].startswith("hint: ")), result.stderr
    return lines[first]


class Engine:
    """`weightcast serve` as a child; ended by SIGTERM.  ``python``: started as a user starts it."""

    def __init__(self, model: Path, log: Path, *options: str, python: bool = False) -> None:
        self.log = log
        command = ["serve", str(model), "--port", "0", "--json", *options]
        with log.open("w") as stderr:
            if python:
                command = [sys.executable, "-m", "weightcast", *command]
                self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=_ENV)
            else:
                self.process = Started(COMMAND, *command, stdout=subprocess.PIPE, stderr=stderr, env=_ENV)
        assert self.process.stdout is not None
        document = ""
        for line in self.process.stdout:
            document += line
            if line == "}\n":
                break
        if not document:
            raise AssertionError(f"exit code {self.stop()}, {log.read_text()}")
        self.url = json.loads(document)["url"]
        self.key: str | None = None

    def get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.get(self.url + path, headers=headers, timeout=300, trust_env=False, verify=False)

    def complete(self, tokens: int = 12) -> list[int]:
        """Greedy, as token ids."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        body = {
            "model": self.info()["model"],
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = httpx.post(
            self.url + "/v1/completions", json=body, headers=headers, timeout=60, trust_env=False, verify=False
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def digests(self) -> dict[str, str]:
        return self.get("/weightcast/digests").json()["resident"]

    def info(self) -> dict:
        return self.get("/weightcast/info").json()

    def stop(self) -> int:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.process.terminate()
            try:
                return self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two versions of one model, as folders, and as transformers models."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for seed, name in enumerate(("old", "new")):
        found[name] = tiny_model(root / name, seed=seed)
        tiny_tokenizer(root / name)
    return root, found


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    root, _ = models
    engine = Engine(root / "old", tmp_path_factory.mktemp("log") / "engine.log", "--tp", "2", python=True)
    yield engine
    assert engine.stop() == 0


@pytest.fixture(scope="module")
def keyed(models, tmp_path_factory):
    root, _ = models
    log = tmp_path_factory.mktemp("log") / "keyed.log"
    engine = Engine(root / "old", log, "--api-key", KEY, "--dtype", "bfloat16", "--name", "tiny")
    engine.key = KEY
    yield engine
    assert engine.stop() == 0
    assert KEY not in log.read_text()


@pytest.mark.parametrize("via", ["ipc", "broadcast"])
def test_push_makes_the_engine_answer_as_the_new_model_does(via, engine, models):
    root, transformers_models = models
    before, after = next(versions), next(versions)
    assert run("push", root / "old", "--to", engine.url, "--version", before).exit_code == 0
    assert engine.complete() == greedy(transformers_models["old"], PROMPT, 12)
    assert greedy(transformers_models["old"], PROMPT, 12) != greedy(transformers_models["new"], PROMPT, 12)

    pushed = run_process(
        "push", root / "new", "--to", engine.url, "--version", after, "--via", via, python=via == "ipc"
    )

    assert pushed.returncode == 0, pushed.stderr
    assert f"over {via}" in pushed.stdout
    assert f"{before} -> {after}, proof resident" in pushed.stdout
    assert "on 2 of 2 ranks" in pushed.stdout
    assert engine.complete() == greedy(transformers_models["new"], PROMPT, 12)
    verified = run_process("verify", root / "new", "--at", engine.url, python=via == "ipc")
    assert verified.returncode == 0, verified.stderr
    assert f"version {after}" in verified.stdout
    refuted = run_process("verify", root / "old", "--at", engine.url, python=False)
    assert refuted.returncode == 3
    assert "model.layers.1.mlp.down_proj.weight" in refuted.stdout
    shown = run("status", engine.url)
    assert shown.exit_code == 0
    row = shown.stdout.splitlines()[1].split()
    assert (row[0], row[3:6]) == (engine.url, ["old", "serving", str(after)])


def test_one_json_document_each(engine, models):
    root, _ = models
    version = next(versions)
    pushed = json.loads(run("push", root / "new", "--to", engine.url, "--version", version, "--json").stdout)
    assert pushed["version"] == version
    assert pushed["targets"][0]["status"] == "serving"
    status = json.loads(run("status", engine.url, "--json").stdout)
    assert status["ok"] is True
    assert status["engines"][0]["version"] == version
    assert status["engines"][0]["digest"] == pushed["targets"][0]["digest"]
    verified = json.loads(run("verify", root / "new", "--at", engine.url, "--json").stdout)
    assert verified["ok"] is True
    assert verified["equal"] == verified["tensors"] == len(load_file(root / "new" / "model.safetensors"))
    assert verified["digest"] == pushed["targets"][0]["digest"]
    refuted = json.loads(run("verify", root / "old", "--at", engine.url, "--json").stdout)
    assert refuted["ok"] is False
    assert {found["name"] for found in refuted["differences"]} == set(load_file(root / "new" / "model.safetensors"))


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_full_disk_loses_the_file_and_not_the_report(option, engine, models, tmp_path):
    root, _ = models
    version = next(versions)
    pushed = run("push", root / "new", "--to", engine.url, "--version", version, option, "/dev/full", "--json")
    assert json.loads(pushed.stdout)["targets"][0]["version_after"] == version
    assert engine.info()["version"] == version
    assert "/dev/full could not be written: No space left on device" in pushed.stderr
    assert f"every engine serves version {version}" in error_line(pushed, code=4)

    tensors = load_file(root / "old" / "model.safetensors")
    tensors[_NORM][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    push = ("push", tmp_path, "--to", engine.url, "--version", next(versions), option, "/dev/full", "--json")
    failed = run(*push)
    error = json.loads(failed.stdout)["error"]
    assert "NaN or infinite" in error["message"]
    assert error["report"]["targets"][0]["version_after"] == version
    assert failed.exit_code == 1


def test_verify_finds_the_one_tensor_that_differs(engine, models, tmp_path):
    root, _ = models
    assert run("push", root / "new", "--to", engine.url, "--version", next(versions)).exit_code == 0
    tensors = load_file(root / "new" / "model.safetensors")
    # One bit of one element.
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(tensors, tmp_path / "model.safetensors")
    result = run("verify", tmp_path / "model.safetensors", "--at", engine.url, "--json")
    assert result.exit_code == 3
    assert [found["name"] for found in json.loads(result.stdout)["differences"]] == ["model.norm.weight"]


def test_two_engines_of_different_dtype_and_degree_at_once(engine, keyed, models):
    root, _ = models
    version = next(versions)
    start = run("push", root / "old", "--to", engine.url, "--to", keyed.url, "--api-key", KEY, "--version", version)
    assert start.exit_code == 0, start.output
    version = next(versions)
    result = run(
        "push",
        root / "new",
        *("--to", engine.url, "--to", keyed.url, "--api-key", KEY),
        *("--version", version, "--via", "broadcast", "--bucket-bytes", "64KiB"),
    )
    assert result.exit_code == 0, result.output
    for found in (engine, keyed):
        assert found.info()["version"] == version
        assert run("verify", root / "new", "--at", found.url, "--api-key", KEY).exit_code == 0
    assert run("status", engine.url, keyed.url, "--api-key", KEY).exit_code == 0


def test_doctor_finds_nothing_wrong(engine):
    result = run("doctor", engine.url)
    assert result.exit_code == 0, result.output
    assert not any(line.startswith(("  fail", "  warn")) for line in result.stdout.splitlines())
    assert "2 ranks joined this process" in result.stdout
    assert "ipc and broadcast can be used" in result.stdout
    lines = result.stdout.splitlines()
    (direct,) = [line for line in lines if line.split()[1:2] == ["direct"]]
    assert "auto takes it if the trainer sets keep_mapped=True" in direct
    rdma = [line for line in lines if line.split()[1:2] == ["rdma"]]
    assert len(rdma) == (0 if nixl.missing() else 1)
    (found,) = json.loads(run("doctor", engine.url, "--json").stdout)["engines"]
    assert found["ok"] is True
    assert {check["name"] for check in found["checks"]} >= {"key", "state", "ipc", "rendezvous", "staging", "memory"}


def test_doctor_says_when_engines_cannot_reach_this_machine(engine):
    # TEST-NET-1: an address that is nobody's.
    result = run("doctor", engine.url, "--rendezvous", "192.0.2.1")
    assert result.exit_code == 1
    assert "fail  rendezvous" in result.stdout
    assert "hint: rendezvous: " in result.stdout
    assert run("doctor", engine.url).exit_code == 0


def test_an_engine_that_anybody_in_the_network_may_update_says_so(models, tmp_path):
    root, _ = models
    log = tmp_path / "log"
    engine = Engine(root / "old", log, "--host", "0.0.0.0")
    try:
        assert re.search(
            r"no API key is set, and the server listens on 0\.0\.0\.0: whoever reaches port", log.read_text()
        )
        url = f"http://127.0.0.1:{urlsplit(engine.url).port}"
        for key in (None, KEY):  # this engine takes any key
            result = run("doctor", url, env={"WEIGHTCAST_API_KEY": key})
            assert result.exit_code == 0, result.output
            assert re.search(
                r"warn +key +none needed: whoever reaches \S+ port \d+, can read and replace", result.stdout
            )
            assert "hint: key: start the engine with an API key" in result.stdout
    finally:
        engine.stop()


def test_an_engine_with_a_key_or_on_loopback_gives_no_warning(engine, keyed):
    for found, key, words in ((engine, None, "none needed"), (engine, KEY, "none needed"), (keyed, KEY, "accepted")):
        result = run("doctor", found.url, env={"WEIGHTCAST_API_KEY": key})
        assert re.search(rf"ok +key +{words}", result.stdout), result.stdout
        assert "no API key is set" not in found.log.read_text()


@pytest.mark.parametrize("key", [None, "wrong"])
def test_wrong_key_changes_nothing(key, keyed, models):
    root, _ = models
    before = (keyed.digests(), keyed.info())
    env = {"WEIGHTCAST_API_KEY": key}
    for args, code in (
        (["push", root / "new", "--to", keyed.url, "--version", 10_000], 1),
        (["verify", root / "new", "--at", keyed.url], 1),
        (["status", keyed.url], 1),
    ):
        line = error_line(run(*args, env=env), code)
        assert "401" in line
    result = run("doctor", keyed.url, env=env)
    assert result.exit_code == 1
    assert "fail  key" in result.stdout
    assert KEY not in result.output
    assert (keyed.digests(), keyed.info()) == before
    assert run("doctor", keyed.url, env={"WEIGHTCAST_API_KEY": KEY}).exit_code == 0


def _without(name):
    def change(tensors):
        del tensors[name]

    return change


def _with(name, make):
    def change(tensors):
        tensors[name] = make(tensors)

    return change


_NORM = "model.norm.weight"
WRONG = {
    "missing": (_without(_NORM), f"missing {_NORM}"),
    "extra": (_with("surprise.weight", lambda tensors: torch.zeros(4)), "surprise.weight"),
    "shape": (_with(_NORM, lambda tensors: tensors[_NORM][:-1].clone()), "shape"),
    "dtype": (_with(_NORM, lambda tensors: tensors[_NORM].to(torch.int32)), "int32"),
}


@pytest.fixture
def unharmed(engine, models):
    """The engine serves after the test what it served before it."""
    root, _ = models
    assert run("push", root / "old", "--to", engine.url, "--version", next(versions)).exit_code == 0
    before = (engine.complete(), engine.digests(), engine.info())
    yield engine
    assert (engine.complete(), engine.digests(), engine.info()) == before


@pytest.mark.parametrize("kind", WRONG)
def test_checkpoint_of_another_model_is_refused(kind, unharmed, models, tmp_path):
    root, _ = models
    change, says = WRONG[kind]
    tensors = load_file(root / "new" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    for via in ("ipc", "broadcast"):
        result = run("push", tmp_path, "--to", unharmed.url, "--version", next(versions), "--via", via)
        assert says in error_line(result, 2)
    # verify names it too; the rest differs because the engine has the old weights
    result = run("verify", tmp_path, "--at", unharmed.url)
    assert result.exit_code == 3
    assert (_NORM if kind != "extra" else "surprise.weight") in result.stdout


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "pickle", "nothing", "folder of nothing"])
def test_what_is_no_checkpoint_is_refused(kind, unharmed, models, tmp_path):
    root, _ = models
    path = tmp_path / "model.safetensors"
    data = (root / "new" / "model.safetensors").read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("these are my weights\n" * 100)
    elif kind == "pickle":
        torch.save({"weight": torch.zeros(4)}, path)
    elif kind == "folder of nothing":
        path = tmp_path
    line = error_line(run("push", path, "--to", unharmed.url, "--version", next(versions)), 2)
    assert str(path) in line
    assert str(path) in error_line(run("verify", path, "--at", unharmed.url), 2)
    assert str(path) in error_line(run("plan", path), 2)


def test_version_going_backwards_is_refused_unless_asked_for(engine, models):
    root, _ = models
    version = next(versions) + 1000
    assert run("push", root / "old", "--to", engine.url, "--version", version).exit_code == 0
    before = (engine.complete(), engine.digests())
    line = error_line(run("push", root / "new", "--to", engine.url, "--version", 1), 2)
    assert f"version 1 is older than {version}" in line
    assert (engine.complete(), engine.digests()) == before
    assert engine.info()["version"] == version
    result = run("push", root / "new", "--to", engine.url, "--version", 1, "--allow-older")
    assert result.exit_code == 0, result.output
    assert engine.info()["version"] == 1


@contextmanager
def updating(engine: Engine, version: int) -> Iterator[None]:
    """A session that somebody else has opened on the engine."""
    specs = decode_info(httpx.get(f"{engine.url}/weightcast/info", trust_env=False).content).specs
    opened = Open(
        session=secrets.token_hex(16),
        owner=Owner(host="elsewhere", pid=7),
        version=version,
        timeout_s=60.0,
        lease_s=120.0,
        pause="abort",
        verify="none",
        plan=UpdateTables(tuple(specs), ()),
    )
    url = engine.url + "/weightcast/open"
    # The open answer is the session's lease; the session ends with it.
    with httpx.stream("POST", url, content=encode(opened), timeout=300, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        frames = answer.iter_bytes()  # kept, because its end would close the answer
        assert next(frames)
        yield
    while engine.info()["state"] == "updating":
        time.sleep(0.01)


def test_a_refused_push_reports_nothing_that_never_was_and_the_refusal_once(unharmed, models):
    root, _ = models
    version = next(versions)
    with updating(unharmed, version):
        refused = run("push", root / "new", "--to", unharmed.url, "--version", version)
    line = error_line(refused)
    assert "already being updated by process 7" in line
    assert refused.output.count("already being updated by process 7") == 1
    assert f"version {version}: nothing was sent" in refused.stdout
    for word in ("GB/s", "MiB", "KiB", "peak extra"):
        assert word not in refused.output


def test_status_of_an_engine_that_stages_an_update(unharmed):
    with updating(unharmed, next(versions)):
        shown = run("status", unharmed.url)
        document = json.loads(run("status", unharmed.url, "--json").stdout)
        assert unharmed.complete()
    assert shown.exit_code == 0, shown.output
    assert "updating" in shown.stdout
    assert "doctor" not in shown.output
    assert document["ok"] is True
    assert (document["engines"][0]["state"], document["engines"][0]["serves"]) == ("updating", True)


def test_status_of_a_paused_engine_does_not_send_to_doctor(unharmed):
    httpx.post(unharmed.url + "/pause", timeout=300, trust_env=False).raise_for_status()
    try:
        shown = run("status", unharmed.url)
    finally:
        httpx.post(unharmed.url + "/continue", timeout=300, trust_env=False).raise_for_status()
    assert shown.exit_code == 1
    assert "paused" in shown.stdout
    assert "doctor" not in shown.output


def test_a_push_says_that_an_engine_stays_paused_as_it_was(engine, models):
    root, _ = models
    for paused in (True, False):
        httpx.post(engine.url + ("/pause" if paused else "/continue"), json={}, trust_env=False).raise_for_status()
        pushed = run("push", root / "new", "--to", engine.url, "--version", next(versions))
        assert pushed.exit_code == 0
        assert ("it was paused before this update and still is: it answers no request" in pushed.stdout) is paused
        assert engine.info()["paused"] is paused


def test_a_push_can_insist_on_a_proof(unharmed, models):
    root, _ = models
    push = ("push", root / "old", "--to", unharmed.url, "--version", unharmed.info()["version"], "--strict")
    assert run(*push).exit_code == 0
    assert "needs a forward pass" in error_line(run(*push, "--verify", "behaviour"), 2)


@pytest.mark.parametrize("via", ["ipc", "broadcast"])
def test_a_checkpoint_with_nan_is_refused_by_name(via, unharmed, models, tmp_path):
    root, _ = models
    tensors = load_file(root / "new" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, :2] = float("nan")
    tensors[_NORM][0] = float("-inf")
    save_file(tensors, tmp_path / "model.safetensors")
    push = ("push", tmp_path, "--to", unharmed.url, "--version", next(versions), "--via", via)
    line = error_line(run(*push))
    assert "model.layers.1.mlp.up_proj.weight (2)" in line
    assert f"{_NORM} (1)" in line
    assert unharmed.info()["state"] == "serving"


def test_a_refusal_is_printed_once(unharmed, models, tmp_path):
    root, _ = models
    tensors = load_file(root / "new" / "model.safetensors")
    tensors[_NORM][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    push = ("push", tmp_path, "--to", unharmed.url, "--version", next(versions))
    done = run_process(*map(str, push))
    assert done.returncode == 1
    assert done.stderr.count("NaN or infinite") == done.stderr.count("update to version") == 1


def test_values_that_are_not_finite_can_be_sent_on_purpose(engine, models, tmp_path):
    root, _ = models
    tensors = load_file(root / "new" / "model.safetensors")
    tensors[_NORM][0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    push = ("push", tmp_path, "--to", engine.url, "--allow-older")
    assert run(*push, "--version", next(versions), "--advanced", "check_finite=false").exit_code == 0
    assert run(*push, "--version", next(versions), "--verify", "none", "--advanced", "check_finite=true").exit_code == 1


def test_doctor_estimates_the_memory_that_plan_does(engine, models):
    root, _ = models
    (found,) = json.loads(run("doctor", engine.url, "--json").stdout)["engines"]
    (memory,) = [check["text"] for check in found["checks"] if check["name"] == "memory"]
    plan = json.loads(run("plan", root / "old", "--json").stdout)
    (needs,) = re.findall(r"an update needs (\S+ \S+) on this machine", memory)
    # The tensors' order in a bucket, which is not the same in both, decides on a few bytes between them.
    assert parse_size(needs) == pytest.approx(plan["trainer_peak_bytes"], rel=0.001)


def test_wrong_url_beside_a_right_one_changes_nothing(unharmed, models):
    root, _ = models
    result = run("push", root / "new", "--to", unharmed.url, "--to", "http://127.0.0.1:9", "--version", next(versions))
    assert "http://127.0.0.1:9: cannot connect" in error_line(result)


def test_healthy_engine_goes_on_without_the_lost_one(engine, models):
    root, _ = models
    version = next(versions)
    result = run(
        *("push", root / "new", "--to", engine.url, "--to", "http://127.0.0.1:9", "--version", version),
        *("--on-failure", "quarantine"),
    )
    assert "1 of 2 engines do not serve" in error_line(result)
    assert engine.info()["version"] == version


def test_port_in_use_and_other_mistakes_of_serve(engine, models, tmp_path):
    root, _ = models
    port = urlsplit(engine.url).port
    assert f"127.0.0.1:{port}" in error_line(run("serve", root / "old", "--port", port), 2)
    assert "5" in error_line(run("serve", root / "old", "--port", 0, "--tp", 5), 2)
    assert str(tmp_path) in error_line(run("serve", tmp_path, "--port", 0), 2)
    assert "float7" in error_line(run("serve", root / "old", "--port", 0, "--dtype", "float7"), 2)
    truncated = shutil.copytree(root / "old", tmp_path / "truncated") / "model.safetensors"
    os.truncate(truncated, truncated.stat().st_size * 2 // 3)
    words = error_line(run("serve", truncated.parent, "--port", 0), 2)
    assert f"{truncated} is truncated" in words
    assert words == error_line(run("push", truncated, "--to", engine.url, "--version", next(versions)), 2)
    assert engine.get("/health").status_code == 200


@pytest.mark.wide  # test_openai_server.py does it under load
def test_sigterm_ends_an_engine_with_all_its_processes(models, tmp_path):
    root, _ = models
    engine = Engine(root / "old", tmp_path / "log", "--tp", "2", python=True)
    pids = {rank["pid"] for rank in engine.info()["ranks"]} | {engine.process.pid}
    assert len(pids) == 3
    assert engine.stop() == 0
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in engine.log.read_text()
