"""Pages stand on their own, and show hostile, empty and huge data without harm."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.pages import Tags, check_alone
from weightcast.page import write_page
from weightcast.page.bars import Bar, StatusCell, bars, served, stacks, timeline
from weightcast.page.charts import Figure, columns, lines
from weightcast.page.document import Chip, Document, Tile
from weightcast.page.svg import MEANINGS, PHASES, stride, ticks
from weightcast.page.updates import page_of
from weightcast.page.words import digits, seconds, size
from weightcast.report import TargetReport, UpdateReport
from weightcast.timeline.tracks import PhaseSpan, Timeline, Track

# A busy machine makes a strategy slow, which says nothing about it.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOSTILE = "</title><script>alert(1)</script><img src=https://example.org/x onerror=alert(1)>\"'&"


def report(version=7, **changes) -> UpdateReport:
    targets = (
        TargetReport(
            url="http://10.0.0.7:8000",
            engine="vllm 0.32.0",
            version_before=version - 1,
            version_after=version,
            digest="1234abcd",
            status="serving",
            proof="resident",
            ranks=2,
            digests_matched=2,
            stall_s=0.0123,
            peak_extra_bytes=5_000_000,
        ),
    )
    fields = dict(
        version=version,
        transport="broadcast",
        bytes=16_000_000_000,
        buckets=30,
        seconds=1.25,
        phases={"open": 0.05, "gather": 0.4, "send": 0.6, "verify": 0.1, "commit": 0.1, "load": 0.3, "stall": 0.0123},
        peak_extra_bytes=1_000_000_000,
        digest="1234abcd",
        targets=targets,
    )
    return UpdateReport(**(fields | changes))


def check_svg(figure: Figure) -> ElementTree.Element:
    found = ElementTree.fromstring(figure.svg)
    assert "nan" not in figure.svg
    assert "inf" not in figure.svg
    return found


def test_page_of_an_update_shows_its_figures_and_stands_alone(tmp_path):
    path = write_page(tmp_path / "update.html", report())
    html = path.read_text()
    check_alone(html)
    for shown in (
        "Update to version 7",
        "1.25 s",
        "12.8 GB/s",
        "12.3 ms",
        "1 of 1",
        "6 → 7",
        "1234abcd on 2 of 2 ranks",
    ):
        assert shown in html, shown


def test_page_counts_one_rank_and_one_bucket_in_the_singular(tmp_path):
    row = msgspec.structs.replace(report().targets[0], ranks=1, digests_matched=1)
    one = report(transport="ipc", buckets=1, targets=(row,))
    html = write_page(tmp_path / "update.html", one).read_text()
    assert "to 1 engine, 1 rank over ipc, 1 bucket<" in html
    assert "on 1 of 1 rank<" in html


def test_page_of_a_run_has_a_column_for_each_update(tmp_path):
    reports = [report(version, seconds=1 + version / 10) for version in range(1, 6)]
    html = write_page(tmp_path / "run.html", *reports).read_text()
    check_alone(html)
    assert "5 updates, versions 1 to 5" in html
    tips = [attributes["data-tip"] for _, attributes in Tags(html).tags if "data-tip" in attributes]
    column = next(tip for tip in tips if tip and tip.startswith("version 3") and "whole update" in tip)
    assert column.splitlines()[1:] == [
        *("check: 150 ms", "commit: 100 ms", "send: 600 ms", "gather: 400 ms", "open: 50 ms"),
        "whole update: 1.3 s",
    ]
    assert [tip for tip in tips if tip == "10.0.0.7:8000\nstep 3: serving, version 3"]


def test_quarantined_engine_is_seen_at_once():
    row = report().targets[0]
    bad = TargetReport(url=row.url, engine=row.engine, status="quarantined", message="lost at bucket 3")
    html = page_of([report(targets=(bad,)).to_json()]).html()
    assert "0 of 1" in html
    assert '<span class="chip bad">quarantined</span>' in html
    assert "lost at bucket 3" in html


def test_words_of_others_are_shown_and_not_obeyed():
    row = TargetReport(url="http://a", engine=HOSTILE, status="serving", message=HOSTILE, notes=(HOSTILE,))
    track = Track(side="engine", process=HOSTILE, name=HOSTILE, spans=(PhaseSpan(HOSTILE, 0, 10, 1, None, HOSTILE),))
    hostile = report(
        transport=HOSTILE,
        targets=(row,),
        phases={HOSTILE: 1.0},
    ).with_timeline(lambda: Timeline(tracks=(track,), note=HOSTILE))
    html = page_of([hostile.to_json()]).html()
    check_alone(html)
    assert html.count("<script>") == 1
    assert "<img" not in html
    several = page_of([hostile.to_json(), hostile.to_json()]).html()
    check_alone(several)
    assert several.count("<script>") == 1


def test_a_report_of_an_older_version_is_shown_with_what_it_has():
    html = page_of([json.dumps({"version": 3, "targets": [{"url": "http://a"}], "some": "field"})]).html()
    assert "Update to version 3" in html


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_plots_over_steps_take_any_number_of_steps(count):
    steps = list(range(1, count + 1))
    values = [float(step % 5) for step in steps]
    gaps = [value if value else None for value in values]
    stacked = columns("t", "c", steps, {"a": values, "b": values}, colours={"a": "s1", "b": "s2"}, show=seconds)
    drawn = lines("t", "c", steps, {"a": values, "gaps": gaps}, colours={"a": "s1", "gaps": "s2"}, show=digits)
    cells = served("t", "c", steps, {"e": [StatusCell("s1", "7", "serving")] * count}, legend=[("s1", "serving")])
    for figure in (stacked, drawn, cells):
        check_svg(figure)
    assert len(drawn.rows) == count
    if count == 1000:
        assert len(stacked.rows) == 100
        assert "mean of 10" in stacked.caption


def test_columns_of_many_steps_are_means_that_keep_the_total():
    steps = list(range(480))
    values = [1.0 if step % 5 else 6.0 for step in steps]
    figure = columns("t", "c", steps, {"a": values}, colours={"a": "s1"}, show=digits, marks=values, mark_name="whole")
    assert {row[1:] for row in figure.rows} == {("2", "2")}


def test_heights_of_a_column_are_in_proportion():
    figure = columns("t", "c", [1], {"a": [3.0], "b": [1.0]}, colours={"a": "s1", "b": "s2"}, show=digits)
    rects = [each for each in check_svg(figure).iter("rect") if each.get("class", "").startswith("fill")]
    low, high = (float(each.get("height", "0")) for each in rects)
    assert low / high == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 5.0], [1e-9, 1e9]])
def test_bars_take_any_values(values):
    found = [Bar(name=f"row {number}", value=value) for number, value in enumerate(values)]
    check_svg(bars("t", "c", found, show=digits))
    check_svg(stacks("t", "c", {each.name: {"a": each.value} for each in found}, colours={"a": "s1"}, show=digits))


def test_very_long_names_are_cut_and_kept_in_the_tooltip():
    name = "http://" + "very-long-" * 20
    svg = check_svg(bars("t", "c", [Bar(name=name, value=1.0)], show=digits))
    [label] = [each.text for each in svg.iter("text") if "name" in each.get("class", "")]
    assert label is not None
    assert label.startswith("…")
    assert any(each.get("data-tip", "").startswith(name) for each in svg.iter("g"))


def test_a_timeline_of_a_large_fleet_is_drawn_in_part_and_says_so():
    tracks = [
        Track(
            side="engine",
            process=f"http://e{number // 4}",
            name=f"rank {number % 4}",
            spans=tuple(PhaseSpan("load", 100 * place, 60, place) for place in range(900)),
        )
        for number in range(200)
    ]
    figure = timeline("t", "c", Timeline(tracks=tuple(tracks), note="Steps are left out."))
    check_svg(figure)
    assert "160 more rows" in figure.caption
    assert "Steps are left out." in figure.caption
    assert len(figure.svg) < 8 << 20


def test_tables_and_tiles_escape_their_words():
    page = Document(HOSTILE, HOSTILE)
    page.tiles([Tile(name=HOSTILE, value=HOSTILE, below=HOSTILE, mood="bad")])
    page.table((HOSTILE, "n#"), [(HOSTILE, Chip(HOSTILE, "good"))])
    page.foot(HOSTILE, code=True)
    page.remark(HOSTILE)
    page.heading(HOSTILE)
    check_alone(page.html())
    assert "<img" not in page.html()


def test_no_legend_has_one_colour_for_two_phases():
    assert len({*PHASES.values()}) == len(PHASES)
    assert PHASES.keys() == MEANINGS.keys()
    style = Document("t", "a").html()
    assert [colour for colour in PHASES.values() if f".{colour} {{" not in style] == []
    values = dict(re.findall(r"(--[sp]\d): (#\w{6})", style.split("@media")[0]))
    assert len({*values.values()}) == len(values) == 15
    spans = tuple(PhaseSpan(name, number, 1) for number, name in enumerate(PHASES))
    found = timeline("t", "c", Timeline(tracks=(Track(side="trainer", process="trainer", name="rank 0", spans=spans),)))
    assert len(dict(found.legend)) == len(found.legend) == len(PHASES)


def test_light_and_dark_define_the_same_colours():
    html = Document("t", "a").html()
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", html)
    names = [set(re.findall(r"(--[\w-]+):", block)) for block in blocks]
    assert len(names) == 3
    assert names[0] == names[1] == names[2]
    assert blocks[1].split() == blocks[2].split()  # by the system's setting, and by the button


@patient
@given(st.floats(min_value=1e-12, max_value=1e15))
def test_ticks_are_round_and_reach_the_value(high):
    found = ticks(high)
    assert found[0] == 0
    assert found[-1] >= high * (1 - 1e-6)
    assert 2 <= len(found) <= 7
    if len(found) > 2:
        assert found[-2] < high * (1 + 1e-6)


@patient
@given(st.integers(min_value=0, max_value=10**9), st.integers(min_value=1, max_value=50))
def test_stride_leaves_at_most_so_many_labels(count, limit):
    step = stride(count, limit)
    assert count / step <= limit
    assert str(step).rstrip("0") in ("1", "2", "5")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (1.8432, "1.84 s"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (0.00064, "640 µs"), (12345, "12,345 s")),
        *((2.5e-7, "0.25 µs"), (60.0, "60 s")),
    ],
)
def test_seconds_are_short(value, shown):
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 B"), (999, "999 B"), (15_300_000_000, "15.3 GB"), (1e12, "1 TB"), (1500, "1.5 kB")]
)
def test_sizes_are_short(value, shown):
    assert size(value) == shown
