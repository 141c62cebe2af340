"""A rank of the reference engine that is killed while its new weights are read back is named."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.helpers.clock import PATIENCE_S, wait_until
from tests.unit.rollout import test_unproven
from tests.unit.rollout.test_unproven import (
    Served,
    has_generated,
    settings_of,
)
from weightcast.errors import EngineFailure
from weightcast.receiver.executor import MpExecutor
from weightcast.rollout.worker import RolloutWorker
from weightcast.wire.messages import Commit, Readback

models = test_unproven.models  # a fixture


class Mortal(RolloutWorker):
    """Rank 1 is killed when it is asked to read back after a commit."""

    committed = False

    def apply(self, message):
        if isinstance(message, Readback) and self.committed:
            os.kill(os.getpid(), signal.SIGKILL)
        self.committed = self.committed or isinstance(message, Commit)
        return super().apply(message)


def mortal(rank, tp_size, rendezvous, *, settings):
    kind = Mortal if rank == 1 else RolloutWorker
    return kind(settings, rank=rank, tp_size=tp_size, rendezvous=rendezvous)


def test_a_process_that_is_killed_over_the_read_back_is_named(models):
    folder, _, new = models
    served = Served(folder, MpExecutor(mortal, 2, {"settings": settings_of(folder)}))
    try:
        committing = served.commit(served.send(new))
        during = served.submit(tokens=60)
        wait_until(lambda: has_generated(during), "tokens of the new version")
        served.ranks.go.set()
        ack = committing.result(PATIENCE_S)
        assert (ack.ok, ack.state, ack.failed_ranks) == (False, "quarantined", (1,))
        # The scheduler's thread may have been told the signal, as the rank dies under a step too.
        assert re.search(
            r"rank 1 \(pid \d+\) (was killed by signal 9|is gone) during the answer to Readback", ack.error
        )
        with pytest.raises(EngineFailure):
            during.result(PATIENCE_S)
        assert dict(during.answer.spans) == {}
    finally:
        served.close()
