"""Writes the pickle that LMDeploy reads for a bucket in shared memory, opcode by opcode.

The pickle holds torch's own arguments for sharing a CUDA tensor, and plain data.  It names nothing of LMDeploy's.
Indices are in elements of the bucket's dtype.
"""

from __future__ import annotations

from weightcast.adapters.flattened import metadata
from weightcast.comm import pickle_writer
from weightcast.comm.pickle_writer import boolean, listing, mapping, raw
from weightcast.comm.shared_buckets import TorchMemory
from weightcast.comm.torch_reductions import reduced_storage
from weightcast.errors import ConfigError
from weightcast.wire.layout import DTYPES, BucketLayout

# An empty list means "no more buckets"; LMDeploy reads a list only if the request has no load format.
END = pickle_writer.pickled_base64(listing([]))


def bucket_payload(layout: BucketLayout, memory: TorchMemory, *, handle: bool) -> str:
    """Base64 of the pickle that one rank reads for a bucket; raises ConfigError if LMDeploy cannot read it.

    ``handle`` is False if the rank has mapped the buffer for this dtype already.
    """
    dtype = check_readable(layout, memory)
    table = metadata(layout, first_byte=memory.first_byte, unit_bytes=DTYPES[dtype].itemsize)
    content = [("metadata", table), ("require_clone", boolean(False))]
    if handle:
        content.append(("flattened_tensor", reduced_storage(memory, dtype)))
        if memory.turn:
            content.append(("event_ipc_handle", raw(memory.turn)))
    return pickle_writer.pickled_base64(mapping(content))


def check_readable(layout: BucketLayout, memory: TorchMemory) -> str:
    """The bucket's dtype; ``ConfigError`` for several, for a part of a tensor, and for an end outside the buffer."""
    dtypes = sorted({slot.spec.dtype for slot in layout.slots})
    if len(dtypes) != 1:
        raise ConfigError(
            f"bucket {layout.index} has tensors of {', '.join(dtypes)}; LMDeploy reads buckets of one dtype"
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
