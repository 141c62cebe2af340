"""The pages in a real browser: they ask for nothing, and every word has its place, light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import browser
from tests.helpers.harness import connect, next_version, trainer_of
from weightcast.lab.bench.page import write_page as write_bench_page
from weightcast.lab.demo.page import write_page as write_demo_page
from weightcast.lab.demo.records import GradedAnswer, ModeRecord, Sample, StepRecord, TargetRecord
from weightcast.lab.demo.report import DemoReport
from weightcast.page import write_page
from weightcast.report import UpdateReport

pytestmark = [
    pytest.mark.skipif(
        browser.find() is None, reason=f"no Chromium (apt-get install chromium-headless-shell): {browser.NAMES}"
    ),
]
PAGES = ("update", "run", "demo", "bench")
# Every word of a picture lies in the picture, no two words of one picture cover each other, and the page does not
# scroll sideways.
LAYOUT = """
(() => {
  const wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push('the page scrolls sideways');
  for (const svg of document.querySelectorAll('svg')) {
    const view = svg.viewBox.baseVal, seen = [];
    for (const text of svg.querySelectorAll('text')) {
      const b = text.getBBox(), name = `${svg.getAttribute('aria-label')}: ${text.textContent}`;
      if (b.x < -1 || b.y < -1 || b.x + b.width > view.width + 1 || b.y + b.height > view.height + 1)
        wrong.push(`${name} leaves the picture`);
      for (const [o, other] of seen)
        if (b.x + 1 < o.x + o.width && o.x + 1 < b.x + b.width && b.y + 2 < o.y + o.height && o.y + 2 < b.y + b.height)
          wrong.push(`${name} covers ${other}`);
      seen.push([b, text.textContent]);
    }
  }
  for (const each of document.querySelectorAll('h1, h2, h3, .tile b, .tile span, .chip, header p'))
    if (each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline')
      wrong.push(`${each.textContent} does not fit`);
  return wrong;
})()
"""
# The least contrast of a word against what is behind it (WCAG's formula): words on the cards and in the spans.
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  const note = (text, colour, behind, least) => {
    const found = ratio(colour, behind);
    if (found < least) low.push(`${text}: ${found.toFixed(2)}`);
  };
  for (const each of document.querySelectorAll('h1,h2,h3,p,b,span,small,td,th,summary,button'))
    if (each.textContent.trim()) note(each.textContent, parse(getComputedStyle(each).color), back(each), 3.4);
  for (const text of document.querySelectorAll('svg text')) {
    const inside = text.classList.contains('inside');
    const behind = inside ? parse(getComputedStyle(text.previousElementSibling).fill) : back(text.closest('figure'));
    note(text.textContent, parse(getComputedStyle(text).fill), behind, inside ? 3 : 3.4);
  }
  return low;
})()
"""


def demo_report() -> DemoReport:
    """Two modes of ten steps."""

    def step(version: int, scale: float) -> StepRecord:
        return StepRecord(
            version=version,
            reward=min(1.0, 0.3 + 0.06 * version),
            update_s=scale * (1 + 0.05 * (version % 3)),
            phases={
                name: scale * share
                for name, share in zip(
                    ("open", "gather", "send", "verify", "commit"), (0.03, 0.3, 0.5, 0.1, 0.1), strict=True
                )
            },
            bytes=269_000_000,
            gb_per_s=0.269 / scale,
            stall_s=0.02 * scale,
            digests_matched=3,
            ranks=3,
            digest="1123d35342137d29",
            generate_s=3.1,
            train_s=4.2 + 0.1 * version,
            logprob_gap=0.012,
            completion_tokens=400,
            targets=[
                TargetRecord(
                    url=f"http://127.0.0.1:{port}", status="serving", version=version, stall_s=0.02 * scale * n
                )
                for n, port in enumerate((34283, 46405), start=1)
            ],
        )

    samples = [
        Sample(
            version=v, question="What is the capital of Norway?", answers=[GradedAnswer(text="It is Oslo.", reward=r)]
        )
        for v, r in ((0, 0.3), (10, 1.0))
    ]
    modes = [
        ModeRecord(
            mode=name,
            transport=transport,
            engines=["http://127.0.0.1:34283 tp 2", "http://127.0.0.1:46405 tp 1"],
            trainers=2,
            reward_gain=0.42,
            seconds=80.0,
            steps=[step(version, scale) for version in range(1, 11)],
            samples=samples,
        )
        for name, transport, scale in (("colocated", "ipc", 1.2), ("disaggregated", "broadcast", 1.9))
    ]
    return DemoReport(
        command=["weightcast", "demo"],
        seed=0,
        model="SmolLM2-135M-Instruct",
        machine={"platform": "Linux", "cores": "2", "gpus": "none"},
        versions={"python": "3.11"},
        seconds=170.0,
        modes=modes,
    )


def bench_result() -> dict:
    def spread(median: float) -> dict:
        return {"median": median, "min": median * 0.8, "p95": median * 1.2, "max": median * 1.3}

    def row(name: str, median: float, *, ours: bool = True) -> dict:
        return {
            "name": name,
            "ours": ours,
            "emulated": [] if ours else ["the server"],
            "settings": {"verify": "resident" if ours else "none"},
            "usable_s": spread(median),
            "phases": {f"{name}_s": median / 5 for name in ("open", "gather", "send", "verify", "commit", "stall")},
            "times_limit": median / 0.16,
            "watched": {"trainer_peak_extra_bytes": 4e6, "engine_held_bytes": 2e9, "trainer_held_bytes": 1e9},
        }

    return {
        "ok": True,
        "machine": {"cpu": "AMD EPYC", "cores": 2, "torch": "2.13.0", "python": "3.11.7", "gpus": []},
        "case": {"placement": "colocated", "trainers": 1, "engines": 1, "bytes": 1 << 30, "tensors": 354},
        "floor_s": 0.16,
        "limits": {"shared memory": {"usable_s": spread(0.16)}},
        "methods": [row("weightcast ipc", 0.84), row("a peer with a rather long name", 2.5, ours=False)],
        "failed": {},
    }


@pytest.fixture(scope="module")
def reports(engines) -> list[UpdateReport]:
    """Five updates of two engines, three ranks in all; the last one with 15 buckets by broadcast."""
    found = []
    for transport in ("ipc", "ipc", "ipc", "broadcast", "broadcast"):
        version = next_version()
        with connect(trainer_of(version), [engines.one, engines.two], transport=transport) as updater:
            found.append(updater.update(version=version))
    return found


@pytest.fixture(scope="module")
def pages(reports, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "update": write_page(folder / "update.html", reports[-1]),
        "run": write_page(folder / "run.html", *reports),
        "demo": write_demo_page(demo_report(), folder),
        "bench": write_bench_page([bench_result()], folder / "bench.html", command="weightcast bench updates"),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[browser.Page]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1200, False, id="wide-light"),
        pytest.param(400, True, id="narrow-dark"),
        pytest.param(1200, True, id="wide-dark", marks=pytest.mark.wide),
        pytest.param(400, False, id="narrow-light", marks=pytest.mark.wide),
    ],
)
@pytest.mark.parametrize("name", PAGES)
def test_page_loads_alone_and_every_word_has_its_place(page, pages, name, width, dark):
    page.open(pages[name].as_uri(), width=width, dark=dark)
    assert page.requests == [pages[name].as_uri()]
    assert page.complaints == []
    assert page.run(LAYOUT) == []
    assert page.run(CONTRAST) == []
    assert page.run("document.querySelectorAll('svg').length") >= 1
    shown = page.run("getComputedStyle(document.body).backgroundColor")
    assert (int(shown.split("(")[1].split(",")[0]) < 60) is dark


