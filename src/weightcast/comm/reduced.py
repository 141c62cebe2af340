"""A buffer as ``torch.multiprocessing`` reduces a CUDA tensor: a function and its arguments, for engines that unpickle.

It knows torch's sharing, no engine.
"""

from __future__ import annotations

from weightcast.comm import opcodes
from weightcast.comm.opcodes import boolean, integer, integers, raw, sequence
from weightcast.comm.share import TorchMemory
from weightcast.wire.layout import DTYPES

_REBUILD = opcodes.name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


def reduced_storage(memory: TorchMemory, dtype: str) -> bytes:
    """The whole storage as one flat tensor.  Whoever reads it puts its own device in the place of the seventh argument.

    A segment of host memory is put in the same places; no engine reads it, but what stands in for one on a CPU does.

    Args:
        memory: The storage.
        dtype: As elements of what, a name of ``DTYPES``.
    """
    arguments = [
        opcodes.name("torch", "Tensor"),
        integers((memory.size_bytes // DTYPES[dtype].itemsize,)),
        integers((1,)),
        integer(0),
        opcodes.name("torch.storage", "TypedStorage"),
        opcodes.name("torch", dtype),
        integer(0),
        raw(memory.handle),
        integer(memory.size_bytes),
        integer(memory.offset_bytes),
        boolean(False),
        raw(memory.ref_counter if memory.kind == "cuda" else memory.manager),
        integer(memory.ref_counter_offset),
        raw(memory.event) if memory.event else opcodes.NONE,
        boolean(memory.event_sync),
    ]
    return sequence([_REBUILD, sequence(arguments)])
