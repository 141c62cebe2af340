"""A timeline puts steps of all processes on the head's clock, and no two spans of a row overlap."""

from __future__ import annotations

import json
import pickle

import msgspec
import pytest

from tests.helpers.trace_format import check_format
from weightcast.report import UpdateReport
from weightcast.timeline.perfetto import Update, trace_of
from weightcast.timeline.tracks import PhaseSpan, Timeline, Track
from weightcast.watch import recording
from weightcast.watch.events import Asked, Step, StepEnded, UpdateStarted
from weightcast.watch.listeners import Events
from weightcast.watch.recording import RankEnd

URL, OTHER = "http://10.0.0.7:8000", "http://10.0.0.8:8000"
BOOT = 5000.0  # the engine's host started so much earlier than the head's


def recorder(targets=(URL,)) -> Events:
    found = Events()
    found.emit(UpdateStarted(version=3, transport="broadcast", targets=targets, rank=0, at=100.0, time_s=1.7e9))
    return found


def asked(message, began, ended, *, target=URL, bucket=None, steps=(), boot=BOOT, way=0.001, error=""):
    return Asked(
        target=target,
        message=message,
        bucket=bucket,
        began=began,
        ended=ended,
        ok=not error,
        error=error,
        heard=None if error else began + way + boot,
        answered=None if error else ended - way + boot,
        steps=steps,
    )


def row(timeline: Timeline, process: str, name: str) -> Track:
    [found] = [track for track in timeline.tracks if (track.process, track.name) == (process, name)]
    return found


def test_steps_of_an_engine_are_moved_to_the_clock_of_the_head():
    found = recorder()
    inside = (Step("wire", 0, 100.2 + BOOT, 100.3 + BOOT, 0), Step("load", 0, 100.3 + BOOT, 100.35 + BOOT, 0))
    found.emit(asked("bucket", 100.1, 100.4, bucket=0, steps=inside))
    rank = row(found.recording.timeline(), URL, "rank 0")
    assert [span.name for span in rank.spans] == ["wire", "load"]
    error = rank.clock_error_us
    assert 900 <= error <= 1100  # the way there and back takes 1 ms each
    assert rank.spans[0].start_us == pytest.approx(200_000, abs=error)
    assert [span.us for span in rank.spans] == [pytest.approx(100_000, abs=1), pytest.approx(50_000, abs=1)]


def test_ranks_on_a_third_host_are_aligned_with_their_server_and_add_its_error():
    third = BOOT + 777.0
    found = recorder()
    for number in range(3):
        at = 100.1 + number
        steps = (Step("load", 1, at + 0.01 + third, at + 0.29 + third, number),)
        found.emit(asked("bucket", at, at + 0.3, bucket=number, steps=steps))
    server, rank = row(found.recording.timeline(), URL, "messages"), row(found.recording.timeline(), URL, "rank 1")
    assert rank.clock_error_us > server.clock_error_us > 0
    for number, span in enumerate(rank.spans):
        assert span.start_us == pytest.approx((0.11 + number) * 1e6, abs=rank.clock_error_us)


def test_processes_of_the_same_host_have_no_error():
    found = recorder()
    found.emit(asked("bucket", 100.1, 100.4, bucket=0, steps=(Step("load", 0, 100.2, 100.3, 0),), boot=0.0))
    assert found.recording.timeline().clock_error_us == 0
    assert row(found.recording.timeline(), URL, "rank 0").spans == (PhaseSpan("load", 200_000, 100_000, 0),)


def test_an_answer_to_commit_that_is_repeated_later_does_not_move_the_rank():
    found = recorder()
    for at in (100.1, 100.5):
        found.emit(asked("bucket", at, at + 0.3, bucket=0, steps=(Step("load", 0, at + 0.1, at + 0.2, 0),), boot=0.0))
    found.emit(asked("commit", 103.0, 103.2, steps=(Step("switch", 0, 101.0, 101.1),), boot=0.0))
    rank = row(found.recording.timeline(), URL, "rank 0")
    assert rank.clock_error_us == 0
    assert rank.spans[-1] == PhaseSpan("switch", 1_000_000, 100_000)


def test_overlapping_messages_get_rows_of_their_own():
    found = recorder()
    for number in range(4):  # two are under way at any time
        found.emit(asked("bucket", 100.0 + 0.1 * number, 100.19 + 0.1 * number, bucket=number, boot=0.0))
    timeline = found.recording.timeline()
    assert [track.name for track in timeline.tracks if track.side == "engine"] == ["messages", "messages (2)"]
    for track in timeline.tracks:
        for before, after in zip(track.spans, track.spans[1:], strict=False):
            assert before.end_us <= after.start_us


def test_a_failed_message_says_why_and_a_stock_engine_has_the_heads_row_alone():
    found = recorder((URL, OTHER))
    found.emit(asked("bucket", 100.1, 100.2, bucket=0, error="refused: out of memory"))
    timeline = found.recording.timeline()
    assert [(track.side, track.name) for track in timeline.tracks] == [("trainer", f"messages to {URL}")]
    assert timeline.tracks[0].spans[0].error == "refused: out of memory"


