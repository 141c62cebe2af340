"""Pickles buffers as ``torch.multiprocessing`` reduces CUDA tensors, for engines that unpickle such handles."""

from __future__ import annotations

from weightcast.comm import pickle_writer
from weightcast.comm.pickle_writer import boolean, integer, integers, raw, sequence
from weightcast.comm.shared_buckets import TorchMemory
from weightcast.wire.layout import DTYPES

REBUILD = pickle_writer.name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
_ANY_DEVICE = integer(0)


def reduced_storage(memory: TorchMemory, dtype: str) -> bytes:
    """Pickles a whole storage as one flat tensor of a dtype in ``DTYPES``.

    The reader replaces the seventh argument by its own device.  A segment of host memory takes the same places; only
    the reference engine reads that.
    """
    numel = memory.size_bytes // DTYPES[dtype].itemsize
    return sequence([REBUILD, sequence(rebuild_arguments(memory, numel=numel, dtype=dtype))])


def rebuild_arguments(
    memory: TorchMemory, *, numel: int, first: int = 0, dtype: str = "uint8", device: bytes = _ANY_DEVICE
) -> list[bytes]:
    """Arguments of ``rebuild_cuda_tensor`` for ``numel`` elements from ``first`` on.

    ``device`` is pickled; the default is for readers that replace it.
    """
    return [
        pickle_writer.name("torch", "Tensor"),
        integers((numel,)),
        integers((1,)),
        integer(first),
        pickle_writer.name("torch.storage", "TypedStorage"),
        pickle_writer.name("torch", dtype),
        device,
        raw(memory.handle),
        integer(memory.size_bytes),
        integer(memory.offset_bytes),
        boolean(False),  # requires_grad
        raw(memory.ref_counter if memory.kind == "cuda" else memory.manager),
        integer(memory.ref_counter_offset),
        raw(memory.event) if memory.event else pickle_writer.NONE,
        boolean(memory.event_sync),
    ]
