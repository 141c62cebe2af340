"""Pickles a buffer as ``torch.multiprocessing`` reduces a CUDA tensor, for engines that unpickle such handles."""

from __future__ import annotations

from weightcast.comm import pickle_writer
from weightcast.comm.pickle_writer import boolean, integer, integers, raw, sequence
from weightcast.comm.shared_buckets import TorchMemory
from weightcast.wire.layout import DTYPES

_REBUILD = pickle_writer.name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


def reduced_storage(memory: TorchMemory, dtype: str) -> bytes:
    """Pickles a whole storage as one flat tensor.  The reader replaces the seventh argument by its own device.

    A segment of host memory takes the same places; only the reference engine reads that.

    Args:
        memory: Storage to pickle.
        dtype: Name in ``DTYPES``, the type of the tensor's elements.
    """
    arguments = [
        pickle_writer.name("torch", "Tensor"),
        integers((memory.size_bytes // DTYPES[dtype].itemsize,)),
        integers((1,)),
        integer(0),
        pickle_writer.name("torch.storage", "TypedStorage"),
        pickle_writer.name("torch", dtype),
        integer(0),
        raw(memory.handle),
        integer(memory.size_bytes),
        integer(memory.offset_bytes),
        boolean(False),
        raw(memory.ref_counter if memory.kind == "cuda" else memory.manager),
        integer(memory.ref_counter_offset),
        raw(memory.event) if memory.event else pickle_writer.NONE,
        boolean(memory.event_sync),
    ]
    return sequence([_REBUILD, sequence(arguments)])
