"""Updates that are started, and waited for while the trainer changes its weights."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.helpers.harness import (
    connect,
    digests_of,
    next_version,
    serves_whole,
    set_shards,
    share_memory,
    trainer_of,
)
from tests.helpers.ranks import Ranks
from weightcast import ConfigError, UpdateFailed, WeightUpdater
from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.digest.definition import model_digest

WAYS = {
    "ipc": {"transport": "ipc"},
    "broadcast": {"transport": "broadcast"},
    "direct": {"transport": "direct"},
    "in place": {"transport": "direct", "keep_mapped": True},
}


def _started(urls: list[str], versions: list[int], options: dict) -> list[tuple[str, str]]:
    """Changes the weights as soon as each update has started; returns digest and text of each report."""
    torch.set_num_threads(1)
    model = trainer_of(versions[0])
    buffer = share_memory(model, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    found = []
    with WeightUpdater.connect(model, urls, bucket_bytes=30_000, timeout_s=30.0, **options) as updater:
        for version, following in zip(versions, [*versions[1:], 0], strict=True):
            pending = updater.start(version)
            set_shards(model, following)
            report = pending.wait()
            assert pending.done
            found.append((report.digest or "", report.to_json() if dist.get_rank() else ""))
    del model
    buffer.close()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_weights_may_change_once_start_has_returned(engines, way):
    versions = [next_version() for _ in range(3)]
    ranks = Ranks(2)
    try:
        answers = ranks.run(_started, [engines.one.url], versions, WAYS[way])
    finally:
        ranks.close()
    for found in answers:
        assert [digest for digest, _ in found] == [model_digest(digests_of(version)) for version in versions]
    assert serves_whole(engines.one) == versions[-1]


def test_the_next_call_waits_for_an_update_that_was_started(engines):
    first, second, third = (next_version() for _ in range(3))
    model = trainer_of(first)
    with connect(model, [engines.one]) as updater:
        started = updater.start(first)
        model.set_version(second)
        report = updater.update(version=second)
        assert started.done
        assert (started.wait().version, report.version) == (first, second)
        model.set_version(third)
        last = updater.start(third)
    assert last.done  # closing waits too
    assert last.wait() is last.wait()
    assert serves_whole(engines.one) == third


@pytest.mark.parametrize("on_failure", ["quarantine", "raise"])
def test_an_engine_that_dies_before_it_switches_is_handled_as_by_update(engines, fresh, monkeypatch, on_failure):
    before, failing, after = (next_version() for _ in range(3))
    model, dies = trainer_of(before), fresh()
    ask = NativeAdapter.commit

    def dying(self, message):
        if dies.process.is_alive():
            dies.signal(signal.SIGKILL)
            dies.process.join()
        return ask(self, message)

    with connect(model, [engines.one, dies], on_failure=on_failure, timeout_s=20.0) as updater:
        assert updater.update(version=before).ok
        monkeypatch.setattr(NativeAdapter, "commit", dying)
        model.set_version(failing)
        pending = updater.start(failing)
        model.set_version(after)
        if on_failure == "raise":
            with pytest.raises(UpdateFailed, match=dies.url) as failed:
                pending.wait()
            report, served = failed.value.report, before
        else:
            report, served = pending.wait(), failing
        rows = {row.url: row for row in report.targets}
        assert rows[engines.one.url].version_after == served
        assert rows[dies.url].status != "serving"
        assert serves_whole(engines.one) == served
        updater.retarget([engines.one.url])
        assert updater.update(version=after).ok
    assert serves_whole(engines.one) == after


def test_behaviour_needs_weights_that_stay(engines):
    with (
        connect(trainer_of(1), [engines.one], verify="behaviour") as updater,
        pytest.raises(ConfigError, match="forward pass of the weights that were sent"),
    ):
        updater.start(next_version())
