"""One rank's receiver in a vLLM worker, whose main thread switches weights between two steps."""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from weightcast.comm.authenticated import Secret
from weightcast.errors import Refused
from weightcast.plugins.other_hosts import RankInvitation, reach
from weightcast.plugins.switch_rank import SwitchRank
from weightcast.plugins.vllm.rank_protocol import end_vllm
from weightcast.plugins.vllm.two_sets import TwoSets
from weightcast.receiver import WeightReceiver
from weightcast.wire.messages import Open


class VllmRank(SwitchRank, TwoSets):
    """Takes messages on a thread of its own; ``step`` runs on the worker's main thread."""

    engine = "vLLM"

    def __init__(
        self,
        receiver: WeightReceiver,
        vllm_config: Any,
        *,
        not_updated: tuple[str, ...] = (),
        ends_with_server: bool = False,
    ) -> None:
        """Makes the rank; ``answer`` makes it reachable.

        Args:
            ends_with_server: True ends this process when an API server on another host is gone.
            not_updated: What vLLM computes with beside the receiver's model and no update writes, for reports.
        """
        super().__init__(receiver.rank, receiver.device)
        self.receiver = receiver
        self._vllm_config = vllm_config
        receiver.loader.not_updated += not_updated
        self._ends_with_server = ends_with_server
        self._switched: torch.cuda.Event | None = None
        self._why_not = ""
        self._failure = ""

    def answer(self, invitation: RankInvitation, secret: Secret | None) -> None:
        """Listens for the API server on this host, or connects to the one on another host.

        Raises:
            OSError: The folder cannot be used.
            ConfigError: The API server is on another host, and one of both has no secret.
            EngineFailure: It cannot be reached, or has another secret.
        """
        if invitation.is_for_this_host():
            self.listen(invitation.folder)
        else:
            self.serve(reach(invitation, self.rank, secret))

    def far_api_server_gone(self) -> None:
        """Implements ``SwitchRank.far_api_server_gone``."""
        if self._ends_with_server:
            end_vllm(f"rank {self.rank} has lost the API server on another host")

    def fall_asleep(self, *, discard: bool) -> None:
        """Implements ``TwoSets.fall_asleep`` for the staging set."""
        self.receiver.sleep(
            discard=discard,
            lets_go=True,
            hint="POST /wake_up?tags=weights, then update; /wake_up?tags=kv_cache comes last",
        )

    def let_go(self) -> int:
        """Implements ``TwoSets.let_go``."""
        return self.receiver.loader.staging.let_go()

    def restore(self) -> None:
        """Implements ``TwoSets.restore``."""
        self.receiver.loader.staging.restore()

    def wake(self) -> None:
        """Implements ``TwoSets.wake``."""
        self.stage_again()

    def step_unless(self, why_not: str) -> tuple[bool, str]:
        """As ``step``, unless there is a reason not to switch, which then becomes the answer of this rank.

        Returns whether weights were switched; and the failure in words, or nothing.
        """
        self._why_not, self._failure = why_not, ""
        waited = self.step()
        return waited and not self._failure, self._failure

    def carry_out(self, do: Callable[[], None], session: Open, *, forward: bool) -> None:
        """Implements ``SwitchRank.carry_out``.  The stream of forward passes orders the exchange after those before."""
        try:
            if self._why_not:
                raise Refused(self._why_not)
            with set_current_vllm_config(self._vllm_config):
                do()
        except BaseException as error:
            self._failure = f"rank {self.rank}: {error}"
            raise
        if self.device.type == "cuda":
            self._switched = torch.cuda.Event()
            self._switched.record()

    def between_steps(self, do: Callable[[], None]) -> None:
        """Implements ``SwitchRank.between_steps``; returns when the device has exchanged the weights."""
        super().between_steps(do)
        if self._switched is not None:
            self._switched.synchronize()
