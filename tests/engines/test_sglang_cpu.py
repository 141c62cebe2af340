"""The real SGLang server on a CPU, unpatched, updated over its own HTTP API; transformers says what is right."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang_server import checksum, generate, greedy_tokens, sglang
from tests.helpers.engines import Engine, weightcast
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.lab.demo.smollm2 import ensure_smollm2
from weightcast.ray.engine_kinds import sglang_engine, wake_requests
from weightcast.report import UpdateReport

pytestmark = pytest.mark.engine

WAYS = ("broadcast", "ipc", "disk")
# Llama's widths divide by what its ranks are: SGLang wants multiples of 64 in places.
DENSE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 256,
}
MOE: dict[str, Any] = DENSE | {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
PROMPTS = [[5, 6, 7, 8], [10, 300, 4, 77, 12], [400, 401, 17]]
COUNT = 12
BUCKET_BYTES = 300_000


def nudge(model: Any, *, seed: int) -> None:
    """A step of training: every parameter moves by a twentieth of what it holds."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=source).to(parameter.dtype)
            parameter.add_(noise * parameter.float().std().nan_to_num(0.1) * 0.3)


def answers(model: Any) -> list[list[int]]:
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def update(model: Any, engine: Engine, version: int, **options: Any) -> UpdateReport:
    """One update by a trainer that is new to the engine."""
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0} | options
    with WeightUpdater.connect(model, [engine.url], **options) as updater:
        return updater.update(version=version)


