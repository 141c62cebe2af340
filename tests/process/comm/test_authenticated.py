"""An authenticated connection between two hosts, one of which disappears."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.hosts import cannot, hosts
from tests.unit.comm import test_authenticated
from tests.unit.comm.test_authenticated import (
    SECRET,
    admitted,
)
from weightcast.comm import authenticated
from weightcast.comm.authenticated import (
    AuthenticatedConnection,
    Gate,
    dial,
)

gate = test_authenticated.gate  # a fixture

pytestmark = pytest.mark.timeout(300)


@pytest.mark.skipif(bool(cannot()), reason=cannot())
def test_host_that_is_cut_off_is_noticed_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells a host that the other one has lost its power or its network."""
    assert (1 + authenticated._ASKS) * authenticated._ASK_S == 20, "seconds until users are told"
    monkeypatch.setattr(authenticated, "_ASK_S", 1)
    with hosts(("alpha",), tmp_path) as (alpha,), Gate(alpha.gateway, SECRET, context=b"this", timeout_s=60.0) as gate:

        def come() -> AuthenticatedConnection:
            alpha.enter_network()
            return dial(gate.host, gate.port, SECRET, number=0, context=b"this", timeout_s=60.0)

        with (
            ThreadPoolExecutor(1) as away,
            ThreadPoolExecutor(2) as pool,
            away.submit(come).result() as far,
            admitted(gate) as near,
        ):
            waiting = [pool.submit(end.recv_bytes) for end in (far, near)]
            alpha.cut_off()
            for wait in waiting:
                with pytest.raises(OSError, match=r"timed out|unreachable|No route"):
                    wait.result(PATIENCE_S)
