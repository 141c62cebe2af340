"""The bytes that LMDeploy wants for a bucket in shared memory: a pickle, written opcode by opcode.

LMDeploy reads it with an unpickler that looks up every name.  What is in it here is what torch's own sharing of a CUDA
tensor has, and plain data; nothing of LMDeploy's is imported or named.  Indices are in elements of the bucket's dtype.
"""

from __future__ import annotations

from weightcast.comm import opcodes
from weightcast.comm.opcodes import boolean, integer, integers, listing, mapping, namespace, raw, text
from weightcast.comm.reduced import reduced_storage
from weightcast.comm.share import TorchMemory
from weightcast.errors import ConfigError
from weightcast.wire.layout import DTYPES, BucketLayout

# "No more buckets": a list, read as one only where the request names no load format.
END = opcodes.pickled_base64(listing([]))


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
                ("dtype", opcodes.name("torch", dtype)),
                ("start_idx", integer((memory.first_byte + slot.offset_bytes) // itemsize)),
                ("end_idx", integer((memory.first_byte + slot.end_bytes) // itemsize)),
                ("numel", integer(slot.spec.numel)),
            ]
        )
        for slot in layout.slots
    ]
    content = [("metadata", listing(entries)), ("require_clone", boolean(False))]
    if handle:
        content.append(("flattened_tensor", reduced_storage(memory, dtype)))
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
