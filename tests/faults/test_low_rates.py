"""An engine that takes its weights far more slowly than before is named in the report."""

from __future__ import annotations

from contextlib import closing

from tests.faults.kinds import KINDS
from tests.faults.wire import Loop, Trap, Wire
from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import Engine, ToyTrainer
from tests.helpers.toy_engine import toy_weights
from weightcast import WeightUpdater
from weightcast.transports import usual_rates

ROWS = 70_000  # 18 MB: enough to be judged
GRACE_S = 2.0  # lost by a busy machine


def test_report_names_the_leg_of_an_engine_that_has_become_slow(monkeypatch, caplog) -> None:
    monkeypatch.setattr(usual_rates, "_LEAST_LOSS_S", GRACE_S)
    with (
        closing(Engine("--local", "--rows", str(ROWS))) as quick,
        closing(Engine("--local", "--rows", str(ROWS))) as slow,
        closing(Loop()) as loop,
        closing(Wire(loop, KINDS["native"].step_of, slow.port)) as wire,
    ):
        model = ToyTrainer(toy_weights(seed=1, rows=ROWS))
        with WeightUpdater.connect(model, [quick.url, wire.url], transport="ipc", timeout_s=PATIENCE_S) as updater:
            before = [updater.update() for _ in range(5)]
            assert not any(row.notes for report in before for row in report.targets)
            usual_s = max(row.legs[0].seconds for report in before for row in report.targets)

            wire.set_trap(Trap("bucket", fault="delay", delay_s=2 * (usual_s + GRACE_S)))
            report = updater.update()
            after = updater.update()
    one, other = report.targets
    assert report.ok
    assert not one.notes
    [note] = other.notes
    assert str(other.legs[0]) in note
    assert "and usually at" in note
    assert f"note: {note}" in str(report)
    assert [record.message for record in caplog.records if "low rate" in record.message] == [f"{wire.url}: {note}"]
    assert not after.targets[1].notes
