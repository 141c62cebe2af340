from __future__ import annotations

import json
import sys
import time

import pytest
from msgspec.structs import replace

from weightcast.cli.render import parse_size, progress, show_error, table
from weightcast.errors import ConfigError, TargetRejected, UpdateFailed, some
from weightcast.report import TargetReport, UpdateReport, one_line


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("64M", 64 << 20),
        ("64MB", 64_000_000),
        ("1.5GiB", 3 << 29),
        (" 2 GiB ", 2 << 30),
        ("1T", 1 << 40),
        ("7b", 7),
    ],
)
def test_sizes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "12 parsecs", "0", "0.1", "1.2.3MiB", "0x10", "1 2"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ConfigError, match=r"size|less than") as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


def test_table_cuts_nothing_off():
    wide = "x" * 300
    lines = table(("url", "version"), [(wide, "7"), ("b", "12345")]).splitlines()
    assert lines[1] == f"{wide}   7"
    assert lines[2].split() == ["b", "12345"]
    assert lines[0].index("version") == lines[2].index("12345")


def test_many_names_are_counted():
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_one_line_has_no_breaks():
    assert one_line("a\n  b\tc\n") == "a b c"


def test_error_and_hint_are_two_paragraphs_on_stderr(capsys):
    show_error(ConfigError("no such\nthing", hint="make one"), as_json=False, with_stack=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: no such thing\n\nhint: make one\n"


def test_error_as_json_has_the_attributes(capsys):
    error = TargetRejected("http://a:1 refused", url="http://a:1", half_updated=True, hint="look")
    show_error(error, as_json=True, with_stack=False)
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {
            "type": "TargetRejected",
            "message": "http://a:1 refused",
            "hint": "look",
            "url": "http://a:1",
            "half_updated": True,
        }
    }
    assert err.startswith("error: http://a:1 refused\n")


def test_failed_update_shows_its_report(capsys):
    row = TargetReport(
        url="http://a:1", engine="weightcast", version_before=1, version_after=1, message="out of memory"
    )
    report = UpdateReport(
        version=2,
        transport="ipc",
        bytes=1,
        buckets=1,
        seconds=1.0,
        phases={"open": 0.5},
        peak_extra_bytes=0,
        digest=None,
        targets=(row,),
    )
    assert "1 bucket (1 B)" in str(report)
    assert "1.0 GB/s" not in str(report)
    refused = UpdateFailed("http://a:1: out of memory", report=replace(report, buckets=0, bytes=0))
    show_error(refused, as_json=False, with_stack=False)
    out, err = capsys.readouterr()
    assert (out + err).count("out of memory") == 1
    assert out.startswith("version 2: nothing was sent")
    served = replace(report, targets=(replace(row, status="serving", version_after=2, ranks=1),))
    assert str(served).startswith("version 2: 1 B to 1 rank over ipc in 1.000 s")
    error = UpdateFailed("one of one engines failed", report=report)
    show_error(error, as_json=False, with_stack=False)
    assert "out of memory" in capsys.readouterr().out
    show_error(error, as_json=True, with_stack=False)
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["report"]["targets"][0]["status"] == "untouched"


def test_stack_on_request(capsys):
    try:
        raise ConfigError("no")
    except ConfigError as error:
        show_error(error, as_json=False, with_stack=True)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_progress_without_a_terminal_is_a_few_lines(capsys, monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter(range(0, 1_000_000, 1)).__next__)
    with progress("push") as advance:
        for done in range(1001):
            advance(done << 20, 1000 << 20)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line.split(",")[0] for line in lines] == [
        "push: 250.0 MiB of 1000.0 MiB",
        "push: 500.0 MiB of 1000.0 MiB",
        "push: 750.0 MiB of 1000.0 MiB",
        "push: 1000.0 MiB of 1000.0 MiB",
    ]


def test_progress_of_short_work_is_one_line(capsys):
    with progress("push") as advance:
        for done in range(101):
            advance(done, 100)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("push: 100 B of 100 B")


def test_a_bar_appears_with_its_total(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress("push") as advance:
        time.sleep(0.3)  # several frames, as while engines are asked and sessions open
        advance(1000, 1000)
    shown = capsys.readouterr().err
    assert "/?" not in shown
    assert "1,000/1,000 bytes" in shown


def test_progress_of_nothing(capsys):
    with progress("verify") as advance:
        advance(0, 0)
    assert capsys.readouterr().err.startswith("verify: 0 B of 0 B")
