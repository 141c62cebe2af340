"""LMDeploy's whole server on a CPU with EAGLE and EAGLE 3 heads, which an update writes together with the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engines.eagle_heads import Weights, after, follow, lmdeploy_head, share
from tests.engines.lmdeploy_receiver_server import EOS, LmdeployStream, fresh, lmdeploy
from tests.helpers.engines import Engine
from tests.helpers.harness import BeforeCommit
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [pytest.mark.engine_full]

PROMPTS = ([5, 6, 7, 8], [10, 300, 4, 77, 12], [400, 401, 17])
COUNT = 24
TRIED = 3  # tokens of a head at a time
OPTIONS: dict[str, Any] = {"bucket_bytes": 300_000, "timeout_s": 60.0}


class Server:
    """A server, and the file to which it writes what it did with the tokens of its head."""

    def __init__(self, engine: Engine, counts: Path) -> None:
        self.engine, self.url, self._counts = engine, engine.url, counts

    def info(self) -> dict[str, Any]:
        return self.engine.info()

    def post(self, path: str) -> None:
        answer = self.engine.client.post(self.url + path, json={})
        assert answer.status_code == 200, answer.text

    def played(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the answer to each prompt, one after another, and how many tokens each of its steps accepted."""
        answers: list[list[int]] = []
        steps: list[list[int]] = []
        for prompt in PROMPTS:
            self._counts.write_text("")
            answers += fresh(self.engine, [prompt], COUNT)
            lines = [line.split() for line in self._counts.read_text().splitlines()]
            assert {int(tried) for tried, _ in lines} == {TRIED}
            steps.append([int(taken) for _, taken in lines])
        return answers, steps


@contextmanager
def serving(folder: Path, *heads: Weights, method: str, draft: str = "update", **more: Any) -> Iterator[list[Server]]:
    """Servers with these heads and our receiver, started one after another."""
    with ExitStack() as stack:
        found: list[Server] = []
        for number, weights in enumerate(heads):
            words = [f"--speculative-algorithm={method}", f"--speculative-draft-model={weights.head}"]
            words += [f"--speculative-num-draft-tokens={TRIED}"]
            log, counts = folder / f"lmdeploy-{number}.log", folder / f"counts-{number}"
            extra = {"WEIGHTCAST_DRAFT": draft, "DRAFT_COUNTS": str(counts)}
            server = lmdeploy(weights.model, log, *words, metrics=True, extra=extra, **more)
            found.append(Server(stack.enter_context(server), counts))
        yield found


def accepted(steps: list[list[int]]) -> float:
    """The share of steps that accept a token of the head."""
    return share([(sum(count > 0 for count in each), len(each)) for each in steps])


def heads(folder: Path, method: str, names: str) -> list[Weights]:
    return [lmdeploy_head(folder / name, method, seed, several=method == "eagle") for seed, name in enumerate(names)]


@pytest.mark.parametrize(("method", "via"), [("eagle3", "ipc"), ("eagle", "broadcast")])
def test_a_head_is_updated_with_the_model(tmp_path: Path, method: str, via: Any) -> None:
    a, b, c = heads(tmp_path, method, "abc")
    options = OPTIONS | {"transport": via}
    with serving(tmp_path, a, b, method=method) as (engine, other):
        expected, first = other.played(), engine.played()
        assert expected[0] == [follow(after(b), prompt, COUNT) for prompt in PROMPTS]
        assert first[0] != expected[0]
        assert min(accepted(first[1]), accepted(expected[1])) > 0.6
        if method == "eagle":
            assert any(TRIED in each for each in expected[1])
        info = engine.info()
        optional = {spec["name"] for spec in info["optional"]}
        assert {name for name in optional if name.startswith("draft.")} == (
            {"draft.t2d"} if method == "eagle3" else set()
        )
        assert {f"draft.{name}" for name in a.tensors} <= {spec["name"] for spec in info["tables"][0]} | optional
        assert not info["hazards"]
        with pytest.raises(ConfigError, match=r"missing draft\."):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], **options)
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **options) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 1, ())
        # As many tokens are accepted at each place as by a server that was started on the same two checkpoints.
        assert engine.played() == expected
        # The head of other weights foresees nothing: model and head are both switched by each commit.
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=c.tensors, **options) as updater:
            (row,) = updater.update(version=2).targets
        assert (row.proof, row.version_after) == ("resident", 2)
        tokens, counts = engine.played()
        assert tokens == expected[0]
        assert accepted(counts) < 0.2


