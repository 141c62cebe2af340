"""LMDeploy's whole server on a CPU: what it asks of CUDA is done with host memory.

LMDeploy's own are its processes, scheduler, paging, engine loop, executor, agent, models, sampling and API server.
Not its own: attention over the paged cache (torch's, over the same blocks), fused experts (over weights in the layout
of its Triton kernel), and the other kernels, for which it has versions in torch itself.  Streams and events do nothing,
since operations on a CPU are in order.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

gc.set_threshold(100_000, 50, 100)
os.environ["LMDEPLOY_ENABLE_CHECK_ENV"] = "0"
_FREE = 1 << 30


class Event:
    """In the place of ``torch.cuda.Event``: everything has happened already."""

    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """In the place of ``torch.cuda.Stream``."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class OnHost(TorchFunctionMode):
    """Makes tensors on the CPU that were asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch._C._nn._parse_to and args and isinstance(args[0], int):
            args = ("cpu", *args[1:])  # the number of a GPU
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*(_on_host(value) for value in args), **kwargs)


def _on_host(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def pretend_cuda() -> None:
    """Replaces the parts of ``torch.cuda`` that LMDeploy calls."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    # Each its own: torch.compile's tables want every function once.
    cuda.current_stream = lambda *args: Stream()
    cuda.default_stream = lambda *args: Stream()
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.set_device = lambda device: None
    cuda.init = lambda: None
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.mem_get_info = lambda *args: (_FREE, _FREE)
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(uuid="cpu", total_memory=_FREE)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    OnHost().__enter__()


def pretend_in_all_threads() -> None:
    """Does so in threads that come later, too: Ray runs its actors on one of their own."""
    run = threading.Thread.run

    def on_host(self: threading.Thread) -> None:
        with OnHost():
            run(self)

    threading.Thread.run = on_host


def move_to_other_memory() -> None:
    """Makes a model that moves to a GPU move to other memory, one tensor after the other, as between two devices."""
    move = torch.nn.Module.to

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        move(self, *args, **kwargs)
        if args and isinstance(args[0], int):
            for module in self.modules():
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        tensor.data = tensor.data.clone()
        return self

    torch.nn.Module.to = moved


class PagedAttention:
    """LMDeploy's paged attention, one sequence after the other."""

    def __init__(self, spec: Any) -> None:
        self.scale = spec.scale or spec.head_dim**-0.5
        self.groups = spec.num_heads // spec.num_kv_heads

    def forward(self, query: Any, key: Any, value: Any, keys: Any, values: Any, *, attn_metadata: Any, **_: Any) -> Any:
        block, start, answers = keys.size(1), 0, []
        for row, (new, length) in enumerate(
            zip(attn_metadata.q_seqlens.tolist(), attn_metadata.kv_seqlens.tolist(), strict=True)
        ):
            places = torch.arange(length)
            blocks = attn_metadata.block_offsets[row].long()[places // block]
            places = places % block
            fresh = slice(length - new, length)
            keys[blocks[fresh], places[fresh]] = key[start : start + new]
            values[blocks[fresh], places[fresh]] = value[start : start + new]
            mask = torch.arange(length)[None, :] <= torch.arange(length - new, length)[:, None]
            parts = [query[start : start + new]]
            parts += [cache[blocks, places].repeat_interleave(self.groups, 1) for cache in (keys, values)]
            heads = [part.transpose(0, 1) for part in parts]
            attend = torch.nn.functional.scaled_dot_product_attention
            answers.append(attend(*heads, attn_mask=mask, scale=self.scale).transpose(0, 1))
            start += new
        return torch.cat(answers)


class FusedMoE:
    """LMDeploy's fused experts, one expert after the other; weights are kept as its Triton kernel wants them.

    Those are the same tensors over memory in which rows and columns have changed places.
    """

    def __init__(self, spec: Any) -> None:
        self.renormalize = spec.renormalize

    def update_weights(self, gate_up: Any, down: Any) -> Any:
        return tuple(weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (gate_up, down))

    def forward(
        self, hidden: Any, topk_weights: Any, topk_ids: Any, gate_up: Any, down: Any, *more: Any, **named: Any
    ) -> Any:
        assert not any(value is not None for value in (*more, *named.values())), "biases and lists of experts"
        assert gate_up.stride(1) == down.stride(1) == 1, "the kernel's layout"
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden)
        for expert in topk_ids.unique().tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden[rows] @ gate_up[expert].T).chunk(2, -1)
            answer = (torch.nn.functional.silu(gate) * up) @ down[expert].T
            out.index_add_(0, rows, answer * topk_weights[rows, places, None].to(answer.dtype))
        return out