def version_of(engine: Engine) -> str:
    return engine.get("/model_info")["weight_version"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"dense": tmp_path_factory.mktemp("dense"), "moe": tmp_path_factory.mktemp("moe")}
    tiny_model(found["dense"], **DENSE)
    tiny_model(found["moe"], family="qwen3_moe", **MOE)
    for folder in found.values():
        tiny_tokenizer(folder)
    return found


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Tiny on two ranks, dense and of experts; side by side, since starting is what takes long."""
    with sglang(tmp_path_factory.mktemp("logs"), (folders["dense"], 2, ()), (folders["moe"], 2, ())) as found:
        yield found


@pytest.fixture
def two_ranks(servers: list[Engine]) -> Engine:
    return servers[0]


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.short if way == "ipc" else ()) for way in WAYS])
def test_three_updates_in_a_row_answer_as_transformers_does(two_ranks: Engine, tmp_path: Path, way: str) -> None:
    model = tiny_model(tmp_path, seed=WAYS.index(way) + 1, **DENSE)
    first = int(version_of(two_ranks)) + 1 if version_of(two_ranks).isdigit() else 1
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0, "transport": way, "verify": "behaviour"}
    seen = [greedy_tokens(two_ranks, PROMPTS, COUNT)]
    with WeightUpdater.connect(model, [two_ranks.url], **options) as updater:
        for version in range(first, first + 3):
            nudge(model, seed=version)
            report = updater.update(version=version)
            [row] = report.targets
            assert (report.transport, row.status, row.proof) == (way, "serving", "behaviour"), row.message
            assert (row.engine, row.version_after, row.ranks) == ("sglang 0.5.23", version, 2)
            assert "its own checksum over 2 ranks went from" in row.message
            assert report.buckets > 3
            found = greedy_tokens(two_ranks, PROMPTS, COUNT)
            assert found == answers(model)
            assert found not in seen
            seen.append(found)
            assert version_of(two_ranks) == str(version)
    assert generate(two_ranks, PROMPTS[:1], 2)[0]["meta_info"]["weight_version"] == str(first + 2)
    if way == "disk":
        gone = Path(two_ranks.get("/model_info")["model_path"])
        assert gone.name.startswith("weightcast-")
        assert not gone.exists()


def test_the_same_weights_have_the_same_checksum_whichever_way_they_came(two_ranks: Engine, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, seed=9, **DENSE)
    found: list[str] = []
    for number, way in enumerate(WAYS):
        nudged = copy.deepcopy(model)
        nudge(nudged, seed=number)
        update(nudged, two_ranks, 50 + 2 * number, transport=way, allow_older=True)
        assert checksum(two_ranks) not in found
        update(model, two_ranks, 51 + 2 * number, transport=way)
        found.append(checksum(two_ranks))
    assert len(set(found)) == 1


def test_a_session_that_a_dead_trainer_left_open_is_ended(two_ranks: Engine, tmp_path: Path) -> None:
    two_ranks.post("/pause_generation", mode="abort")
    two_ranks.post("/begin_weight_update")
    model = tiny_model(tmp_path, seed=21, **DENSE)
    assert update(model, two_ranks, 70, transport="ipc", allow_older=True).ok
    assert greedy_tokens(two_ranks, PROMPTS, COUNT) == answers(model)


def test_a_bucket_that_is_refused_leaves_it_quarantined_until_the_next_update(
    two_ranks: Engine, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path, seed=22, **DENSE)
    good = model.model.norm.weight
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0, "transport": "broadcast", "allow_older": True}
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    with (
        WeightUpdater.connect(model, [two_ranks.url], **options) as updater,
        pytest.raises(UpdateFailed, match=r"refused bucket \d+ .*torch.Size\(\[64\]\)") as caught,
    ):
        updater.update(version=80)
    assert two_ranks.url in str(caught.value)
    assert caught.value.half_updated == (two_ranks.url,)
    assert two_ranks.client.get(two_ranks.url + "/ready").status_code == 503  # it answers nobody with a mixture
    model.model.norm.weight = good
    assert update(model, two_ranks, 81, transport="broadcast", allow_older=True).ok
    assert two_ranks.client.get(two_ranks.url + "/ready").status_code == 200
    assert greedy_tokens(two_ranks, PROMPTS, COUNT) == answers(model)


def test_a_backbone_without_its_head_is_no_first_update(two_ranks: Engine, tmp_path: Path) -> None:
    """SGLang skips names without their prefix, so no tensor changes, as if it had these weights already."""
    model = tiny_model(tmp_path, seed=25, **DENSE)
    update(model, two_ranks, 82, allow_older=True)
    old = greedy_tokens(two_ranks, PROMPTS, COUNT)
    again = update(model, two_ranks, 83).targets[0]  # by a trainer that is new to it: equal weights are no failure
    assert (again.status, "the weights are the same, or it took none" in again.message) == ("serving", True)
    nudge(model, seed=9)
    with pytest.raises(UpdateFailed, match=r"no tensor embed_tokens\.weight, .* model\.embed_tokens\.weight"):
        update(model.model, two_ranks, 84)
    assert two_ranks.client.get(two_ranks.url + "/ready").status_code == 503
    update(model, two_ranks, 85)
    assert greedy_tokens(two_ranks, PROMPTS, COUNT) == answers(model) != old


def test_an_older_version_is_refused_and_nothing_moves(two_ranks: Engine, tmp_path: Path) -> None:
    before = checksum(two_ranks), version_of(two_ranks)
    with pytest.raises(ConfigError, match="is older than") as caught:
        update(tiny_model(tmp_path, seed=23, **DENSE), two_ranks, 1)
    assert caught.value.report.targets[0].status == "untouched"
    assert (checksum(two_ranks), version_of(two_ranks)) == before
    assert two_ranks.client.get(two_ranks.url + "/ready").status_code == 200


def test_the_command_line_pushes_and_says_what_it_found(two_ranks: Engine, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, seed=24, **DENSE)
    done = weightcast("push", tmp_path, "--to", two_ranks.url, "--version", 90, "--via", "disk", "--json")
    assert done.returncode == 0, done.stderr
    assert '"sglang 0.5.23"' in done.stdout
    assert greedy_tokens(two_ranks, PROMPTS, COUNT) == answers(model)
    told = weightcast("status", two_ranks.url, "--json")
    assert told.returncode == 0, told.stderr
    assert '"version": 90' in told.stdout or '"version":90' in told.stdout


@pytest.mark.engine_full
def test_smollm2_answers_as_transformers_does(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    smollm2 = ensure_smollm2(lambda done, total: None)
    with sglang(tmp_path, (smollm2, 1, ())) as [engine]:
        smollm2_arrives(engine)


def smollm2_arrives(engine: Engine) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.folder)
    model = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32).eval()
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "Once upon a time,")]
    before = greedy_tokens(engine, prompts, COUNT)
    assert before == [greedy(model, prompt, COUNT) for prompt in prompts]
    options = {"bucket_bytes": 128 << 20, "timeout_s": 90.0, "verify": "none"}
    for version, way in enumerate(WAYS, 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.02 * version).clamp_(-1.5, 1.5)
        assert update(model, engine, version, transport=way, **options).ok
        found = greedy_tokens(engine, prompts, COUNT)
        assert found == [greedy(model, prompt, COUNT) for prompt in prompts]
        assert found != before
        before = found


def experts_arrive(engine: Engine, folder: Path, way: str) -> None:
    model = tiny_model(folder, family="qwen3_moe", seed=30 + WAYS.index(way), **MOE)
    before = greedy_tokens(engine, PROMPTS, COUNT)
    for _ in range(2):
        nudge(model, seed=1)
        report = update(model, engine, int(time.monotonic()), transport=way, allow_older=True, verify="behaviour")
        assert report.targets[0].proof == "behaviour", report.targets[0].message
        found = greedy_tokens(engine, PROMPTS, COUNT)
        assert found == answers(model)
        assert found != before
        before = found


@pytest.mark.parametrize("way", WAYS)
def test_experts_arrive_on_two_ranks(servers: list[Engine], tmp_path: Path, way: str) -> None:
    experts_arrive(servers[1], tmp_path, way)


@pytest.mark.engine_full
class TestMore:
    """Tests for which `make test` has no time."""

    @pytest.fixture(scope="class")
    @classmethod
    def more(cls, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
        logs = tmp_path_factory.mktemp("logs")
        with sglang(
            logs, (folders["dense"], 1, ("--admin-api-key=secret", "--disable-radix-cache")), (folders["moe"], 1, ())
        ) as found:
            yield found

    @pytest.mark.parametrize("way", WAYS)
    def test_experts_arrive_on_one_rank(self, more: list[Engine], tmp_path: Path, way: str) -> None:
        experts_arrive(more[1], tmp_path, way)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("pause", ["abort", "retract", "in_place", "wait"])
    def test_every_pause_mode(self, more: list[Engine], tmp_path: Path, way: str, pause: str) -> None:
        engine = more[0]
        model = tiny_model(tmp_path, seed=40, **DENSE)
        target = [Target(engine.url, api_key="secret")]
        options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0, "transport": way, "allow_older": True}
        nudge(model, seed=WAYS.index(way) + 7)
        with WeightUpdater.connect(model, target, pause=pause, **options) as updater:
            assert updater.update(version=int(time.monotonic())).ok
        assert greedy_tokens(engine, PROMPTS, COUNT) == answers(model)

    def test_several_servers_that_sleep_by_tags_get_one_update_before_their_cache_is_back(
        self, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        # With a stand-in for torch_memory_saver that overwrites what sleeps.
        kind = sglang_engine("model")
        settings = (folders["dense"], 1, ("--enable-memory-saver",))
        with sglang(tmp_path, settings, settings) as found:

            def ask(requests: Sequence[tuple[str, bytes]]) -> None:
                for engine in found:
                    for path, body in requests:
                        engine.post(path, **json.loads(body))

            model = tiny_model(tmp_path, seed=50, **DENSE)
            targets = [Target(engine.url, engine="sglang", devices=("cpu",)) for engine in found]
            options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0}
            for version, way in enumerate(("ipc", "broadcast"), start=1):
                nudge(model, seed=version)
                ask([(path, b"{}") for path in kind.sleep])
                ask(wake_requests(kind, ["weights"]))
                with WeightUpdater.connect(model, targets, transport=way, **options) as updater:
                    report = updater.update(version=version)
                assert [row.status for row in report.targets] == ["serving"] * 2, report
                ask(wake_requests(kind, ["kv_cache", "cuda_graph"]))
                for engine in found:
                    assert greedy_tokens(engine, PROMPTS, COUNT) == answers(model)
                    assert version_of(engine) == str(version)
                assert checksum(found[0]) == checksum(found[1])