def test_one_rank_fills_and_several_gather_and_wait():
    found = recorder()
    found.emit(StepEnded(step=Step("gather", 0, 100.1, 100.2, 0)))
    assert [span.name for span in found.recording.timeline().tracks[0].spans] == ["fill"]
    other = RankEnd(rank=1, steps=(Step("gather", 1, 9100.1, 9100.2, 0),), heard=9100.5, answered=9100.5)
    timeline = found.recording.timeline([other], asked_at=100.4999, told_at=100.5001)
    assert [span.name for span in row(timeline, "trainer", "rank 0").spans] == ["wait", "gather"]
    follower = row(timeline, "trainer", "rank 1")
    assert [span.name for span in follower.spans] == ["wait", "gather", "wait"]
    assert follower.clock_error_us == pytest.approx(100, abs=1)
    assert follower.spans[1].start_us == pytest.approx(100_000, abs=follower.clock_error_us)


def test_the_time_between_pause_and_resume_is_a_stall():
    found = recorder()
    steps = (Step("pause", None, 100.1, 100.15), Step("resume", None, 100.3, 100.31))
    found.emit(asked("commit", 100.0, 100.4, steps=steps, boot=0.0))
    server = row(found.recording.timeline(), URL, "server")
    assert [(span.name, span.us) for span in server.spans] == [
        ("pause", 50_000),
        ("stall", 150_000),
        ("resume", 10_000),
    ]


def test_an_update_forgets_the_one_before():
    found = recorder()
    found.emit(StepEnded(step=Step("open", 0, 100.1, 100.2)))
    found.emit(UpdateStarted(version=4, transport="ipc", targets=(URL,), rank=0, at=200.0, time_s=1.8e9))
    found.emit(StepEnded(step=Step("open", 0, 200.5, 200.6)))
    timeline = found.recording.timeline()
    assert timeline.began_unix_s == 1.8e9
    assert [span.start_us for span in timeline.tracks[0].spans] == [500_000]


def test_memory_is_bounded_and_what_is_left_out_is_said(monkeypatch):
    monkeypatch.setattr(recording, "MAX_STEPS", 10)
    monkeypatch.setattr(recording, "MAX_SPANS", 5)
    found = recorder()
    for number in range(8):
        at = 100.0 + number
        steps = (Step("wire", 0, at + 0.1, at + 0.2, number), Step("load", 0, at + 0.2, at + 0.3, number))
        found.emit(asked("bucket", at, at + 0.5, bucket=number, steps=steps, boot=0.0))
    timeline = found.recording.timeline()
    rank = row(timeline, URL, "rank 0")
    assert (len(rank.spans), rank.dropped) == (5, 5)  # ten steps were kept, and five are shown
    assert "left out" in timeline.note


# -- the trace


def a_timeline() -> Timeline:
    found = recorder()
    found.emit(StepEnded(step=Step("send", 0, 100.05, 100.45, 0)))
    steps = (Step("wire", 0, 100.2, 100.3, 0), Step("load", 0, 100.3, 100.35, 0))
    found.emit(asked("bucket", 100.1, 100.4, bucket=0, steps=steps))
    return found.recording.timeline()


def report(timeline: Timeline | None = None, **fields) -> UpdateReport:
    known = dict(
        version=3, transport="broadcast", bytes=10, buckets=1, seconds=0.5, phases={}, peak_extra_bytes=0, digest=None
    )
    found = UpdateReport(**(known | fields), targets=())
    return found if timeline is None else found.with_timeline(lambda: timeline)


def pickled(found: UpdateReport) -> UpdateReport:
    return pickle.loads(pickle.dumps(found))


def test_the_trace_names_every_process_and_row_and_states_the_error(tmp_path):
    path = report(timeline=a_timeline()).to_perfetto(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    check_format(trace)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["updates", "trainer", f"engine {URL}"]
    rows = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert any(name.startswith("rank 0 (clock ± ") for name in rows)
    assert trace["otherData"]["largest clock error, us"] > 0
    slices = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert set(slices) == {"version 3", "send", "bucket 0", "wire", "load"}
    assert slices["wire"]["args"] == {"bucket": 0}


def test_an_arrow_leads_from_the_heads_message_to_the_engine():
    trace = trace_of([Update(version=3, timeline=a_timeline())])
    start, end = (next(event for event in trace["traceEvents"] if event["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"]
    assert start["pid"] != end["pid"]
    assert start["ts"] < end["ts"]


def test_several_updates_stand_at_their_times_of_day():
    first = a_timeline()
    second = msgspec.structs.replace(first, began_unix_s=first.began_unix_s + 60)
    trace = trace_of([Update(version=3, seconds=0.5, timeline=first), Update(version=4, timeline=second)])
    check_format(trace)
    starts = {event["name"]: event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert starts["version 4"] - starts["version 3"] == 60_000_000
    ids = [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(set(ids)) == len(ids) == 2


def test_a_report_without_a_timeline_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="trainer rank 0"):
        report().to_perfetto(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("copied", [lambda found: UpdateReport.from_json(found.to_json()), pickled])
def test_a_timeline_survives_json_and_pickle(copied):
    before = report(timeline=a_timeline())
    after = copied(before)
    assert after == before
    assert after.timeline == before.timeline == a_timeline()


def test_a_timeline_ends_where_its_attempt_did():
    found = recorder()
    found.emit(asked("commit", 100.1, 100.2))
    found.emit(asked("leave", 100.3, 100.4))
    assert found.recording.timeline(told_at=100.25).end_us == 200_000
    assert found.recording.timeline().end_us == 400_000


def test_a_timeline_is_the_same_whenever_it_is_read():
    found = report().with_timeline(a_timeline)
    assert found.timeline is found.timeline
    assert report().timeline == Timeline()
