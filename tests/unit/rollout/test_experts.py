"""A mixture of experts in the reference model equals transformers, whole or sharded."""

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.helpers.tiny import greedy, tiny_config, tiny_model
from tests.unit.rollout.test_model import generate, greedy_by_ranks, prompts, settings
from weightcast.errors import ConfigError
from weightcast.exporters.module import ModuleExporter
from weightcast.receiver.executor import LocalExecutor
from weightcast.rollout.checkpoint import check_config
from weightcast.rollout.model import build_model
from weightcast.rollout.worker import make_worker

MOE = {
    "family": "qwen3_moe",
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def test_a_batch_equals_transformers(tmp_path):
    model = tiny_model(tmp_path, **MOE)
    worker = make_worker(0, 1, "", settings=settings(tmp_path))
    answers = generate(LocalExecutor(worker), prompts())
    assert [a.tokens for a in answers] == [greedy(model, p, 12) for p in prompts()]


def test_two_ranks_together_equal_transformers(tmp_path):
    model = tiny_model(tmp_path, **MOE)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    chosen = [Future() for _ in range(12)]

    def rank(number):
        worker = make_worker(number, 2, f"127.0.0.1:{store.port}", settings=settings(tmp_path, threads=1))
        greedy_by_ranks(worker, chosen, prompts(), len(chosen))
        return worker

    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(rank, range(2), timeout=120))
    for worker in workers:
        worker.close()
    columns = zip(*(future.result(0) for future in chosen), strict=True)
    assert [list(column) for column in columns] == [greedy(model, prompt, 12) for prompt in prompts()]


@pytest.mark.parametrize("size", [1, 2])
def test_the_model_expects_an_exporters_tensors_and_fills_every_element_once(tmp_path, size):
    whole = tiny_model(tmp_path, **MOE)
    for rank in range(size):
        part = build_model(tmp_path, tp_rank=rank, tp_size=size)
        expected = part.expected_weights()
        sent = {spec.name: spec for spec in ModuleExporter(whole).specs()}
        assert {spec.name: spec for spec in expected} == sent
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.fill_(float("nan"))
        part.load_weights((spec.name, torch.ones(spec.shape)) for spec in expected)
        assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in part.parameters())


def test_a_degree_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(ConfigError, match="3 does not divide 49 experts' width"):
        check_config(tiny_config(**(MOE | {"moe_intermediate_size": 49})), tp_size=3)
