"""LMDeploy on a CPU, as far as it goes: ``python lmdeploy_rig.py MODEL_DIR``, in LMDeploy's own environment.

LMDeploy's own: its HTTP routes and schemas, its middlewares, the engine's sleep and waking, the agent's methods that
take weights, checkpoint-engine's receiver, and its models (Llama, Qwen3-VL and Qwen2.5-VL with vision towers) with
packed projections, loader, finalisation and what they make of an image's patches.

Not LMDeploy's: scheduler, paged cache, attention kernels and generation (``POST /rig_generate``, the whole sequence
anew for each token).  What CUDA would do is replaced by what torch does with host memory: the current device is "cpu",
a CUDA handle is the name of a shared segment in the same place, an event is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import socket
import threading
import types
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from fastapi import Body
from host_memory import open_segment, receive_on_host

CALLS: list[str] = []


class HostEvent:
    """In the place of ``torch.cuda.Event``: remembers the order of calls."""

    def wait(self) -> None:
        CALLS.append("event.wait")

    def record(self) -> None:
        CALLS.append("event.record")

    @classmethod
    def from_ipc_handle(cls, device: object, handle: bytes) -> HostEvent:
        CALLS.append("event.open")
        return cls()


def pretend_cuda() -> None:
    """Stands in for the parts of CUDA that LMDeploy calls during an update, on a build of torch without CUDA."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="rig-0")
    cuda.Event = HostEvent
    reductions.rebuild_cuda_tensor = open_segment(CALLS.append, own_device="cpu")


