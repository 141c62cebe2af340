"""Commands of an operator: ``status --watch``, ``push --trace --html`` and ``trace``, against reference engines."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import ENVIRONMENT, Engine, completion, engines
from tests.helpers.pages import check_alone
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from tests.helpers.trace_format import check_format
from weightcast.cli.app import app

STOCK = {"dialect": "sglang", "staging": "none", "device": "cpu"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new")):
        tiny_model(root / name, seed=seed)
        tiny_tokenizer(root / name)
    return root


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory) -> Iterator[list[Engine]]:
    """An engine with two ranks and one with one."""
    with engines(models / "old", tmp_path_factory.mktemp("logs"), {"tp": 2}, {"tp": 1}) as found:
        yield found


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return iter(range(1, 1000))


def run(*arguments: object):
    """A command in this process."""
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="weightcast")


def to(*found: Engine) -> list[str]:
    return [part for engine in found for part in ("--to", engine.url)]


def heed_ctrl_c() -> None:
    """In the new process: a shell that runs tests in the background has it ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Watching:
    """``weightcast status --watch`` as a user starts it, with its output in a pipe."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "weightcast", "status", "--watch", "--interval", "0.1", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            preexec_fn=heed_ctrl_c,
        )
        self.lines: list[str] = []
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()

    def until(self, true: Callable[[list[str]], bool], what: str) -> None:
        with self._came:
            assert self._came.wait_for(lambda: true(self.lines), PATIENCE_S), f"no line about {what}: {self.lines}"

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Ctrl-C; the exit code and what it said on stderr."""
        assert self.process.stderr is not None
        try:
            self.process.send_signal(number)
            code = self.process.wait(PATIENCE_S)
            self._reader.join(PATIENCE_S)
            return code, self.process.stderr.read()
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process.stderr.close()


def test_watch_prints_a_line_for_each_change_and_ends_with_ctrl_c(pair, models, versions):
    one, two = pair
    version = next(versions)
    assert run("push", models / "new", *to(*pair), "--version", version).exit_code == 0
    watching = Watching(one.url, two.url)
    try:
        watching.until(lambda lines: len(lines) >= 2, "the first look")
        first = sorted(watching.lines)
        assert all(f"serving, version {version}; last update" in line for line in first), first
        time.sleep(1.0)  # ten looks at engines that do not change
        assert sorted(watching.lines) == first
        later = next(versions)
        assert run("push", models / "old", *to(one), "--version", later).exit_code == 0
        watching.until(
            lambda lines: any(f"{one.url} serving, version {later}" in line for line in lines), "the new version"
        )
    finally:
        code, complaints = watching.end()
    assert (code, complaints) == (0, "")
    assert not any("\x1b" in line for line in watching.lines)
    changed = [line for line in watching.lines if f"{one.url} serving, version {later}" in line]
    assert len(changed) == 1
    for phase in ("verify", "stall"):
        assert f"{phase} " in changed[0]
    assert run("push", models / "old", *to(two), "--version", later).exit_code == 0


def test_watch_as_json_has_the_update_and_the_load(pair, models, versions):
    one, two = pair
    version = next(versions)
    generating = threading.Thread(target=lambda: one.post("/v1/completions", **completion([[5, 17, 30]], 200)))
    watching = Watching(one.url, two.url, "--json")
    try:
        watching.until(lambda lines: len(lines) >= 2, "the first look")
        generating.start()
        assert run("push", models / "new", *to(one), "--version", version, "--pause", "in_place").exit_code == 0
        watching.until(lambda lines: any(json.loads(line)["version"] == version for line in lines), "the new version")
    finally:
        code, complaints = watching.end()
        generating.join()
    assert (code, complaints) == (0, "")
    found = [json.loads(line) for line in watching.lines]
    last = next(each for each in reversed(found) if each["url"] == one.url)
    assert (last["state"], last["behind"]) == ("serving", 0)
    assert last["update"]["outcome"] == "committed"
    assert last["update"]["bytes"] > 100_000
    assert {"wire", "load", "verify", "switch", "pause", "resume"} <= set(last["update"]["phases"])
    assert last["requests"]["running"] >= 0
    assert last["requests"]["tokens"] is not None
    assert [each["behind"] for each in found if each["url"] == two.url] == [0]
    assert run("push", models / "new", *to(two), "--version", version).exit_code == 0


