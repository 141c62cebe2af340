"""Writes the pickle that SGLang reads for a bucket in shared memory, opcode by opcode.

SGLang's unpickler allows only the names of its own list; all names here are on that list.
"""

from __future__ import annotations

from weightcast.adapters.flattened import metadata
from weightcast.comm.pickle_writer import (
    boolean,
    call,
    integer,
    integers,
    mapping,
    name,
    pickled_base64,
    raw,
    sequence,
    text,
)
from weightcast.comm.shared_buckets import TorchMemory
from weightcast.comm.torch_reductions import REBUILD, rebuild_arguments
from weightcast.wire.layout import BucketLayout

_REDUCTIONS = "torch.multiprocessing.reductions"
_TENSOR, _BYTE = name("torch", "Tensor"), name("torch", "uint8")


def bucket_payload(layout: BucketLayout, memory: TorchMemory) -> str:
    """Base64 of the pickle that one rank reads: ``{"flattened_tensor": uint8 tensor, "metadata": [...]}``.

    The bucket has whole tensors only, and torch's handle is for this rank alone.
    """
    tensor = _cuda_tensor(layout, memory) if memory.kind == "cuda" else _cpu_tensor(layout, memory)
    return pickled_base64(mapping([("flattened_tensor", tensor), ("metadata", metadata(layout))]))


def _cpu_tensor(layout: BucketLayout, memory: TorchMemory) -> bytes:
    """Arguments of torch's ``file_system`` strategy for a host tensor."""
    untyped = call(
        name(_REDUCTIONS, "rebuild_storage_filename"),
        name("torch.storage", "UntypedStorage"),
        raw(memory.manager),
        raw(memory.handle),
        integer(memory.size_bytes),
    )
    typed = call(name(_REDUCTIONS, "rebuild_typed_storage"), untyped, _BYTE)
    seen = sequence([integer(0), integers((layout.size_bytes,)), integers((1,)), boolean(False)])
    return call(name(_REDUCTIONS, "rebuild_tensor"), _TENSOR, typed, seen)


def _cuda_tensor(layout: BucketLayout, memory: TorchMemory) -> bytes:
    """Torch's arguments for a CUDA tensor, with a UUID as the device, which SGLang maps to its own index."""
    device = text(memory.device.removeprefix("GPU-"))
    return call(REBUILD, *rebuild_arguments(memory, numel=layout.size_bytes, device=device))