def build_model(folder: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """LMDeploy's own model of a folder, and its configuration."""
    from lmdeploy.pytorch.backends import selector
    from lmdeploy.pytorch.backends.default.op_backend import DefaultOpsBackend
    from lmdeploy.pytorch.model_inputs import StepContextManager
    from lmdeploy.pytorch.models.patch import BuildModelContext, build_model_from_hf_config
    from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights
    from transformers import AutoConfig

    class Attention:
        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            groups = self.spec.num_heads // self.spec.num_kv_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            query, key, value = (part.unsqueeze(0).transpose(1, 2) for part in (query, key, value))
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(query, key, value, is_causal=True, scale=self.spec.scale).transpose(1, 2)[0]

    class FlashAttention:
        """Attention within each image or window, without a cache."""

        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def forward(self, query: Any, key: Any, value: Any, *, q_seqlens: Any, **_: Any) -> Any:
            attend, scale = torch.nn.functional.scaled_dot_product_attention, self.spec.scale
            parts = zip(*(part.split(q_seqlens.tolist()) for part in (query, key, value)), strict=True)
            heads = ([one.transpose(0, 1)[None] for one in part] for part in parts)
            return torch.cat(
                [attend(*part, scale=scale, is_causal=self.spec.causal)[0].transpose(0, 1) for part in heads]
            )

    class HostOps(DefaultOpsBackend):
        @staticmethod
        def get_name() -> str:
            return "cpu"

        @classmethod
        def build_op(cls, spec: Any, **kwargs: Any) -> Any:
            """From 0.17 on."""
            kinds = {"PagedAttentionBuildSpec": Attention, "FlashAttentionBuildSpec": FlashAttention}
            kind = kinds.get(type(spec).__name__)
            return super().build_op(spec, **kwargs) if kind is None else kind(spec)

        @classmethod
        def get_layer_impl_builder(cls, layer_type: Any) -> Any:
            """Before."""
            if layer_type.name != "PagedAttention":
                return super().get_layer_impl_builder(layer_type)
            build = lambda **kwargs: Attention(types.SimpleNamespace(**kwargs))  # noqa: E731
            return types.SimpleNamespace(build=build)

        @staticmethod
        def ccl_backend() -> str:
            return "gloo"

    selector._get_backend = lambda: HostOps
    config = AutoConfig.from_pretrained(folder)
    manager = StepContextManager(BuildModelContext())
    context = BuildModelContext()
    model = build_model_from_hf_config(config, dtype=dtype, device="cpu", ctx_mgr=manager, build_model_ctx=context)
    load_model_weights(model, folder, device="cpu")
    return model.eval(), config


def bare_agent(model: Any) -> Any:
    """LMDeploy's agent without what it has for generating."""
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

    agent = BaseModelAgent.__new__(BaseModelAgent)
    space = types.SimpleNamespace
    nobody = space(is_enabled=lambda: False, get_model=lambda: None, method=None, cache_engine=None)
    agent.__dict__.update(
        rank=0,
        memdecode_agent=None,
        cache_engine=object(),
        state_cache_engine=None,
        spec_agent=nobody,
        dist_ctx=space(tp_group=space(rank=0)),
        dist_config=space(dp=1),
        state=space(is_sleeping=False, to_sleep=space(clear=lambda: None), to_wakeup=space(set=lambda: None)),
        patched_model=space(get_model=lambda: model, get_prefill_warmup_token_sizes=list),
        _model_update_group={},
        _update_params_ipc_tensor=None,
        _update_params_ipc_event=None,
        _checkpoint_engine_zmq_ctx=None,
    )
    agent.all_context = contextlib.nullcontext
    for name in ("shutdown_kv_connector", "reset_runtime_state", "warmup", "_drain_queues"):
        setattr(agent, name, lambda: None)
    agent._release_completed_h2d_transfers = lambda: None
    agent.reset_graph_runner = lambda: CALLS.append("graphs.reset")
    agent.build_cache_engine = lambda: CALLS.append("cache.build")
    return agent


class Engine:
    """LMDeploy's engine as far as weights go: one executor, one lock; as with Ray unless told otherwise."""

    def __init__(self, agent: Any, executor: str) -> None:
        self._agent = agent
        self._executor = executor
        self._lock = asyncio.Lock()
        self._busy = 0
        self.most_at_once = 0

    def _only_ray(self) -> None:
        """Raises the error of LMDeploy's other executors, which its routes answer with a 500."""
        if self._executor != "ray":
            raise NotImplementedError("Not Implemented.")

    @contextlib.contextmanager
    def _counted(self) -> Any:
        self._busy += 1
        self.most_at_once = max(self.most_at_once, self._busy)
        try:
            yield
        finally:
            self._busy -= 1

    async def _locked(self, function: Any, *args: Any) -> Any:
        self._only_ray()
        async with self._lock:
            with self._counted():
                return await asyncio.to_thread(function, *args)

    def update_params(self, request: Any) -> None:
        self._only_ray()
        with self._counted():
            self._agent.update_params(request)

    async def init_weights_update_group(self, request: Any) -> Any:
        return await self._locked(self._agent.init_weights_update_group, request)

    async def update_weights_from_distributed(self, request: Any) -> Any:
        return await self._locked(self._agent.update_weights_from_distributed, request)

    async def destroy_weights_update_group(self, request: Any) -> Any:
        return await self._locked(self._agent.destroy_weights_update_group, request)

    async def get_checkpoint_engine_status(self) -> Any:
        status = await asyncio.to_thread(self._agent.get_checkpoint_engine_status)
        on_device = status["weight_devices"] == ["cpu"]
        return [status | {"ready": on_device and status["checkpoint_engine_version"] is not None}]

    async def update_weights_from_ipc(self, request: Any, reject_reason: str | None = None) -> Any:
        async with self._lock:
            with self._counted():
                return await asyncio.to_thread(self._agent.update_weights_from_ipc, request, reject_reason)

    def complete_weights_update(self) -> None:
        CALLS.append("complete")

    async def sleep(self, level: int) -> None:
        await self._agent.sleep(level)

    def wakeup(self, tags: Any) -> None:
        self._agent.wakeup(tags)


def build_app(model: Any, config: Any, *, executor: str, device_type: str, keys: list[str]) -> Any:
    """LMDeploy's routes and middlewares around one agent."""
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from lmdeploy.serve.core.async_engine import AsyncEngine
    from lmdeploy.serve.openai.api_server import ServerContext, validation_exception_handler
    from lmdeploy.serve.openai.endpoints.router import create_openai_router
    from lmdeploy.serve.utils.server_utils import AuthenticationMiddleware, EngineSleepingMiddleware

    engine = Engine(bare_agent(model), executor)
    space = types.SimpleNamespace
    above = space(
        backend="pytorch",
        backend_config=space(device_type=device_type, tp=1, dp=1, ep=1, dp_rank=0),
        engine=engine,
        is_sleeping=False,
        sleeping_tags=set(),
        epoch=0,
        model_name="rig",
        session_mgr=space(async_abort_all=lambda: asyncio.sleep(0)),
    )
    above.backend_config.__dict__.update(block_size=64, num_cpu_blocks=0, num_gpu_blocks=0)
    for name in ("sleep", "wakeup", "stop_all_session", "complete_weights_update"):
        if hasattr(AsyncEngine, name):
            setattr(above, name, types.MethodType(getattr(AsyncEngine, name), above))
    context = ServerContext()
    context.async_engine = above
    app = FastAPI(docs_url="/")
    app.include_router(create_openai_router(context))
    app.add_exception_handler(RequestValidationError, validation_exception_handler)
    if keys:
        app.add_middleware(AuthenticationMiddleware, tokens=keys)
    asleep = frozenset({("POST", "/rig_generate")})
    app.add_middleware(EngineSleepingMiddleware, is_sleeping=lambda: above.is_sleeping, protected_routes=asleep)

    @app.post("/rig_generate")
    def rig_generate(
        input_ids: Annotated[list[int], Body()],
        max_tokens: Annotated[int, Body()],
        image: Annotated[dict[str, Any] | None, Body()] = None,
    ) -> dict[str, list[int]]:
        return {"output_ids": generate(model, config, input_ids, max_tokens, image)}

    @app.get("/rig_weights")
    def rig_weights() -> dict[str, str]:
        kept = (*model.named_parameters(), *model.named_buffers())
        return {name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for name, tensor in kept}

    @app.post("/rig_calls")
    def rig_calls() -> dict[str, Any]:
        seen, CALLS[:] = list(CALLS), []
        return {"calls": seen, "most_at_once": engine.most_at_once}

    return app


@torch.inference_mode()
def generate(model: Any, config: Any, prompt: list[int], count: int, image: dict[str, Any] | None = None) -> list[int]:
    """Greedily, the whole sequence anew for each token; the image has ``pixel_values``, ``grid_thw`` and ``start``."""
    tokens: list[int] = []
    nothing = types.SimpleNamespace(quant_policy=None)
    text = config.get_text_config()
    for _ in range(count):
        ids = torch.tensor([prompt + tokens])
        context = types.SimpleNamespace(
            input_ids=ids,
            position_ids=torch.arange(ids.size(1)).unsqueeze(0),
            attn_metadata=nothing,
            input_multimodals=None,
            input_embeddings=None,
            input_embedding_indexing=None,
        )
        if image is not None:
            seen = picture(model, config, image)
            context.input_multimodals = [seen]
            context.mrope_position_ids = positions(ids.size(1), *seen.values())
        caches = [[None, None]] * text.num_hidden_layers
        if image is None:
            hidden = model(ids, context.position_ids, caches, nothing)
        else:
            hidden = model(**model.prepare_inputs_for_generation(caches, context=context))
        hidden = hidden["hidden_states"] if isinstance(hidden, dict) else hidden
        tokens.append(int(model.get_logits(hidden[:, -1:])[0, -1].argmax()))
    return tokens


def picture(model: Any, config: Any, image: dict[str, Any]) -> dict[str, list[Any]]:
    """LMDeploy's description of an image, in the form that its model wants."""
    grid = torch.tensor(image["grid_thw"])
    words = int(grid.prod()) // model.visual.spatial_merge_size**2
    told = {
        "pixel_values": torch.tensor(image["pixel_values"]),
        "image_grid_thw": grid,
        "image_token_id": config.image_token_id,
    }
    processor = model.get_input_processor()
    if hasattr(processor, "_make_image_mm_data"):
        return {"mm_data": [processor._make_image_mm_data(told | {"offset": (image["start"], image["start"] + words)})]}
    of_one = told | {
        "image_grid_thw": grid[None],
        "offset": image["start"],
        "image_tokens": words,
    }  # Qwen2-VL's and 2.5's
    return processor.preprocess_input([], [of_one]).input_multimodals


def positions(length: int, images: list[Any]) -> torch.Tensor:
    """Position of each token on three axes: text counts on from the largest position of the image."""
    [seen] = images
    of_image = torch.as_tensor(seen.mrope_pos_ids) + seen.start
    before = torch.arange(seen.start)[:, None].expand(-1, 3)
    after = (torch.arange(length - seen.end) + int(of_image.max()) + 1)[:, None].expand(-1, 3)
    return torch.cat([before, of_image, after]).t()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--executor", default="ray")
    parser.add_argument("--device-type", default="cpu")
    parser.add_argument("--key", action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    pretend_cuda()
    if args.device_type == "cuda":
        receive_on_host()
    # LMDeploy destroys groups by torch's global function, which wants a default group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, config = build_model(args.folder, torch.float32)
    app = build_app(model, config, executor=args.executor, device_type=args.device_type, keys=args.key)
    import uvicorn

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))

    def say() -> None:
        while not server.started:
            threading.Event().wait(0.01)
        print(f"ready {listener.getsockname()[1]}", flush=True)

    threading.Thread(target=say, daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