def test_nothing_is_asked_of_the_network_even_if_a_script_tries(page, pages):
    """The policy of the page is real: without it this test's own request would be seen."""
    page.open(pages["update"].as_uri())
    page.run("fetch('http://127.0.0.1:9/').catch(() => 0)")
    page.run("new Promise((done) => { const i = new Image(); i.onerror = done; i.src = 'http://127.0.0.1:9/x.png'; })")
    refused = [words.lower() for words in page.complaints if "content security policy" in words.lower()]
    for what in ("connect", "image"):
        assert any(what in words for words in refused), page.complaints


def test_a_mouse_over_a_span_shows_its_time_and_bucket(page, pages):
    page.open(pages["update"].as_uri())
    assert page.run("getComputedStyle(document.querySelector('#tip')).display") == "none"
    # The widest one: on a busy machine others are thinner than a pixel.
    told = page.run(
        "(() => { const width = (span) => span.getBoundingClientRect().width;"
        " const spans = [...document.querySelectorAll(\"rect.span[data-tip*='bucket ']\")];"
        " const widest = spans.reduce((a, b) => (width(b) > width(a) ? b : a));"
        " widest.id = 'widest'; return widest.dataset.tip; })()"
    )
    page.point_at("#widest")
    tip = page.until("document.querySelector('#tip').innerText", "the tooltip")
    assert tip.split() == told.split()
    assert re.match(r"[a-z]+: [\d.]+ (µs|ms|s)\n", tip)
    assert "bucket " in tip
    inside = "(() => { const b = document.querySelector('#tip').getBoundingClientRect();"
    assert page.run(
        f"{inside} return b.left >= 0 && b.top >= 0 && b.right <= innerWidth && b.bottom <= innerHeight }})()"
    )


def test_the_button_changes_the_colours_both_ways(page, pages):
    page.open(pages["demo"].as_uri())
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.run(colour)
    page.run("document.querySelector('#theme').click()")
    dark = page.run(colour)
    assert dark != before
    assert page.run("document.querySelector('#theme').textContent") == "Light"
    page.run("document.querySelector('#theme').click()")
    assert page.run(colour) == before


def test_a_picture_of_the_page_has_colours(page, pages, tmp_path):
    page.open(pages["demo"].as_uri(), height=1400)
    picture = page.picture(tmp_path / "demo.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000  # an empty page has less than 10,000 bytes
    drawn = page.run(
        "(() => { const marks = [...document.querySelectorAll('svg .fill, svg .line')];"
        " return new Set(marks.map((each) => getComputedStyle(each).getPropertyValue('--c'))).size; })()"
    )
    assert drawn >= 6


def test_every_update_of_the_run_is_in_the_page(page, pages, reports):
    page.open(pages["run"].as_uri())
    tips = page.run("[...document.querySelectorAll('[data-tip]')].map((e) => e.dataset.tip)")
    for report in reports:
        assert any(tip.startswith(f"version {report.version}\n") and "whole update" in tip for tip in tips)
    assert "The slowest update" in page.run("document.body.innerText")
    json.dumps(tips)  # plain text
