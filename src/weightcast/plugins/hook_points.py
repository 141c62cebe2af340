"""Places in vLLM, SGLang and LMDeploy that our hooks and our code need: one table, checked before anything is built.

A place is ``module:path(parameters)``, with the parameters that our calls and hooks rely on.  ``EngineNeeds.check``
looks for them.  All of the places are in all the versions that an engine's ``run_versions`` name.  Our code looks for
these where it uses them, since only some of the versions have them:

    vLLM from 0.26   vllm.plugins.load_endpoint_plugins; before, we wrap the API server's build_app and init_app_state
    vLLM, some       AsyncLLM.release_kv_cache_memory, get_weight_version, update_weight_version; Worker.reload_weights
    SGLang 0.5.23    ServerArgs.resolve_once, and arg_groups.overrides.resolving_view; before, ServerArgs has it all
    SGLang 0.5.23    Scheduler.record_weight_version_change
    SGLang 0.5.17    ModelRunner.ps.dp_rank; later, runtime_context.get_parallel().dp_rank
"""

from __future__ import annotations

from weightcast.plugins.engine_needs import EngineNeeds
from weightcast.wire.vllm_versions import INSTALL_NEWER, too_old

_CLIENT = "vllm.v1.engine.async_llm:AsyncLLM"
_CORES = "vllm.v1.engine.core_client:AsyncMPClient"
_BACKENDS = "vllm.distributed.weight_transfer."
# Methods of a worker's class, whichever it is.
_WORKER = ("determine_available_memory", "compile_or_warm_up_model", "sleep", "wake_up")
VLLM = EngineNeeds(
    name="vLLM",
    package="vllm",
    run_versions=("0.25.1 to 0.33.0",),
    install=INSTALL_NEWER,
    without="name another backend in --weight-transfer-config",
    refused=too_old,
    places={
        "server": (
            f"{_BACKENDS}factory:WeightTransferEngineFactory.create_engine(config, vllm_config)",
            "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
            f"{_CLIENT}.pause_generation(mode, clear_cache)",
            f"{_CLIENT}.resume_generation",
            f"{_CLIENT}.is_paused",
            f"{_CLIENT}.collective_rpc(method, timeout, kwargs)",
            f"{_CLIENT}.reset_encoder_cache",
            f"{_CLIENT}.sleep(level)",
            f"{_CLIENT}.wake_up(tags)",
            f"{_CLIENT}.generate(prompt, sampling_params, request_id, lora_request)",
            f"{_CORES}.call_utility_async(method)",
            f"{_CORES}.pause_scheduler_async(mode, clear_cache)",
        ),
        "ranks": (
            f"{_BACKENDS}base:WeightTransferEngine.__init__(config, vllm_config, device, model)",
            "vllm.model_executor.model_loader:get_model_loader(load_config)",
            "vllm.utils.import_utils:resolve_obj_by_qualname(qualname)",
        ),
    },
)


def check_worker(worker_class: type) -> None:
    """Looks for what our hooks in a vLLM worker of this class need; ``ConfigError`` without."""
    place = f"{worker_class.__module__}:{worker_class.__qualname__}."
    VLLM.check("ranks", also=[place + name for name in _WORKER])


SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
HTTP = "sglang.srt.entrypoints.http_server:"
ENGINE = "sglang.srt.entrypoints.engine:Engine"
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_MESSAGES = "sglang.srt.managers.io_struct:"
SGLANG = EngineNeeds(
    name="SGLang",
    package="sglang",
    run_versions=("0.5.17", "0.5.23"),
    without="leave weightcast out of SGLANG_PLUGINS",
    places={
        "ranks": (
            f"{RUNNER}.load_model",
            f"{SCHEDULER}.__init__",
            f"{SCHEDULER}.pause_generation(recv_req)",
            f"{SCHEDULER}.continue_generation(recv_req)",
            f"{SCHEDULER}.abort_request(recv_req)",
            f"{SCHEDULER}.flush_cache(empty_cache)",
            f"{SCHEDULER}._maybe_namespace_elastic_radix_cache(req)",
            f"{RECEIVER}._pull_raw_reqs",
            f"{UPDATER}.release_memory_occupation(recv_req)",
            f"{UPDATER}.resume_memory_occupation(recv_req)",
            "sglang.srt.model_loader.loader:DefaultModelLoader._get_all_weights(model_config, model)",
            "sglang.srt.runtime_context:get_parallel",
            "sglang.utils:TypeBasedDispatcher(mapping)",
            f"{_MESSAGES}PauseGenerationReqInput(mode)",
            f"{_MESSAGES}ContinueGenerationReqInput(torch_empty_cache)",
            f"{_MESSAGES}AbortReq(rid, abort_all)",
        ),
        "server": (
            f"{HTTP}_setup_and_run_http_server(server_args, tokenizer_manager)",
            f"{ENGINE}._launch_subprocesses(server_args)",
            f"{_MANAGER}._dispatch_to_scheduler(obj)",
            f"{_MANAGER}.release_memory_occupation(obj)",
            f"{_MANAGER}.resume_memory_occupation(obj)",
            f"{_MANAGER}._update_weight_version_if_provided(weight_version)",
            "sglang.srt.utils.auth:AuthLevel",
            "sglang.srt.utils.auth:_get_auth_level_from_app_and_scope(app, scope)",
        ),
    },
    attributes={
        "scheduler": "_engine_paused _request_dispatcher grammar_manager idle_sleeper is_fully_idle request_receiver "
        "running_batch tree_cache waiting_queue",
        "request receiver": "recv_from_rpc recv_from_tokenizer",
        "tokenizer manager": "check_weights is_pause is_pause_cond model_update_lock",
    },
)

