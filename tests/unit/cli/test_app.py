from __future__ import annotations

import http.server
import json
import socket
import threading

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weightcast import __version__
from weightcast.adapters.registry import OURS
from weightcast.cli.app import app
from weightcast.cli.options import targets
from weightcast.errors import ConfigError

COMMANDS = ("demo", "serve", "push", "verify", "plan", "doctor", "status")


def run(*args, **kwargs):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="weightcast", **kwargs)


def one_error(result):
    """The error's line, after making sure that it is one, with at most a hint and no stack."""
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    rest = lines[lines.index(errors[0]) + 1 :]
    assert rest == [] or (rest[0] == "" and rest[1].startswith("hint: ") and len(rest) == 2), result.stderr
    return errors[0]


@pytest.fixture
def closed_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return port


@pytest.fixture
def other_server():
    """A web server that is no engine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_help_lists_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--traceback" in result.stdout
    assert f"\n  weightcast {command}" in result.stdout


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"weightcast {__version__}\n")


def test_no_command_is_no_success():
    result = run()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["psuh"], "no such command 'psuh'"),
        (["push"], "CHECKPOINT"),
        (["push", "x", "--version", "1"], "--to"),
        (["push", "x", "--to", "http://a:1"], "--version"),
        (["push", "x", "--to", "http://a:1", "--version", "seven"], "'--version'"),
        (["push", "x", "--nonsense"], "--nonsense"),
        (["verify", "x"], "--at"),
        (["status"], "URL"),
        (["serve"], "MODEL"),
        (["serve", "x", "--port", "http"], "'--port'"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(args, says):
    result = run(*args)
    assert says in one_error(result)
    assert result.exit_code == 2
    assert "--help" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["push", "x", "--to", "127.0.0.1:1", "--version", "1"], "not an http URL"),
        (["push", "x", "--to", "http://a:99999", "--version", "1"], "a:99999"),
        (["push", "x", "--to", "http://a:1", "--to", "http://a:1/", "--version", "1"], "named twice"),
        (["push", "x", "--to", "http://a:1", "--version", "1", "--bucket-bytes", "12 parsecs"], "12 parsecs"),
        (["push", "x", "--to", "http://a:1", "--version", "-1"], "-1"),
        (["push", "x", "--to", "http://a:1", "--version", "1", "--dtype", "int8"], "--dtype int8"),
        (["push", "x", "--to", "http://a:1", "--version", "1", "--device", "tpu"], "--device tpu"),
        (["push", "x", "--to", "http://a:1", "--version", "1", "--api-key", "a", "--api-key", "b"], "2 API keys"),
        (["plan", "x", "--engine", "abacus"], "abacus"),
        (["plan", "x", "--targets", "0"], "at least 1"),
        (["plan", "x", "--link-gb-per-s", "0"], "positive"),
        (["plan", "x"], "x does not exist"),
        (["trace", "x.json"], "cannot read x.json: No such file or directory"),
        (["demo", "--modes", "sideways"], "sideways"),
        (["demo", "--steps", "0"], "steps=0"),
        (["demo", "--model", "nowhere"], "nowhere"),
        (["serve", "x", "--port", "70000"], "70000"),
        (["serve", "x", "--tp", "0"], "tp=0"),
        (["serve", "x", "--executor", "beam"], "choose one of auto, local, mp, ray"),
        (["serve", "x", "--bundles", "1,0"], "need --executor ray"),
        (["serve", "x", "--executor", "ray", "--bundles", "1,0"], "placement group"),
        (["serve", "x", "--executor", "ray", "--placement-group", "mine"], "finds a name only in its namespace"),
        (["serve", "x", "--executor", "ray", "--placement-group", "my/own", "--bundles", "1,x"], "1,x"),
        (["serve", "x", "--staging", "attic"], "attic"),
        (["serve", "nowhere", "--port", "0"], "nowhere"),
        (["status", "nowhere"], "nowhere"),
        (["doctor", "http://a:0"], "port 0"),
    ],
)
def test_mistakes_are_one_line(args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert says in one_error(result)
    assert result.exit_code == 2


def test_mistake_as_json():
    result = run("plan", "x", "--targets", "0", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "ConfigError"


@pytest.mark.parametrize("args", [("push", "x", "--to", "http://a:1"), ("push", "x", "--wrong"), ("status",)])
def test_a_missing_or_unknown_option_is_a_json_document_too(args):
    result = run(*args, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert f"error: {error['message']}" == one_error(result)
    assert error["hint"].startswith("see `weightcast ")


@pytest.fixture
def hostile_server():
    """Its errors clear the screen, set the clipboard, colour their text and begin another line."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            words = "\x1b[2J\x1b]52;c;cm0gLXJmIH4=\x07\x9b32m\r\nok    all engines serve version 7"
            body = json.dumps({"error": {"message": words}}).encode()
            self.send_response(500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("command", ["status", "doctor", "verify", "push"])
def test_no_server_writes_to_the_terminal_what_it_likes(command, as_json, hostile_server, tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    args = {"verify": (tmp_path, "--at"), "push": (tmp_path, "--version", 1, "--to")}.get(command, ())
    result = run(command, *args, hostile_server, *as_json)
    assert result.exit_code == 1
    assert "all engines serve version 7" in result.output
    assert "\\x1b[2J" in result.output
    for text in (result.stdout, result.stderr):
        assert all(letter.isprintable() or letter == "\n" for letter in text), text
        assert not any(line.startswith("ok") for line in text.splitlines())


def test_stack_on_request():
    result = run("plan", "x", "--targets", "0", "--traceback")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr


def test_verify_of_nothing_is_wrong_usage_and_of_nobody_a_failure(closed_port, tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    result = run("verify", tmp_path, "--at", f"http://127.0.0.1:{closed_port}")
    assert "cannot connect" in one_error(result)
    assert result.exit_code == 1
    result = run("verify", "nowhere", "--at", f"http://127.0.0.1:{closed_port}")
    assert "nowhere does not exist" in one_error(result)
    assert result.exit_code == 2


def test_status_of_nobody(closed_port):
    url = f"http://127.0.0.1:{closed_port}"
    result = run("status", url)
    assert "cannot connect" in one_error(result)
    assert "no answer" in result.stdout
    result = run("status", url, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["ok"] is False
    assert document["engines"][0]["reachable"] is False
    assert document["engines"][0]["error"]["type"] == "TargetUnreachable"


def test_status_of_another_server(other_server):
    result = run("status", other_server)
    assert "not an engine that weightcast can update" in one_error(result)


def test_status_of_a_named_kind_that_the_server_is_not_says_who_would_ask_for_all(other_server):
    result = run("status", other_server, "--engine", "vllm")
    assert "not an engine that weightcast can update as vllm" in one_error(result)
    assert "leave the kind out" in result.stderr


@pytest.mark.parametrize("command", ["push", "status", "doctor"])
def test_help_lists_every_kind_of_engine(command):
    words = "".join(run(command, "--help").stdout.split())
    assert "auto|" + "|".join(kind.name for kind in OURS) in words


def test_doctor_of_nobody(closed_port):
    result = run("doctor", f"http://127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert "fail  reachable" in result.stdout
    assert "hint: reachable: " in result.stdout


def test_doctor_of_another_server_as_json(other_server):
    result = run("doctor", other_server, "--json")
    assert result.exit_code == 1
    (engine,) = json.loads(result.stdout)["engines"]
    levels = {check["name"]: check["level"] for check in engine["checks"]}
    assert levels == {"reachable": "ok", "receiver": "fail"}
    assert engine["checks"][1]["hint"]


def test_keys_go_to_their_engines():
    assert [target.api_key for target in targets(["http://a:1", "http://b:1"], ["one"])] == ["one", "one"]
    assert [target.api_key for target in targets(["http://a:1", "http://b:1"], ["one", "two"])] == ["one", "two"]
    assert [target.api_key for target in targets(["http://a:1"], None)] == [None]
    with pytest.raises(ConfigError, match="3 API keys were given for 2 engines"):
        targets(["http://a:1", "http://b:1"], ["one", "two", "three"])


@pytest.mark.parametrize(
    ("arguments", "steps"), [([], 12), (["--quick"], 3), (["--quick", "--steps", "5"], 5), (["--steps", "2"], 2)]
)
def test_a_quick_demo_takes_fewer_steps_in_both_modes(arguments, steps, monkeypatch, tmp_path):
    from weightcast.lab import demo

    asked: list[demo.DemoConfig] = []
    monkeypatch.setattr(demo, "run_demo", lambda config, console: asked.append(config) or 0)
    assert run("demo", "--out", tmp_path, *arguments).exit_code == 0
    assert [(config.steps, config.modes) for config in asked] == [(steps, ("colocated", "disaggregated"))]


def test_the_demo_says_where_vllm_is():
    result = run("demo", "--engine", "vllm")
    assert "examples/rl_disaggregated.py --engine vllm" in result.stderr
    assert result.exit_code == 2