def use_host_backend() -> None:
    """Gives LMDeploy a backend for the CPU; called once LMDeploy can be imported."""
    from lmdeploy.pytorch.backends import selector
    from lmdeploy.pytorch.backends.attention import AttentionMetadata
    from lmdeploy.pytorch.backends.default.op_backend import DefaultOpsBackend

    class HostOps(DefaultOpsBackend):
        @staticmethod
        def get_name() -> str:
            return "host"

        @classmethod
        def build_op(cls, spec: Any, **kwargs: Any) -> Any:
            stand_in = {"PagedAttentionBuildSpec": PagedAttention, "FusedMoEBuildSpec": FusedMoE}.get(
                type(spec).__name__
            )
            if stand_in is not None:
                return stand_in(spec)
            return super().build_op(spec, **kwargs)

        @staticmethod
        def get_attention_metadata_cls() -> Any:
            return AttentionMetadata

        @classmethod
        def update_step_context(cls, step_context: Any) -> Any:
            step_context.attn_metadata = AttentionMetadata(
                step_context.is_decoding,
                step_context.block_offsets,
                q_start_loc=step_context.q_start_loc,
                q_seqlens=step_context.q_seqlens,
                kv_seqlens=step_context.kv_seqlens,
            )
            return step_context

        @staticmethod
        def ccl_backend() -> str:
            return "gloo"

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def support_ray() -> bool:
            return True

    selector._get_backend = lambda: HostOps


def keep_float32() -> None:
    """Serves a float32 checkpoint in float32; LMDeploy turns it into float16, and near ties then go either way."""
    from lmdeploy.pytorch import config

    update = config._update_torch_dtype

    def kept(model_config: Any, dtype: str, *arguments: Any, **named: Any) -> Any:
        found = str(getattr(model_config.hf_config, "dtype", None)).removeprefix("torch.")
        return update(model_config, "float32" if found == "float32" else dtype, *arguments, **named)

    config._update_torch_dtype = kept


def take_weights_from_host() -> None:
    """Lets LMDeploy's own routes take weights from segments of the host, as ``lmdeploy_rig`` does."""
    import torch.multiprocessing.reductions as reductions
    from host_memory import open_segment, receive_on_host

    reductions.rebuild_cuda_tensor = open_segment(lambda _: None, own_device=0)
    receive_on_host()


def count_drafts(path: str) -> None:
    """Writes a line to a file for each step with a draft: tokens tried and accepted.

    LMDeploy's own metrics miss steps if its API server is slow to take their output.
    """
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop

    make = EngineLoop._make_infer_outputs

    def made(self: Any, *arguments: Any, **named: Any) -> Any:
        outputs = make(self, *arguments, **named)
        told = [output.req_metrics.spec_info for output in outputs.values()]
        with open(path, "a") as file:
            file.writelines(f"{each['num_draft_tokens']} {each['num_accepted_tokens']}\n" for each in told if each)
        return outputs

    EngineLoop._make_infer_outputs = made


torch.set_num_threads(1)
pretend_cuda()
if any(word.endswith("/default_worker.py") for word in sys.orig_argv):
    pretend_in_all_threads()
if os.environ.get("WEIGHTS_FROM_HOST"):
    take_weights_from_host()
use_host_backend()
if os.environ.get("DRAFT_COUNTS"):
    count_drafts(os.environ["DRAFT_COUNTS"])
keep_float32()
move_to_other_memory()
