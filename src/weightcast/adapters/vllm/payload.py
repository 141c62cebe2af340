"""The two pickles that vLLM reads.  This module writes them and never unpickles anything.

The backend ``ipc`` reads handles in the form of ``torch.multiprocessing``.  Versions that take no unique id over HTTP
read NCCL's id from the group's store, as an object of vLLM's own class.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm import pickle_writer
from weightcast.comm.shared_buckets import Shared, TorchMemory
from weightcast.comm.torch_reductions import rebuild_arguments
from weightcast.errors import ConfigError

# Key under which vLLM's ranks look for rank 0's first broadcast in the group's store.
ID_KEY = "broadcast_from/0/0"


def ipc_handles(shared: Sequence[Shared]) -> str:
    """Base64 of a pickled map from GPU UUID to arguments that rebuild the bucket; ``ConfigError`` for host buffers."""
    handles: dict[str, bytes] = {}
    for buffer in shared:
        for memory in buffer.torch[:1]:  # the others are handles to the same buffer for other processes
            handles[memory.device.removeprefix("GPU-")] = _rebuild_arguments(memory)
    return pickle_writer.pickled_base64(pickle_writer.mapping(handles.items()))


def stored_id(unique_id: bytes) -> bytes:
    """NCCL's id as a pickled ``ncclUniqueId`` of vLLM, a class that this process does not have.

    ``ctypes`` rebuilds a structure from its class and (attributes, memory).
    """
    structure = pickle_writer.name("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
    memory = pickle_writer.sequence([pickle_writer.mapping(()), pickle_writer.raw(unique_id)])
    return pickle_writer.pickled(pickle_writer.call(pickle_writer.name("_ctypes", "_unpickle"), structure, memory))


def _rebuild_arguments(memory: TorchMemory) -> bytes:
    """Arguments of ``torch.multiprocessing.reductions.rebuild_cuda_tensor``; vLLM replaces the device."""
    if memory.kind != "cuda":
        raise ConfigError(
            "vLLM's backend ipc maps memory of a GPU only, and these weights are on the CPU",
            hint="move the weights to the engine's GPU, or start vLLM with weightcast's own backend",
        )
    first = memory.first_byte
    return pickle_writer.sequence(rebuild_arguments(memory, numel=memory.size_bytes - first, first=first))
