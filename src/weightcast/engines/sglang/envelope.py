"""The bytes that SGLang wants for a bucket in shared memory: a pickle, written by hand.

SGLang reads it with an unpickler that looks every name up in a list of its own.  Writing the opcodes ourselves means
that those names, and no others, are in it, whatever is installed here: no class is imported to be pickled, and nothing
in this process could add a name.  There is no reader here.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from weightcast.comm.share import TorchMemory
from weightcast.wire.layout import BucketLayout

_PROTOCOL = b"\x80\x04"
_MARK, _TUPLE, _EMPTY_TUPLE = b"(", b"t", b")"
_EMPTY_DICT, _SETITEMS, _EMPTY_LIST, _APPENDS = b"}", b"u", b"]", b"e"
_REDUCE, _BUILD, _STOP = b"R", b"b", b"."
_TRUE, _FALSE, _NONE = b"\x88", b"\x89", b"N"

# Every name that a payload of ours may carry; SGLang's list has all of them.
GLOBALS = frozenset(
    {
        "torch Tensor",
        "torch uint8",
        "torch.storage TypedStorage",
        "torch.storage UntypedStorage",
        "torch.multiprocessing.reductions rebuild_tensor",
        "torch.multiprocessing.reductions rebuild_typed_storage",
        "torch.multiprocessing.reductions rebuild_storage_filename",
        "torch.multiprocessing.reductions rebuild_cuda_tensor",
        "types SimpleNamespace",
    }
)
_TORCH = "torch"
_REDUCTIONS = "torch.multiprocessing.reductions"


def bucket_payload(layout: BucketLayout, memory: TorchMemory) -> str:
    """What one rank reads: ``{"flattened_tensor": uint8 tensor, "metadata": [...]}``, in base64.

    Args:
        layout: What is in the bucket; whole tensors, no gaps are needed.
        memory: The buffer, as torch shares it; to be opened by this rank alone.
    """
    tensor = _cuda_tensor(layout, memory) if memory.kind == "cuda" else _cpu_tensor(layout, memory)
    content = _dict([("flattened_tensor", tensor), ("metadata", _metadata(layout))])
    return base64.b64encode(_PROTOCOL + content + _STOP).decode()


def _metadata(layout: BucketLayout) -> bytes:
    entries = [
        _namespace(
            [
                ("name", _text(slot.spec.name)),
                ("shape", _ints(slot.shape)),
                ("dtype", _dtype(slot.spec.dtype)),
                ("start_idx", _int(slot.offset_bytes)),
                ("end_idx", _int(slot.end_bytes)),
                ("numel", _int(slot.size_bytes)),
            ]
        )
        for slot in layout.slots
    ]
    return _EMPTY_LIST + _MARK + b"".join(entries) + _APPENDS


def _cpu_tensor(layout: BucketLayout, memory: TorchMemory) -> bytes:
    """As ``torch.multiprocessing`` hands over a host tensor under its ``file_system`` strategy."""
    untyped = _call(
        _REDUCTIONS,
        "rebuild_storage_filename",
        _global("torch.storage", "UntypedStorage"),
        _bytes(memory.manager),
        _bytes(memory.handle),
        _int(memory.size_bytes),
    )
    typed = _call(_REDUCTIONS, "rebuild_typed_storage", untyped, _global(_TORCH, "uint8"))
    seen = _tuple(_int(0), _ints((layout.size_bytes,)), _ints((1,)), _FALSE)
    return _call(_REDUCTIONS, "rebuild_tensor", _global(_TORCH, "Tensor"), typed, seen)


def _cuda_tensor(layout: BucketLayout, memory: TorchMemory) -> bytes:
    """As ``torch.multiprocessing`` hands over a CUDA tensor, but with a UUID, which SGLang maps to its own index."""
    return _call(
        _REDUCTIONS,
        "rebuild_cuda_tensor",
        _global(_TORCH, "Tensor"),
        _ints((layout.size_bytes,)),
        _ints((1,)),
        _int(0),
        _global("torch.storage", "TypedStorage"),
        _global(_TORCH, "uint8"),
        _text(memory.device.removeprefix("GPU-")),
        _bytes(memory.handle),
        _int(memory.size_bytes),
        _int(memory.offset_bytes),
        _FALSE,
        _bytes(memory.ref_counter),
        _int(memory.ref_counter_offset),
        _bytes(memory.event) if memory.event else _NONE,
        _TRUE if memory.event_sync else _FALSE,
    )


def _global(module: str, name: str) -> bytes:
    assert f"{module} {name}" in GLOBALS or module == _TORCH
    return f"c{module}\n{name}\n".encode()


def _dtype(name: str) -> bytes:
    return _global(_TORCH, name)


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    return _global(module, name) + _tuple(*arguments) + _REDUCE


def _namespace(fields: Sequence[tuple[str, bytes]]) -> bytes:
    return _global("types", "SimpleNamespace") + _EMPTY_TUPLE + _REDUCE + _dict(fields) + _BUILD


def _dict(items: Sequence[tuple[str, bytes]]) -> bytes:
    return _EMPTY_DICT + _MARK + b"".join(_text(key) + value for key, value in items) + _SETITEMS


def _tuple(*items: bytes) -> bytes:
    return _MARK + b"".join(items) + _TUPLE if items else _EMPTY_TUPLE


def _ints(values: Sequence[int]) -> bytes:
    return _tuple(*map(_int, values))


def _int(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _bytes(value: bytes) -> bytes:
    return b"B" + len(value).to_bytes(4, "little") + value
