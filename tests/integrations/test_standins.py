"""The recipe for miles and our class for xtuner on two training ranks, with stand-ins and a real receiver."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.harness import SMALL_BUCKETS, Engine, digests_of, next_version, serves_whole
from tests.helpers.ranks import Ranks
from tests.helpers.toy_engine import toy_weights
from tests.integrations.standins import (
    RolloutConfig,
    RolloutWeightUpdateTarget,
    install_xtuner,
    miles_standin,
)
from weightcast.errors import WeightcastError

OPTIONS = {"bucket_bytes": SMALL_BUCKETS, "timeout_s": 30.0}
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


def miles_job(urls: list[str], seeds: list[int], first_version: int) -> list[Any]:
    """Syncs each set of weights; the versions and metrics on this rank."""
    settings = {"pause_generation_mode": "retract", "weightcast": OPTIONS}
    updater = miles_standin(settings, toy_weights(seed=seeds[0]))
    protocol = updater.protocol
    updater.weight_version = first_version - 1
    said: list[Any] = []
    try:
        updater.connect_rollout_engines(urls)
        for seed in seeds:
            updater.weights = toy_weights(seed=seed)
            updater.update_weights()
            said.append((updater.weight_version, sorted(protocol.pop_metrics()), bool(protocol.is_sender)))
    except (WeightcastError, RuntimeError) as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        protocol.close()
    return said


def test_recipe_for_miles_syncs_again_and_again(ranks: Ranks, engine: Engine) -> None:
    before = engine.digests()
    first = next_version()
    seeds = [first, next_version(), next_version()]
    assert seeds == list(range(first, first + 3))  # version v of the toy has the weights of seed v
    said = ranks.run(miles_job, [engine.url], seeds, first)
    metrics = ["weightcast/bytes", "weightcast/seconds"]
    assert said[0] == [(version, metrics, True) for version in seeds]
    assert said[1] == [(version, [], False) for version in seeds]
    assert serves_whole(engine) == seeds[-1]
    assert not set(before.values()) & set(engine.digests().values())


def test_recipe_for_miles_fails_on_every_rank(ranks: Ranks) -> None:
    version = next_version()
    head, other = ranks.run(miles_job, [NOWHERE], [version], version)
    assert head[0].startswith("TargetUnreachable: http://127.0.0.1:9")
    assert other[0].startswith("RuntimeError: rank 0 could not update the engines: TargetUnreachable")


def miles_job_that_loses_its_engine(url: str, version: int) -> list[str]:
    """Syncs once, then the engine refuses: somebody else has given it a later version."""
    updater = miles_standin({"weightcast": OPTIONS}, toy_weights(seed=version))
    protocol = updater.protocol
    updater.weight_version = version - 1
    said: list[str] = []
    try:
        updater.connect_rollout_engines([url])
        updater.update_weights()
        updater.weight_version = version - 2  # an older version than the engine serves
        try:
            updater.update_weights()
        except (WeightcastError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        updater.weights = toy_weights(seed=version + 1)
        updater.weight_version = version
        updater.update_weights()
        said.append(f"version {updater.weight_version}")
    finally:
        protocol.close()
    return said


def test_recipe_for_miles_goes_on_after_a_failed_update(ranks: Ranks, engine: Engine) -> None:
    version = next_version()
    assert next_version() == version + 1
    head, other = ranks.run(miles_job_that_loses_its_engine, engine.url, version)
    assert "older" in head[0]
    assert other[0].startswith("RuntimeError: rank 0 could not update the engines")
    assert head[1] == other[1] == f"version {version + 1}"
    assert serves_whole(engine) == version + 1


def xtuner_job(targets: list[tuple[str, str]], seeds: list[int], transport: str, first_version: int) -> list[Any]:
    """Binds and updates as xtuner's trainer does; the versions that were sent."""
    import torch.distributed as dist

    install_xtuner()
    from weightcast.integrations.xtuner import UpdateWeighter

    engine = SimpleNamespace(model=toy_weights(seed=seeds[0]))
    weighter = UpdateWeighter(
        rank=dist.get_rank(), logger=logging.getLogger("xtuner"), config=None, engine=engine, **OPTIONS
    )
    weighter.version = first_version - 1
    listed = tuple(
        RolloutWeightUpdateTarget(number, (number,), url, state) for number, (url, state) in enumerate(targets)
    )
    said: list[Any] = []
    try:
        for seed in seeds:
            engine.model = toy_weights(seed=seed)
            weighter.bind_rollout_weight_update(
                targets=listed, rollout_config=RolloutConfig(weight_transport_type=transport, api_key=["key"])
            )
            report = weighter.update_weights() if seed == seeds[-1] else weighter.weight_update()
            assert report is not None
            said.append((weighter.version, report.transport, [row.url for row in report.targets]))
    except WeightcastError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        weighter.close()
    return said


