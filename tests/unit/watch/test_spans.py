"""Spans of both halves, with OpenTelemetry's own SDK and its exporter in memory."""

from __future__ import annotations

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from tests.helpers.tracing import plain, spans_in_memory, tree
from tests.helpers.watching import A, B, end_session, ended, report, row, started, tell_session, trainer_events
from weightcast.watch import later
from weightcast.watch.events import Asked, AttemptStarted
from weightcast.watch.listeners import Events
from weightcast.watch.sessions import Answered
from weightcast.watch.spans import EngineSpans

TRAINER_TREE = [
    [
        "weightcast.update",
        ["weightcast.commit"],
        ["weightcast.gather"],
        ["weightcast.send"],
        ["weightcast.target"],
        ["weightcast.target"],
    ]
]
ENGINE_TREE = [
    [
        "weightcast.session",
        ["weightcast.load"],
        ["weightcast.load"],
        ["weightcast.pause"],
        ["weightcast.wire"],
        ["weightcast.wire"],
    ]
]


@pytest.fixture
def exporter(monkeypatch):
    with spans_in_memory(monkeypatch) as found:
        yield found


def told(watching, events, *, settles=True):
    for event in events:
        watching.emit(event)
    if settles:
        later.settle()


def told_engine(outcome="committed", *, traceparent=""):
    tell_session(EngineSpans(), outcome, traceparent=traceparent)
    later.settle()


def exported(exporter):
    return [plain(span) for span in exporter.get_finished_spans()]


def test_an_update_is_one_tree_with_phases_and_targets(exporter):
    told(Events(), trainer_events())
    spans = exported(exporter)
    assert tree(spans) == TRAINER_TREE
    assert len({span["trace"] for span in spans}) == 1
    [root] = [span for span in spans if span["name"] == "weightcast.update"]
    assert root["values"]["weightcast.version"] == 7
    assert root["values"]["weightcast.outcome"] == "partial"
    assert root["ended"] - root["began"] == pytest.approx(2e9)
    [gather] = [span for span in spans if span["name"] == "weightcast.gather"]
    assert gather["ended"] - gather["began"] == pytest.approx(
        0.4e9
    )  # the first begins at 10.2, the second ends at 10.6
    assert gather["values"]["weightcast.seconds"] == pytest.approx(0.2)
    assert gather["values"]["weightcast.count"] == 2
    assert gather["began"] == pytest.approx(1010.2e9)  # the clock of the wall
    targets = {span["values"]["weightcast.target"]: span for span in spans if span["name"] == "weightcast.target"}
    assert (targets[A]["error"], targets[B]["error"]) == (None, "out of memory")
    assert targets[A]["kind"] == "CLIENT"
    assert [name for name, _ in targets[A]["events"]] == ["weightcast.open", "weightcast.buckets", "weightcast.commit"]
    assert targets[A]["events"][1][1] == pytest.approx({"weightcast.seconds": 0.6, "weightcast.count": 2})


def test_the_next_update_does_not_disturb_the_spans_of_the_one_before(exporter):
    watching = Events()
    told(watching, trainer_events(), settles=False)
    told(watching, [started(version=8, at=30.0), ended("failed", version=8, at=31.0)])
    first, second = [span for span in exported(exporter) if span["name"] == "weightcast.update"]
    assert (first["values"]["weightcast.version"], second["values"]["weightcast.version"]) == (7, 8)
    assert first["ended"] == pytest.approx(1012e9)
    assert tree(exported(exporter))[0] == TRAINER_TREE[0]
    assert first["trace"] != second["trace"]


def test_a_failed_update_says_so(exporter):
    told(Events(), [started(), ended("failed", error="no target is active", error_kind="ConfigError")])
    [root] = [span for span in exported(exporter) if span["name"] == "weightcast.update"]
    assert root["error"] == "ConfigError: no target is active"


def test_each_attempt_has_targets_of_its_own(exporter):
    first, second = (
        AttemptStarted(number=number, session="0" * 8, version=7, targets=targets, at=10.0 + number)
        for number, targets in ((1, (A, B)), (2, (A,)))
    )
    told(Events(), [started(), first, second, ended("failed")])
    spans = exported(exporter)
    assert [span["name"] for span in spans].count("weightcast.target") == 3
    assert spans[-1]["values"]["weightcast.attempts"] == 2


