"""vLLM's communicator for CPUs, as it is for ranks that cannot share memory."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class OverTheNetwork(CpuCommunicator):
    """Does not look whether ranks share memory: ranks in Ray would all say that they do."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