@pytest.mark.parametrize(("theirs", "ours"), [("ipc", "ipc"), ("nccl", "broadcast")])
def test_xtuner_class_updates_active_servers(ranks: Ranks, engine: Engine, theirs: str, ours: str) -> None:
    first = next_version()
    seeds = [first, next_version()]
    targets = [(engine.url, "active"), (NOWHERE, "inactive")]
    said = ranks.run(xtuner_job, targets, seeds, theirs, first)
    assert said[0] == said[1] == [(version, ours, [engine.url]) for version in seeds]
    assert serves_whole(engine) == seeds[-1]
    assert engine.digests() == digests_of(seeds[-1])


def xtuner_job_in_two_steps(url: str, seed: int) -> list[str]:
    """Registers, takes the model away, and has the weights sent, as xtuner does where it shares GPUs."""
    import torch.distributed as dist

    install_xtuner()
    from weightcast.integrations.xtuner import UpdateWeighter

    engine = SimpleNamespace(model=toy_weights(seed=seed))
    weighter = UpdateWeighter(rank=dist.get_rank(), logger=logging.getLogger("xtuner"), engine=engine, **OPTIONS)
    weighter.version = seed - 1
    listed = (RolloutWeightUpdateTarget(0, (0,), url, "active"),)
    said: list[str] = []
    try:
        # Versions of July 2026 name the transport and their own addresses in this call.
        weighter.bind_rollout_weight_update(
            targets=listed,
            rollout_config=RolloutConfig(weight_transport_type=None),
            weight_transport_type="nccl",
            weight_update_host=None,
            weight_update_port=None,
        )
        assert weighter.weight_update(need_register=True, need_update=False) is None
        engine.model = {name: torch.full_like(tensor, 7.0) for name, tensor in engine.model.items()}
        report = weighter.weight_update(need_register=False, need_update=True)
        assert report is not None
        said.append(report.transport)
        weighter.weight_update(need_register=False, need_update=True)
    except WeightcastError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        weighter.close()
    return said


def test_xtuner_class_sends_registered_weights_and_does_not_read_the_model_again(ranks: Ranks, engine: Engine) -> None:
    seed = next_version()
    for transport, refused in ranks.run(xtuner_job_in_two_steps, engine.url, seed):
        assert transport == "broadcast"
        assert refused.startswith("ConfigError: need_register=False sends registered weights, and none are registered")
    assert engine.digests() == digests_of(seed)


def test_xtuner_class_refuses_an_update_of_nothing(ranks: Ranks) -> None:
    for said in ranks.run(xtuner_job, [(NOWHERE, "recovering")], [1], "nccl", 1):
        assert said == [f"ConfigError: no rollout server is active: {NOWHERE} recovering"]


def test_xtuner_class_names_a_transport_that_it_does_not_know(ranks: Ranks) -> None:
    for said in ranks.run(xtuner_job, [(NOWHERE, "active")], [1], "carrier", 1):
        assert said[0].startswith("ConfigError: weight_transport_type='carrier' has no counterpart")
