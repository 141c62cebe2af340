"""Bodies of SGLang's requests, and the tensors that a payload in one describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_storage_filename

from weightcast.comm.ipc import device_of
from weightcast.errors import WireError
from weightcast.lab.dialects.live_weights import NamedTensorList, open_cuda
from weightcast.lab.dialects.unpickled import Called, Named, dtype_named

Selector = Literal["target", "draft", "all"]
_CUDA = "torch.multiprocessing.reductions.rebuild_cuda_tensor"


class BeginWeightUpdateReqInput(msgspec.Struct, frozen=True):
    """``POST /begin_weight_update``."""

    selector: Selector = "all"


class EndWeightUpdateReqInput(msgspec.Struct, frozen=True):
    """``POST /end_weight_update``."""


class InitWeightsUpdateGroupReqInput(msgspec.Struct, frozen=True):
    """``POST /init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyWeightsUpdateGroupReqInput(msgspec.Struct, frozen=True):
    """``POST /destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


class UpdateWeightsFromDistributedReqInput(msgspec.Struct, frozen=True):
    """``POST /update_weights_from_distributed``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    selector: Selector = "all"


class UpdateWeightsFromTensorReqInput(msgspec.Struct, frozen=True):
    """``POST /update_weights_from_tensor``."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Selector = "all"


class UpdateWeightFromDiskReqInput(msgspec.Struct, frozen=True):
    """``POST /update_weights_from_disk``."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class PauseGenerationReqInput(msgspec.Struct, frozen=True):
    """``POST /pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationReqInput(msgspec.Struct, frozen=True):
    """``POST /continue_generation``."""

    torch_empty_cache: bool = True


class UpdateWeightVersionReqInput(msgspec.Struct, frozen=True):
    """``POST /update_weight_version``."""

    new_version: str
    abort_all_requests: bool = True


class CheckWeightsReqInput(msgspec.Struct, frozen=True):
    """``POST /weights_checker``, restricted to the action that changes nothing."""

    action: Literal["checksum"] = "checksum"


class GenerateReqInput(msgspec.Struct, frozen=True):
    """``POST /generate``, restricted to scoring prompts."""

    input_ids: list[int]
    return_logprob: bool = False
    logprob_start_len: int = -1
    sampling_params: dict[str, Any] = {}


def bucket_of(described: Any) -> NamedTensorList:
    """Opens the tensors that a payload describes.

    Raises:
        WireError: The payload is not a flattened bucket, or has names that SGLang's decoder refuses.
    """
    if not isinstance(described, dict):
        raise WireError("not a flattened bucket")
    found = cast(dict[str, Any], described)
    flat = _open(found.get("flattened_tensor"))
    named: list[tuple[str, torch.Tensor]] = []
    for entry in cast(list[Any], found.get("metadata")):
        if not isinstance(entry, Called) or str(entry.function) != "types.SimpleNamespace":
            raise WireError(f"Blocked unsafe global ({entry}) during pickle deserialization")
        meta = entry.state
        part = flat[meta["start_idx"] : meta["end_idx"]]
        named.append((meta["name"], part.clone().view(dtype_named(meta["dtype"])).view(meta["shape"])))
    return named


def _open(described: Any) -> torch.Tensor:
    """Opens memory that ``torch.multiprocessing`` shares: by name on the host, by a handle on a GPU."""
    if isinstance(described, Called) and str(described.function) == _CUDA:
        return _open_cuda(described.arguments)
    function, (_, typed, seen) = _call(described, "rebuild_tensor", 3)
    _, (untyped, dtype) = _call(typed, "rebuild_typed_storage", 2)
    _, (_, manager, name, size_bytes) = _call(untyped, "rebuild_storage_filename", 4)
    offset, size, stride, _ = seen
    if dtype_named(dtype) != torch.uint8:
        raise WireError(f"{function}: the dtype of a bucket must be uint8")
    storage: Any = rebuild_storage_filename(torch.UntypedStorage, manager, name, size_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, size, stride)


def _open_cuda(arguments: Sequence[Any]) -> torch.Tensor:
    """As SGLang, takes the UUID of a GPU where torch has its number."""
    uuid = arguments[6] if len(arguments) > 6 else None
    device = device_of(str(uuid)) or device_of(f"GPU-{uuid}")
    if device is None:
        raise WireError(f"this process does not see GPU {uuid}")
    flat = open_cuda(arguments, device)
    if flat.dtype != torch.uint8:
        raise WireError("the dtype of a bucket must be uint8")
    return flat


def _call(described: Any, name: str, count: int) -> tuple[Named, tuple[Any, ...]]:
    if not isinstance(described, Called) or str(described.function) != f"torch.multiprocessing.reductions.{name}":
        raise WireError(f"Blocked unsafe global ({described}) during pickle deserialization")
    if len(described.arguments) != count:
        raise WireError(f"{name} needs {count} arguments")
    return described.function, described.arguments