def test_a_message_belongs_to_the_attempt_in_which_it_was_sent(exporter):
    first, second = (
        AttemptStarted(number=number, session="0" * 8, version=7, targets=(A,), at=10.0 + number) for number in (1, 2)
    )
    sent = [(10.5, 10.6, "join"), (11.1, 12.1, "open"), (12.2, 12.5, "commit"), (12.6, 14.0, "abort")]
    asked = [Asked(target=A, message=name, began=began, ended=end, ok=True) for began, end, name in sent]
    # The answer to `open` comes in the second attempt, and that to `abort` after the update.
    done = ended("succeeded", report(row(A)), at=13.0)
    order = [
        started(),
        asked[0],
        first,
        second,
        asked[1],
        asked[2],
        done,
        asked[3],
    ]
    told(Events(), order)
    targets = [span for span in exported(exporter) if span["values"].get("weightcast.target") == A]
    targets.sort(key=lambda span: span["began"])
    names = [[name.removeprefix("weightcast.") for name, _ in span["events"]] for span in targets]
    assert names == [["join", "open"], ["commit"]]
    assert [span["ended"] for span in targets] == pytest.approx([1012.1e9, 1012.5e9])


def test_an_update_continues_the_callers_span_and_gives_it_back(exporter):
    tracer = opentelemetry.trace.get_tracer("trainer")
    watching = Events()
    with tracer.start_as_current_span("step") as step:
        begin, *rest, end = trainer_events()
        told(watching, [begin])
        inside = opentelemetry.trace.get_current_span()
        with tracer.start_as_current_span("a callback of the trainer"):
            told(watching, rest)
        told(watching, [end])
        assert opentelemetry.trace.get_current_span() is step
    spans = exported(exporter)
    names = {span["id"]: span["name"] for span in spans}
    parents = {span["name"]: names.get(span["parent"]) for span in spans}
    assert parents["weightcast.update"] == "step"
    assert parents["a callback of the trainer"] == "weightcast.update"
    assert inside is not step


def test_an_engine_continues_the_span_of_its_target(exporter):
    trainer = Events()
    begin, attempt, *rest = trainer_events()
    told(trainer, [begin, attempt])
    traceparent = trainer.traceparent(A)
    told_engine(traceparent=traceparent)
    told(trainer, rest)
    spans = exported(exporter)
    [session] = [span for span in spans if span["name"] == "weightcast.session"]
    [target] = [span for span in spans if span["values"].get("weightcast.target") == A]
    assert session["parent"] == target["id"]
    assert len({span["trace"] for span in spans}) == 1
    version, trace, span, flags = traceparent.split("-")
    assert (version, int(trace, 16), int(span, 16)) == ("00", target["trace"], target["id"])
    assert int(flags, 16) & 1  # sampled


def test_an_engine_of_an_untraced_trainer_begins_a_trace_of_its_own(exporter):
    told_engine()
    spans = exported(exporter)
    assert tree(spans) == ENGINE_TREE
    ranks = {(span["name"], span["values"].get("weightcast.rank")) for span in spans}
    assert {("weightcast.wire", 0), ("weightcast.wire", 1), ("weightcast.pause", None)} <= ranks
    [session] = [span for span in spans if span["name"] == "weightcast.session"]
    assert session["began"] == pytest.approx(1005.0e9)
    assert session["kind"] == "SERVER"
    assert session["error"] is None


@pytest.mark.parametrize("outcome", ["aborted", "quarantined"])
def test_a_session_that_was_not_committed_is_an_error(exporter, outcome):
    told_engine(outcome)
    [session] = [span for span in exported(exporter) if span["name"] == "weightcast.session"]
    assert session["error"] == "the trainer gave up"
    assert session["values"]["weightcast.outcome"] == outcome


def test_a_revert_is_a_span_beside_its_session(exporter):
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    watcher = EngineSpans()
    session = tell_session(watcher, traceparent=parent)
    session.add(Answered(session=session.session, message="revert", began=8.0, ended=9.0, ok=True))
    end_session(watcher, session, "reverted", at=9.0)
    later.settle()
    spans = {span["name"]: span for span in exported(exporter)}
    assert spans["weightcast.revert"]["parent"] == spans["weightcast.session"]["parent"] == int("cd" * 8, 16)
    assert spans["weightcast.revert"]["ended"] - spans["weightcast.revert"]["began"] == pytest.approx(1e9)


def test_a_trace_that_is_not_sampled_is_handed_on_and_makes_no_spans(monkeypatch):
    with spans_in_memory(monkeypatch, ParentBased(ALWAYS_OFF)) as exporter:
        trainer = Events()
        begin, attempt, *rest = trainer_events()
        told(trainer, [begin, attempt])
        traceparent = trainer.traceparent(A)
        told_engine(traceparent=traceparent)
        told(trainer, rest)
        assert not int(traceparent[-2:], 16) & 1  # not sampled
        assert exporter.get_finished_spans() == ()


def test_without_an_sdk_there_are_no_spans_and_no_traceparent(monkeypatch):
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", None)
    trainer = Events()
    begin, attempt, *rest = trainer_events()
    told(trainer, [begin, attempt])
    assert trainer.traceparent(A) == ""
    told(trainer, rest)
    told_engine()
