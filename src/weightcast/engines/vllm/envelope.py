"""The two pickles that vLLM wants; nothing is ever unpickled here.

The backend ``ipc`` reads what ``torch.multiprocessing`` says of a buffer.  Versions that are told no unique id over
HTTP read NCCL's id from the group's store, as an object of vLLM's own class.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm import opcodes
from weightcast.comm.share import Shared, TorchMemory
from weightcast.errors import ConfigError

# Where vLLM's members of a group that meets in a store look for what rank 0 says first.
ID_KEY = "broadcast_from/0/0"


def ipc_handles(shared: Sequence[Shared]) -> str:
    """Base64 of the pickled handles of a filled bucket: GPU UUID to the arguments that rebuild the buffer there.

    Args:
        shared: What each trainer rank shares, one buffer for each GPU.

    Raises:
        ConfigError: A buffer is not on a GPU.
    """
    handles: dict[str, bytes] = {}
    for buffer in shared:
        for memory in buffer.torch[:1]:  # the other exports are of the same buffer, for other processes
            handles[memory.device.removeprefix("GPU-")] = _rebuild_arguments(memory)
    return opcodes.pickled_base64(opcodes.mapping(handles.items()))


def stored_id(unique_id: bytes) -> bytes:
    """NCCL's id as a pickled ``ncclUniqueId`` of vLLM, a class that this process does not have.

    A ``ctypes`` structure is rebuilt from its class and (attributes, memory).
    """
    structure = opcodes.name("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
    memory = opcodes.sequence([opcodes.mapping(()), opcodes.raw(unique_id)])
    return opcodes.pickled(opcodes.call(opcodes.name("_ctypes", "_unpickle"), structure, memory))


def _rebuild_arguments(memory: TorchMemory) -> bytes:
    """What ``torch.multiprocessing.reductions.rebuild_cuda_tensor`` takes; vLLM puts its own device into it."""
    if memory.kind != "cuda":
        raise ConfigError(
            "vLLM's backend ipc maps memory of a GPU only, and these weights are on the CPU",
            hint="weights on the engine's GPU, or weightcast's own backend in vLLM",
        )
    return opcodes.sequence(
        [
            opcodes.name("torch", "Tensor"),
            opcodes.integers([memory.size_bytes - memory.first_byte]),
            opcodes.integers([1]),
            opcodes.integer(memory.first_byte),
            opcodes.name("torch.storage", "TypedStorage"),
            opcodes.name("torch", "uint8"),
            opcodes.integer(0),  # the device; replaced by the reader
            opcodes.raw(memory.handle),
            opcodes.integer(memory.size_bytes),
            opcodes.integer(memory.offset_bytes),
            opcodes.boolean(False),  # requires_grad
            opcodes.raw(memory.ref_counter),
            opcodes.integer(memory.ref_counter_offset),
            opcodes.raw(memory.event),
            opcodes.boolean(memory.event_sync),
        ]
    )
