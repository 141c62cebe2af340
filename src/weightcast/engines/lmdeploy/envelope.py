"""The bytes that LMDeploy wants for a bucket in shared memory: a pickle, written opcode by opcode.

LMDeploy reads it with an unpickler that looks up every name.  What is in it here is what torch's own sharing of a CUDA
tensor has, and plain data; nothing of LMDeploy's is imported or named.  Indices are in elements of the bucket's dtype.
"""

from __future__ import annotations

from weightcast.comm import opcodes
from weightcast.comm.opcodes import boolean, integer, integers, listing, mapping, namespace, raw, sequence, text
from weightcast.comm.share import TorchMemory
from weightcast.errors import ConfigError
from weightcast.wire.layout import DTYPES, BucketLayout

# "No more buckets": a list, read as one only where the request names no load format.
END = opcodes.pickled_base64(listing([]))

_REBUILD = opcodes.name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


def bucket_payload(layout: BucketLayout, memory: TorchMemory, *, handle: bool) -> str:
    """What one rank reads for a bucket.

    Args:
        layout: What is in it.
        memory: Where it is: this rank's handle to the buffer.
        handle: True to send the handle along; False if the rank has it, for this dtype, from a bucket before.

    Raises:
        ConfigError: LMDeploy could not read the bucket: tensors cut, of several dtypes, or outside the buffer.
    """
    dtype = check_readable(layout, memory)
    itemsize = DTYPES[dtype].itemsize
    entries = [
        namespace(
            [
                ("name", text(slot.spec.name)),
                ("shape", integers(slot.spec.shape)),
                ("dtype", _dtype(dtype)),
                ("start_idx", integer((memory.first_byte + slot.offset_bytes) // itemsize)),
                ("end_idx", integer((memory.first_byte + slot.end_bytes) // itemsize)),
                ("numel", integer(slot.spec.numel)),
            ]
        )
        for slot in layout.slots
    ]
    content = [("metadata", listing(entries)), ("require_clone", boolean(False))]
    if handle:
        content.append(("flattened_tensor", _tensor(memory, dtype)))
        if memory.turn:
            content.append(("event_ipc_handle", raw(memory.turn)))
    return opcodes.pickled_base64(mapping(content))


def check_readable(layout: BucketLayout, memory: TorchMemory) -> str:
    """The one dtype of a bucket that LMDeploy can read.

    Raises:
        ConfigError: It cannot.
    """
    dtypes = sorted({slot.spec.dtype for slot in layout.slots})
    if len(dtypes) != 1:
        raise ConfigError(
            f"bucket {layout.index} has tensors of {', '.join(dtypes)}; LMDeploy reads one dtype at a time"
        )
    itemsize = DTYPES[dtypes[0]].itemsize
    for slot in layout.slots:
        if not slot.whole:
            raise ConfigError(f"bucket {layout.index} has a part of {slot.spec.name}; LMDeploy reads whole tensors")
        if (memory.first_byte + slot.offset_bytes) % itemsize:
            raise ConfigError(f"bucket {layout.index}: {slot.spec.name} does not start at a whole element")
    if memory.first_byte + layout.size_bytes > memory.size_bytes:
        raise ConfigError(
            f"bucket {layout.index} ends at byte {memory.first_byte + layout.size_bytes} of a buffer of "
            f"{memory.size_bytes}"
        )
    return dtypes[0]


def _tensor(memory: TorchMemory, dtype: str) -> bytes:
    """The whole storage as one flat tensor: function and arguments, of which LMDeploy replaces the seventh, the device.

    A segment of host memory is put in the same places; no LMDeploy reads it, but what stands in for one on a CPU does.
    """
    cuda = memory.kind == "cuda"
    arguments = [
        opcodes.name("torch", "Tensor"),
        integers((memory.size_bytes // DTYPES[dtype].itemsize,)),
        integers((1,)),
        integer(0),
        opcodes.name("torch.storage", "TypedStorage"),
        _dtype(dtype),
        integer(0),
        raw(memory.handle),
        integer(memory.size_bytes),
        integer(memory.offset_bytes),
        boolean(False),
        raw(memory.ref_counter if cuda else memory.manager),
        integer(memory.ref_counter_offset),
        raw(memory.event) if memory.event else opcodes.NONE,
        boolean(memory.event_sync),
    ]
    return sequence([_REBUILD, sequence(arguments)])


def _dtype(name: str) -> bytes:
    return opcodes.name("torch", name)