def test_watch_sees_an_engine_go_while_the_other_one_serves(pair, models, tmp_path):
    one, _ = pair
    with engines(models / "old", tmp_path, {"tp": 1}) as [extra]:
        watching = Watching(one.url, extra.url)
        try:
            watching.until(lambda lines: len(lines) >= 2, "the first look")
            extra.stop()
            watching.until(lambda lines: f"{extra.url} no answer" in lines[-1], "the engine that is gone")
        finally:
            code, complaints = watching.end()
    assert (code, complaints) == (0, "")
    assert len([line for line in watching.lines if one.url in line.split(";")[0]]) == 1


def test_watch_ends_when_its_reader_goes(pair):
    command = [sys.executable, "-m", "weightcast", "status", pair[0].url, "http://127.0.0.1:9", "--watch"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=heed_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline()
            process.stdout.close()
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)  # it may have nothing more to write, which would tell it
            assert process.wait(PATIENCE_S) in (0, 1, -signal.SIGINT)  # the signal may find it ending already
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_watch_on_a_terminal_draws_a_table_in_place_and_leaves_the_cursor(pair, models, versions):
    one, two = pair
    version = next(versions)
    assert run("push", models / "old", *to(*pair), "--version", version).exit_code == 0
    child, terminal = pty.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update(ENVIRONMENT, TERM="xterm-256color", COLUMNS="100", LINES="40")
        os.environ.pop("NO_COLOR", None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that runs the tests in the background ignores it
        command = [sys.executable, "-m", "weightcast", "status", one.url, two.url, "--watch", "--interval", "0.1"]
        os.execv(command[0], command)
    shown = b""

    def until(words: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + PATIENCE_S
        while words.encode() not in shown:
            assert time.monotonic() < deadline, shown[-2000:].decode(errors="replace")
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 1 << 16)

    try:
        until("staleness")
        until("newest")
        later = next(versions)
        assert run("push", models / "new", *to(one), "--version", later).exit_code == 0
        until("1 behind")
        os.write(terminal, b"\x03")  # Ctrl-C
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
            assert time.monotonic() < deadline
        _, state = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(state) == 0
    assert b"\x1b[2K" in shown  # rows are drawn anew in their place
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")  # the cursor is back
    assert b"Traceback" not in shown
    assert run("push", models / "new", *to(two), "--version", later).exit_code == 0


def test_watch_shows_a_stock_engine_by_what_it_tells(models, tmp_path):
    with engines(models / "old", tmp_path, STOCK) as [stock]:
        watching = Watching(stock.url, "--json", "--engine", "sglang")
        try:
            watching.until(lambda lines: len(lines) >= 1, "the first look")
        finally:
            code, _ = watching.end()
    assert code == 0
    found = json.loads(watching.lines[0])
    assert found["state"] == "serving"
    assert found["engine"].startswith("sglang")
    assert found["update"] is None


# -- push and trace


@pytest.fixture(scope="module")
def pushed(pair, models, versions, tmp_path_factory) -> tuple[Path, int]:
    """A folder with what ``push`` wrote, in a process as a user starts it, and the version."""
    folder = tmp_path_factory.mktemp("pushed")
    version = next(versions)
    command = [sys.executable, "-m", "weightcast", "push", str(models / "new"), *to(*pair), "--version", str(version)]
    command += ["--json", "--bucket-bytes", "96KiB", "--trace", str(folder / "trace.json")]
    command += ["--html", str(folder / "update.html"), "--allow-older"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "report.json").write_text(done.stdout)
    assert "https://ui.perfetto.dev" in done.stderr
    return folder, version


def test_push_writes_a_trace_and_a_page(pushed, pair):
    folder, version = pushed
    trace = json.loads((folder / "trace.json").read_text())
    check_format(trace)
    slices = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {f"version {version}", "open", "fill", "send", "wire", "load", "verify", "switch", "resume"} <= set(slices)
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert named.count("rank 0") == 3  # the trainer's, and one of each engine
    assert named.count("rank 1") == 1
    html = (folder / "update.html").read_text()
    check_alone(html)
    assert f"Update to version {version}" in html
    assert "What every rank did" in html
    assert all(engine.url in html for engine in pair)


def test_saved_report_becomes_the_same_trace_again(pushed, tmp_path):
    folder, version = pushed
    done = run("trace", folder / "report.json", "--out", tmp_path / "again.json")
    assert done.exit_code == 0, done.output
    assert f"version {version}, " in done.stdout
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads((folder / "trace.json").read_text())
    page = run("trace", folder / "report.json", "-o", tmp_path / "again.html")
    assert page.exit_code == 0
    assert (tmp_path / "again.html").read_text() == (folder / "update.html").read_text()


def test_trace_without_a_file_prints_a_table_and_json_counts(pushed, pair):
    folder, version = pushed
    shown = run("trace", folder / "report.json").stdout.splitlines()
    assert shown[0].startswith(f"version {version}: ")
    assert [word for word in shown[1].split() if word in ("fill", "load", "switch")] == ["fill", "load", "switch"]
    assert sum(line.startswith(engine.url) and " rank " in line for line in shown for engine in pair) == 3
    counted = json.loads(run("trace", folder / "report.json", "--json").stdout)
    assert counted["updates"] == [version]
    assert counted["spans"] > 50
    assert counted["clock_error_us"] == 0


def test_lines_of_reports_are_read_from_stdin_as_a_user_pipes_them(pushed, tmp_path):
    folder, version = pushed
    line = json.dumps(json.loads((folder / "report.json").read_text()))
    command = [sys.executable, "-m", "weightcast", "trace", "-", "-o", str(tmp_path / "run.html")]
    done = subprocess.run(
        command,
        input=f"{line}\n{line}\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"2 updates, versions {version} to {version}" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("not json", "document 1 is not the report of an update"),
        ('{"some": "thing"}', "document 1 is not the report of an update"),
        ('{"version": 1}\n{"version": "x"}', "document 2 is not the report of an update"),
        ('{"version": 1}', "no timeline was recorded"),
        ('{"error": {"message": "cannot connect"}}', "document 1 is not the report of an update"),
    ],
)
def test_trace_refuses_what_is_no_report_and_writes_nothing(content, said, tmp_path):
    (tmp_path / "in.json").write_text(content)
    done = run("trace", tmp_path / "in.json", "-o", tmp_path / "out.json")
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("option", ["--trace", "--html"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_moves(option, pair, models, tmp_path):
    before = pair[0].info()["version"]
    done = run("push", models / "new", *to(pair[0]), "--version", 900, option, tmp_path / "absent" / "file")
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    assert pair[0].info()["version"] == before
    folder = run("push", models / "new", *to(pair[0]), "--version", 900, option, tmp_path)
    assert folder.exit_code == 2
    assert "is a folder" in folder.stderr
    assert pair[0].info()["version"] == before


def test_failed_push_writes_what_every_rank_did_until_then(models, tmp_path):
    refusal = STOCK | {"faults": "refuse@/update_weights_from_tensor#2"}
    with engines(models / "old", tmp_path, STOCK, refusal) as [good, bad]:
        done = run(
            *("push", models / "new", *to(good, bad), "--version", 1, "--via", "ipc", "--engine", "sglang"),
            *("--bucket-bytes", "256KiB", "--timeout", "30", "--verify", "none", "--json"),
            *("--trace", tmp_path / "trace.json", "--html", tmp_path / "update.html"),
        )
        assert done.exit_code == 1, done.output
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    failed = [event for event in trace["traceEvents"] if "error" in event.get("args", {})]
    assert any("refused" in event["args"]["error"] for event in failed)
    assert "quarantined" in (tmp_path / "update.html").read_text()
    (tmp_path / "failed.json").write_text(done.stdout)  # {"error": {..., "report": {...}}}
    again = run("trace", tmp_path / "failed.json", "-o", tmp_path / "again.json")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again.json").read_text()) == trace
