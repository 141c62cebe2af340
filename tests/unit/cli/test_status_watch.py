"""The live table and the lines of ``status --watch``, and the parts that they are made of."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from weightcast.cli import status_watch
from weightcast.cli.status_watch import TokenRates, duration, table_of
from weightcast.update.observe import Observation, Requests, parse_requests
from weightcast.watch.events import Step
from weightcast.watch.sessions import Answered, SessionRecord
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import EngineStatus, UpdateStatus, decode_status

URL, OTHER = "http://10.0.3.7:8000", "http://10.0.3.8:8000"
UPDATE = UpdateStatus(
    version=7,
    outcome="committed",
    owner="process 4 on trainer (to version 7)",
    seconds=1.25,
    ago_s=42.0,
    bytes=16_000_000_000,
    buckets=30,
    phases={"wire": 0.8, "load": 0.2, "pause": 1e-5},
    stall_s=0.012,
)


def serving(version: int, url: str = URL, **changes) -> Observation:
    return Observation(url=url, state="serving", engine="vllm 0.32.0", version=version, since_s=42.0, **changes)


def drawn(*found: Observation, width: int = 170) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table_of(found, TokenRates(), width=width))
    return console.file.getvalue()


def test_table_has_a_row_for_each_engine_with_everything_about_it():
    load = Requests(running=3, waiting=2, tokens=100.0, at=1.0)
    shown = drawn(serving(7, update=UPDATE, requests=load), serving(5, url=OTHER))
    first, second = (line for line in shown.splitlines() if line.startswith("10.0.3."))
    for words in ("serving", "newest, 42 s", "1.25 s, 42 s ago", "wire 800 ms  load 200 ms  stall 12 ms", "12.8 GB/s"):
        assert words in first, words
    assert "3 run, 2 wait" in first
    assert "pause" not in first  # ten microseconds
    assert "2 behind" in second


@pytest.mark.parametrize("width", [170, 120, 100, 80, 60, 40])
def test_no_row_is_wrapped_in_a_narrow_terminal_and_the_version_is_always_there(width):
    load = Requests(running=3, waiting=2, tokens=100.0, at=1.0)
    shown = drawn(serving(7, update=UPDATE, requests=load), serving(5, url=OTHER), width=width).splitlines()
    assert len(shown) == 4  # head, rule and two engines
    assert all(len(line) <= width for line in shown)
    assert [line.split()[:3] for line in shown[2:]] == [
        ["10.0.3.7:8000", "serving", "7"],
        ["10.0.3.8:8000", "serving", "5"],
    ]
    assert ("phases" in shown[0]) is (width >= 150)


def test_engine_without_an_answer_or_in_quarantine_says_why_below_the_table():
    gone = Observation(url=URL, state="no answer", message=f"{URL}: cannot connect")
    bad = Observation(url=OTHER, state="quarantined", version=6, message="an update ended\nhalf way")
    shown = drawn(gone, bad)
    assert f"{URL}: cannot connect" in shown
    assert shown.count(f"{URL}: ") == 1
    assert f"{OTHER}: an update ended half way" in shown


def test_running_and_failed_updates_are_told_apart():
    def words(**changes) -> str:
        return status_watch.last_update(UpdateStatus(version=8, **({"outcome": "committed"} | changes)))

    assert words(outcome="running", seconds=0.5, buckets=3) == "to 8 for 500 ms, 3 buckets"
    assert words(outcome="running", seconds=0.5, buckets=1) == "to 8 for 500 ms, 1 bucket"
    assert words(outcome="aborted", seconds=0.5, ago_s=3.0) == "aborted after 500 ms, 3 s ago"
    assert words(outcome="committed", seconds=0.5, ago_s=300.0) == "500 ms, 5 min ago"


def test_tokens_per_second_need_two_answers_and_survive_a_restart():
    rates = TokenRates()

    def rate(tokens: float, at: float) -> float | None:
        return rates(serving(1, requests=Requests(running=1, waiting=0, tokens=tokens, at=at)))

    assert rate(100, 1.0) is None
    assert rate(300, 2.0) == 200
    assert rate(300, 2.0) == 200  # the same answer, drawn again
    assert rate(350, 2.5) == 100
    assert rate(10, 3.0) is None  # the engine has restarted
    assert rate(30, 3.5) == 40
    assert rates(serving(1)) is None


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages_are_short(value, shown):
    assert duration(value) == shown


def test_lines_come_with_changes_only(capsys):
    changes = status_watch._Changes(as_json=False)
    changes([serving(6), Observation(url=OTHER, state="asking")])
    changes([serving(6), Observation(url=OTHER, state="no answer", message=f"{OTHER}: refused")])
    changes([serving(6, requests=Requests(running=9, waiting=0, tokens=1.0, at=1.0))])
    changes([serving(7, update=UPDATE)])
    changes([serving(7, update=UPDATE)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        f"{URL} serving, version 6",
        f"{OTHER} no answer, version ?; refused",
        f"{URL} serving, version 7; last update 1.25 s, 42 s ago: wire 800 ms  load 200 ms  stall 12 ms",
    ]


def test_lines_of_json_have_every_field(capsys):
    changes = status_watch._Changes(as_json=True)
    changes([serving(7, update=UPDATE), serving(5, url=OTHER)])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["url"], first["state"], first["version"], first["behind"]) == (URL, "serving", 7, 0)
    assert first["update"]["phases"]["wire"] == 0.8
    assert second["behind"] == 2
    assert second["update"] is None


# -- what engines answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '# TYPE x gauge\nweightcast_requests_running{model="a"} 3.0\nweightcast_requests_waiting{model="a"} 1.0\n'
            'weightcast_generated_tokens_total{model="a"} 500.0\n',
            (3, 1, 500.0),
        ),
        (
            'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\nvllm:generation_tokens_total{engine="0"} 7e3\n',
            (5, 0, 7000.0),
        ),
        ("sglang:num_running_reqs 4\nsglang:num_queue_reqs 2\n", (4, 2, None)),
        ("lmdeploy:num_requests_running 1.0\nlmdeploy:generation_tokens_total NaN\n", (1, 0, None)),
        ("some_other_metric 4\n", None),
        ("<html>not found</html>", None),
        ("weightcast_requests_running garbage\n", None),
        ("", None),
    ],
)
def test_load_is_read_from_each_engines_own_metrics(text, expected):
    found = parse_requests(text.encode(), at=1.0)
    assert (found and (found.running, found.waiting, found.tokens)) == expected


def test_status_survives_json_and_fields_of_a_newer_engine():
    status = EngineStatus(engine="e", model="m", state="serving", version=7, update=UPDATE)
    assert decode_status(encode(status)) == status
    newer = json.loads(encode(status)) | {"something": "new"}
    newer["update"]["more"] = 1
    assert decode_status(json.dumps(newer).encode()) == status


def bucket(index: int, **changes) -> Answered:
    fields = dict(session="abcd", message="bucket", bucket=index, bytes=100, began=10.0, ended=11.0, ok=True)
    return Answered(**(fields | changes))


def test_session_record_counts_what_arrived_and_the_slowest_rank():
    record = SessionRecord(session="abcd", version=7, owner="process 4", began=10.0, began_unix_s=0.0)
    record.add(
        bucket(0, steps=(Step("load", 0, 1.0, 1.5, 0), Step("load", 1, 1.0, 1.2, 0), Step("wire", 1, 0.0, 0.1, 0)))
    )
    record.add(bucket(1, steps=(Step("load", 0, 2.0, 2.5, 1), Step("load", 1, 2.0, 2.9, 1))))
    record.add(bucket(2, ok=False))
    assert (record.outcome, record.buckets, record.bytes) == (None, 2, 200)
    assert record.phases() == {"load": pytest.approx(1.1), "wire": pytest.approx(0.1)}
