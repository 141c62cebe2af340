"""The reference model equals transformers, whole or sharded, and its loader uses only views and copies."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.clock import PATIENCE_S
from tests.helpers.tiny import VOCAB, greedy, tiny_config, tiny_model
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure
from weightcast.receiver import rank as rank_module
from weightcast.receiver.executor import LocalExecutor
from weightcast.rollout import all_reduce, commands
from weightcast.rollout.batch import Limits
from weightcast.rollout.checkpoint import check_config
from weightcast.rollout.model import build_model
from weightcast.rollout.requests import GenerationRequest
from weightcast.rollout.scheduler import Scheduler
from weightcast.rollout.worker import WorkerSettings, make_worker

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (5, 17, 1, 30, 9)]


def generate(executor, prompts, *, max_tokens=12, max_batch=8):
    scheduler = Scheduler(
        executor,
        limits=Limits(max_batch=max_batch, max_len=64, prefill_tokens=64),
        eos_token_ids=frozenset(),
        vocab_size=VOCAB,
    )
    try:
        answers = [
            scheduler.submit(
                GenerationRequest(request_id=str(i), prompt=tuple(p), max_tokens=max_tokens, temperature=0)
            )
            for i, p in enumerate(prompts)
        ]
        return [answer.result(PATIENCE_S) for answer in answers]
    finally:
        scheduler.close()
        executor.close()


def settings(folder, **changes):
    return WorkerSettings(
        **({"model_dir": str(folder), "dtype": "float32", "device": "cpu", "max_batch": 8, "max_len": 64} | changes)
    )


@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_batch_of_different_lengths_equals_transformers(tmp_path, family, tied):
    model = tiny_model(tmp_path, family=family, tie_word_embeddings=tied)
    worker = make_worker(0, 1, "", settings=settings(tmp_path))
    answers = generate(LocalExecutor(worker), prompts())
    assert [a.tokens for a in answers] == [greedy(model, p, 12) for p in prompts()]


def test_biases_in_every_projection(tmp_path):
    model = tiny_model(tmp_path, attention_bias=True, mlp_bias=True)
    answers = generate(LocalExecutor(make_worker(0, 1, "", settings=settings(tmp_path))), prompts())
    assert [a.tokens for a in answers] == [greedy(model, p, 12) for p in prompts()]


def test_reused_slots_keep_no_trace(tmp_path):
    # Five requests share two slots, so each is moved or reuses a slot.
    model = tiny_model(tmp_path)
    worker = make_worker(0, 1, "", settings=settings(tmp_path, max_batch=2))
    answers = generate(LocalExecutor(worker), prompts(), max_batch=2)
    assert [a.tokens for a in answers] == [greedy(model, p, 12) for p in prompts()]


def greedy_by_ranks(worker, chosen, rows, count):
    """Runs one rank's side of a batch; `chosen` gives rank 0's choices to the others."""
    zeros = [0.0] * len(rows)
    order = commands.Sampling(
        temperature=zeros,
        top_k=[0] * len(rows),
        top_p=[1.0] * len(rows),
        min_p=zeros,
        uniform=zeros,
        top_logprobs=[0] * len(rows),
    )
    command = commands.Prefill(moves=[], first_slot=0, rows=rows, twins=[], sampling=order)
    for step in range(count):
        reply = worker.run(commands.encode(command))
        if worker._model.tp_rank == 0:
            chosen[step].set_result(commands.decode_answer(reply, commands.Chosen).tokens)
        positions = [len(row) + step for row in rows]
        command = commands.Decode(moves=[], tokens=chosen[step].result(PATIENCE_S), positions=positions, sampling=order)


@pytest.mark.parametrize(
    ("family", "size", "shared_memory"),
    [("llama", 2, True), ("qwen2", 3, True), ("qwen3", 2, True), ("llama", 3, False)],
)
def test_ranks_together_equal_transformers(tmp_path, monkeypatch, family, size, shared_memory):
    # Ranks are threads here, which start faster; the server's tests use processes.
    if not shared_memory:
        monkeypatch.setattr(all_reduce.platform, "machine", lambda: "some-other-cpu")
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = tiny_model(tmp_path, family=family, tie_word_embeddings=family == "qwen3", **changes)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    chosen = [Future() for _ in range(12)]

    def rank(number):
        worker = make_worker(number, size, f"127.0.0.1:{store.port}", settings=settings(tmp_path, threads=1))
        greedy_by_ranks(worker, chosen, prompts(), len(chosen))
        return worker

    with ThreadPoolExecutor(size) as pool:
        workers = list(pool.map(rank, range(size), timeout=120))
    expected = "SharedMemoryReduce" if shared_memory else "GroupReduce"
    assert {type(worker._reduce).__name__ for worker in workers} == {expected}
    for worker in workers:
        worker.close()
    columns = zip(*(future.result(0) for future in chosen), strict=True)
    assert [list(column) for column in columns] == [greedy(model, prompt, 12) for prompt in prompts()]


@pytest.mark.parametrize("places", [("device", "none"), ("host", "device"), ("none", "host")])
def test_every_rank_stages_in_the_place_of_the_rank_with_least_memory(tmp_path, monkeypatch, places):
    tiny_model(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    mine = threading.local()
    monkeypatch.setattr(rank_module, "choose_place", lambda asked, **_: mine.place)

    def rank(number):
        mine.place = places[number]
        return make_worker(number, 2, f"127.0.0.1:{store.port}", settings=settings(tmp_path, threads=1))

    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(rank, range(2), timeout=120))
    least = "none" if "none" in places else "host"
    assert [worker._receiver.loader.staging.place for worker in workers] == [least, least]
    described = commands.decode_answer(workers[0].run(commands.encode(commands.Describe())), commands.Description)
    assert described.staging == least
    for worker in workers:
        worker.close()


def test_sums_larger_than_a_chunk_and_of_other_dtypes(tmp_path):
    segment = mmap.mmap(-1, all_reduce.SharedMemoryReduce.segment_bytes(3))
    ranks = [all_reduce.SharedMemoryReduce(segment, rank=rank, size=3, timeout_s=60) for rank in range(3)]
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(700_001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
        expected = sum(part.double() for part in parts)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda both: both[0](both[1]), zip(ranks, parts, strict=True)))
        torch.testing.assert_close(
            parts[0].double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
        assert torch.equal(parts[0], parts[1])
        assert torch.equal(parts[0], parts[2])


def test_a_sum_with_a_dead_peer_fails():
    segment = mmap.mmap(-1, all_reduce.SharedMemoryReduce.segment_bytes(2))
    alone = all_reduce.SharedMemoryReduce(segment, rank=0, size=2, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match="engine rank 1"):
        alone(torch.ones(4))
    waiting = all_reduce.SharedMemoryReduce(segment, rank=0, size=2, timeout_s=60)
    waiting.close()
    waiting._round = 1000
    with pytest.raises(EngineFailure, match="closed during"):
        waiting(torch.ones(4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_all_ranks_make_the_whole(tmp_path, family, size):
    whole = tiny_model(tmp_path, family=family).state_dict()
    parts = [build_model(tmp_path, tp_rank=rank, tp_size=size) for rank in range(size)]
    for spec in parts[0].expected_weights():
        assert spec.shape == tuple(whole[spec.name].shape)
        assert spec.dtype == "float32"
    assert {spec.name for spec in parts[0].expected_weights()} == set(whole)
    for name, parameter in parts[0].named_parameters():
        pieces = [dict(part.named_parameters())[name] for part in parts]
        cut = [dim for dim, length in enumerate(parameter.shape) if length != whole[name].shape[dim]]
        joined = torch.cat(pieces, dim=cut[0]) if cut else pieces[-1]
        torch.testing.assert_close(joined, whole[name], rtol=0, atol=0)


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def test_loading_is_views_and_copies(tmp_path):
    tiny_model(tmp_path / "a")
    other = tiny_model(tmp_path / "b", seed=1)
    model = build_model(tmp_path / "a", tp_rank=1, tp_size=2)
    with _Recorder() as recorder:
        loaded = model.load_weights(other.state_dict().items())
    assert loaded == set(other.state_dict())
    assert recorder.seen <= {"aten.copy_.default", "aten.slice.Tensor", "aten.narrow.default", "aten.detach.default"}
    fresh = build_model(tmp_path / "b", tp_rank=1, tp_size=2)
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=0, atol=0)


def test_unknown_names_and_wrong_shapes_are_named(tmp_path):
    tiny_model(tmp_path, tie_word_embeddings=True)
    model = build_model(tmp_path)
    assert "lm_head.weight" not in {spec.name for spec in model.expected_weights()}
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not a weight"):
        model.load_weights([("lm_head.weight", torch.zeros(VOCAB, 96))])
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: expected shape \(96,\), got \(95,\)"):
        model.load_weights([("model.norm.weight", torch.zeros(95))])


@pytest.mark.parametrize("size", [4, 5, 24])
def test_a_degree_that_does_not_divide_is_refused_with_degrees_that_do(size):
    with pytest.raises(ConfigError) as caught:
        check_config(tiny_config(), tp_size=size)
    assert caught.value.hint == "degrees that work for this model: 1, 2, 3, 6"


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build_model(tmp_path)
    tiny_model(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace("llama", "gpt2"))
    with pytest.raises(ConfigError, match="gpt2"):
        build_model(tmp_path)
    tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="cannot be read"):
        build_model(tmp_path)
    weights.unlink()
    with pytest.raises(ConfigError, match="no safetensors"):
        build_model(tmp_path)


def test_a_context_beyond_the_sliding_window_is_refused():
    config = tiny_config("mistral", sliding_window=32)
    with pytest.raises(ConfigError, match="sliding window"):
        check_config(config, tp_size=1, max_len=64)
    check_config(config, tp_size=1, max_len=32)


def test_weights_are_cast_at_the_first_load_only(tmp_path):
    tiny_model(tmp_path)
    model = build_model(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {spec.dtype for spec in model.expected_weights()} == {"bfloat16"}