_SERVER = "lmdeploy.serve.openai.api_server:"
_ASYNC = "lmdeploy.serve.core.async_engine:AsyncEngine"
_LOOP = "lmdeploy.pytorch.engine.engine_loop:EngineLoop"
_MAKER = "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync"
_PAGING = "lmdeploy.pytorch.paging.scheduler:Scheduler"
_AGENT = "lmdeploy.pytorch.engine.model_agent.agent:"
_REQUESTS = "lmdeploy.pytorch.engine.request:"
_WEIGHTS = "lmdeploy.pytorch.weight_loader.model_weight_loader:ModelWeightLoader"
_DRAFTS = "lmdeploy.pytorch.spec_decode."
_EXECUTOR = "lmdeploy.pytorch.engine.executor.base:ExecutorBase"
_MP = "lmdeploy.pytorch.engine.executor.mp_executor:"
_ZMQ = "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine"
# Methods of the agent that write weights for LMDeploy's own routes.
OWN_UPDATES = ("update_params", "update_weights_from_distributed", "update_weights_from_ipc")
LMDEPLOY = EngineNeeds(
    name="LMDeploy",
    package="lmdeploy",
    run_versions=("0.18.0",),
    install="install LMDeploy 0.18.0",
    without="start `lmdeploy` itself",
    refused=lambda found: (
        ""
        if found == "0.18.0"
        else f"this is LMDeploy {found or 'of an unknown version'}, where this plug-in was not run"
    ),
    places={
        "server": (
            "lmdeploy.cli.entrypoint:run",
            f"{_SERVER}serve(model_path, model_name, backend, backend_config, server_name, server_port, api_keys)",
            f"{_SERVER}serve(speculative_config)",
            f"{_SERVER}create_openai_router(server_context)",
            f"{_ASYNC}.sleep(level)",
            f"{_ASYNC}.wakeup(tags)",
            f"{_ZMQ}._mp_proc(shared_dict, condition, model_path, engine_config, log_level, speculative_config)",
            f"{_ZMQ}._collective_rpc_async(func)",
        ),
        "engine": (
            f"{_ZMQ}._mp_proc(shared_dict, condition, model_path)",
            "lmdeploy.pytorch.config:ModelConfig.from_pretrained(is_draft_model)",
            "lmdeploy.pytorch.engine.mp_engine.base_worker:EngineWorkerBase(engine)",
            f"{_LOOP}.__init__(req_manager, scheduler, executor, inputs_maker)",
            f"{_MAKER}.send_next_inputs",
            f"{_MAKER}.prefetch_next_inputs",
            f"{_MAKER}.has_pending_long_context_chunk",
            f"{_MAKER}.reset_runtime_state",
            "lmdeploy.pytorch.engine.engine:build_executor(model_path)",
            f"{_EXECUTOR}.forward_async(inputs)",
            f"{_EXECUTOR}.get_output_async",
            f"{_MP}Notifier.wait_async",
            f"{_MP}Notifier._update_event_id",
            f"{_MP}MPExecutor.collective_rpc(method, args, kwargs, receiver_mask, return_mask)",
            f"{_MP}MPExecutor.__init__(model_path)",
            f"{_MP}MPExecutor.release",
            f"{_MP}ExecutorProc.__init__(proc_id, mp_ctx)",
            f"{_PAGING}.preempt_seqs(seqs)",
            f"{_PAGING}.end_session(session_id)",
            f"{_PAGING}.has_unfinished",
            f"{_PAGING}.num_running",
            "lmdeploy.pytorch.paging.seq_states.states:StateBase.release_paging_resources",
            "lmdeploy.pytorch.paging.block_trie:BlockTrie.evict(max_num_blocks)",
            f"{_REQUESTS}RequestManager.reject_request(resp, reason)",
            f"{_REQUESTS}RequestManager.bind_func(req_type, callback)",
            f"{_REQUESTS}RequestType",
            "lmdeploy.pytorch.messages:MessageStatus",
        ),
        "ranks": (
            f"{_AGENT}load_model_weights(model, checkpoint_path, device)",
            f"{_DRAFTS}base:BaseSpecModelAgent.build_model(empty_init, target_model)",
            f"{_DRAFTS}base:BaseSpecModelAgent.is_enabled",
            f"{_DRAFTS}spec_agent:SpecModelAgent.build_model(empty_init, target_model)",
            f"{_DRAFTS}proposers.eagle3:Eagle3._init_bitmask_translate_constants",
            f"{_AGENT}BaseModelAgent._async_step(inputs)",
            f"{_AGENT}BaseModelAgent.reset_runtime_state",
            f"{_AGENT}BaseModelAgent.sleep(level)",
            f"{_AGENT}BaseModelAgent.wakeup(tags)",
            *(f"{_AGENT}BaseModelAgent.{name}(request)" for name in OWN_UPDATES),
            "lmdeploy.pytorch.nn.attention:Attention.forward(k_scales_zeros, v_scales_zeros)",
            f"{_WEIGHTS}(model_path)",
            f"{_WEIGHTS}._get_weights_iterator(path)",
            f"{_WEIGHTS}._rename_weights_iterator(iterator, model)",
            "lmdeploy.pytorch.distributed:get_dist_manager",
        ),
    },
    attributes={
        "loop": "req_manager scheduler executor inputs_maker has_runable_event reset_runtime_state",
        "scheduler": "sessions seq_manager block_trie",
    },
)
