"""vLLM's platform for CPUs, with what it lacks for ranks in Ray.

vLLM for CPUs says that it "does not support ray", because it knows no resource of Ray's to ask for.  The nodes of the
tests say that they have GPUs.  And it takes all ranks in Ray to be on one host, where they can share memory.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuInRay(CpuPlatform):
    """A CPU that Ray counts as a GPU."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "ray_communicator.OverTheNetwork"