@pytest.mark.parametrize("pause", ["retract", "in_place", "wait"])
def test_requests_go_on_over_a_switch_of_both(tmp_path: Path, pause: Any) -> None:
    a, b = heads(tmp_path, "eagle3", "ab")
    of_a, of_b = after(a), after(b)
    with serving(tmp_path, a, method="eagle3") as [engine]:

        def load() -> list[LmdeployStream]:
            streams = [LmdeployStream(engine.url, prompt, 60 if pause == "wait" else 600) for prompt in PROMPTS]
            for stream in streams:
                stream.wait_for(6)
            return streams

        running = BeforeCommit(load)
        during: dict[str, Any] = OPTIONS | {"pause": pause, "progress": running}
        with connect_in_lab(b.of_model, [Target(engine.url)], draft=b.tensors, **during) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.version_after) == ("resident", 1)
        for stream in running.result or ():
            stream.cut_after(600)
            assert len(stream.tokens) == (60 if pause == "wait" else 600)
            # LMDeploy makes another token where the model would end; which one is not clear cut.
            clear = [
                (old, new)
                for old, new in pairwise([stream.prompt[-1], *stream.tokens])
                if EOS not in (of_a[old], of_b[old])
            ]
            made_by = ["a" if new == of_a[old] else "b" if new == of_b[old] else "?" for old, new in clear]
            assert set(made_by) <= {"a", "b"}
            assert made_by == sorted(made_by)
            assert made_by[-1] == ("a" if pause == "wait" else "b")
            assert made_by[0] == "a"
        assert engine.played()[0] == [follow(of_b, prompt, COUNT) for prompt in PROMPTS]


def test_a_head_that_is_kept_is_named(tmp_path: Path) -> None:
    a, b = heads(tmp_path, "eagle3", "ab")
    with serving(tmp_path, a, method="eagle3", draft="keep") as [engine]:
        first = engine.played()
        assert accepted(first[1]) > 0.6
        assert any("the draft model keeps the weights" in hazard for hazard in engine.info()["hazards"])
        with pytest.raises(ConfigError, match=r"draft\."):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS)
        for version, weights in enumerate((b, a), 1):
            with WeightUpdater.connect(weights.of_model, [Target(engine.url)], **OPTIONS) as updater:
                (row,) = updater.update(version=version).targets
            assert (row.proof, row.version_after, row.not_updated) == ("resident", version, ("the draft model",))
            if weights is b:
                tokens, counts = engine.played()
                assert tokens != first[0]
                assert accepted(counts) < 0.2
        assert engine.played() == first


def test_both_come_back_from_sleep(tmp_path: Path) -> None:
    a, b = heads(tmp_path, "eagle3", "ab")
    with serving(tmp_path, a, method="eagle3") as [engine]:
        first = engine.played()
        engine.post("/sleep?level=1")
        engine.post("/wakeup")
        assert engine.played() == first
        # Level 2 discards the weights of both, until an update between the two wake-ups.
        engine.post("/sleep?level=2")
        engine.post("/wakeup?tags=weights")
        for version, weights in ((1, b), (2, a)):
            with WeightUpdater.connect(weights.of_model, [Target(engine.url)], draft=weights.tensors, **OPTIONS) as one:
                (row,) = one.update(version=version).targets
            assert (row.proof, row.version_after) == ("resident", version)
        engine.post("/wakeup?tags=kv_cache")
        assert engine.played() == first


def test_both_ranks_switch_their_copies_of_the_head(tmp_path: Path) -> None:
    a, b = heads(tmp_path, "eagle3", "ab")
    with serving(tmp_path, b, method="eagle3") as [other]:
        expected = other.played()
    with serving(tmp_path, a, method="eagle3", tp=2, executor="mp") as [engine]:
        assert engine.played()[0] != expected[0]
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.digests_matched) == ("resident", 2)
        assert engine.played() == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--speculative-algorithm=deepseek_mtp"], "other than eagle or eagle3 with a checkpoint of its own"),
        (["--speculative-algorithm=qwen3_5_mtp"], "other than eagle or eagle3 with a checkpoint of its own"),
        ([], "LMDeploy was started without a draft model"),
    ],
)
def test_other_drafts_end_the_start_and_are_named(tmp_path: Path, changes: list[str], words: str) -> None:
    a = lmdeploy_head(tmp_path / "a", "eagle3", 0)
    log, extra = tmp_path / "lmdeploy.log", {"WEIGHTCAST_DRAFT": "update"}
    server = lmdeploy(a.model, log, *changes, extra=extra)
    with pytest.raises(AssertionError, match="did not start"), server:
        pass
    assert words in log.read_text()
