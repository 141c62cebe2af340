"""Runs under a Python that has vLLM: its real scheduler, requests and prefix cache, with our generations in them.

No model runs: a step's tokens are numbers of a counter.  Prints one JSON object: how many tokens of a prompt were found
in the cache, or the error, for each case; ``test_vllm_prefixes.py`` says what they have to be.
"""
# ruff: noqa: E402

from __future__ import annotations

import inspect
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # older versions look for it in the wheel's own name

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from weightcast.plugins.vllm.cached_prefixes import NEXT_GENERATION
from weightcast.plugins.vllm.core_switch import install
from weightcast.plugins.vllm.token_versions import SAY_VERSION, spans

BLOCK = 16
PROMPT = list(range(100, 165))  # four whole blocks, and one token that is always computed
OTHER = list(range(300, 365))
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def with_known(make: Callable[..., Any], **named: Any) -> Any:
    """Calls with those arguments that this version knows."""
    return make(**{name: value for name, value in named.items() if name in inspect.signature(make).parameters})


class Engine:
    """vLLM's engine core without processes and model."""

    def __init__(self, config: Any) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        config.cache_config.num_gpu_blocks = 200
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.core = core = EngineCore.__new__(EngineCore)
        core.structured_output_manager = StructuredOutputManager(config)
        core.mm_receiver_cache = None
        core.request_block_hasher = get_request_block_hasher(BLOCK, hashing)
        core.scheduler = with_known(
            Scheduler,
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=core.structured_output_manager,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        core.scheduler.log_stats = True
        self.count = 0
        self.asked: Any = None
        self.put_out: dict[int, Any] = {}

    def switch(self) -> None:
        assert getattr(self.core, NEXT_GENERATION)() is True

    def add(self, tokens: list[int], salt: str | None = None, length: int = 1) -> Any:
        """Adds a request as the core's threads do, without a step."""
        self.count += 1
        parameters = SamplingParams(max_tokens=length, ignore_eos=True)
        known = {field: None for field in EngineCoreRequest.__struct_fields__}
        known |= {
            field: default
            for field, default in zip(
                EngineCoreRequest.__struct_fields__[-len(EngineCoreRequest.__struct_defaults__) :],
                EngineCoreRequest.__struct_defaults__,
                strict=True,
            )
            if isinstance(default, (int, float, str, bool, type(None)))
        }
        known |= {
            "request_id": f"request-{self.count}",
            "external_req_id": f"request-{self.count}",
            "prompt_token_ids": list(tokens),
            "sampling_params": parameters,
            "arrival_time": time.time(),
            "cache_salt": salt,
        }
        self.asked = EngineCoreRequest(**known)
        request, _ = self.core.preprocess_add_request(self.asked)
        self.core.scheduler.add_request(request)
        return request

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> dict[str, int]:
        """Runs one step; returns the tokens that requests which begin, or begin again, found in the cache.

        ``meanwhile`` is called while the batch is in flight.  What goes to the API server is in ``put_out``.
        """
        scheduler = self.core.scheduler
        output = scheduler.schedule()
        meanwhile()
        found = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", set())
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in resumed:
                found[req_id] = computed
        ids = list(output.num_scheduled_tokens)
        self.count += 1
        sampled = [[self.count % 500] for _ in ids]
        self.put_out = scheduler.update_from_output(
            output,
            with_known(
                ModelRunnerOutput,
                req_ids=ids,
                req_id_to_index={req_id: number for number, req_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        return found

    def ask(self, tokens: list[int], salt: str | None = None) -> int:
        """Answers a request of one token; returns how much of its prompt was in the cache."""
        request = self.add(tokens, salt)
        return self.step()[request.request_id]

    def preempt(self, request: Any) -> None:
        scheduler = self.core.scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        # Until here its blocks were its own, and now anybody finds them who knows their names.


def within_and_across(engine: Engine) -> list[int]:
    found = [engine.ask(PROMPT), engine.ask(PROMPT)]
    for _ in range(2):
        engine.switch()
        found += [engine.ask(PROMPT), engine.ask(PROMPT)]
    return found


def a_request_that_waits(engine: Engine) -> list[int]:
    engine.ask(PROMPT)
    waiting = engine.add(PROMPT)
    engine.switch()
    return [engine.step()[waiting.request_id], engine.ask(PROMPT)]


def a_request_that_is_made_during_the_switch(engine: Engine) -> list[int]:
    engine.ask(PROMPT)
    scheduler, add = engine.core.scheduler, engine.core.scheduler.add_request
    scheduler.add_request = lambda request: (engine.switch(), add(request))
    late = engine.add(PROMPT)
    del scheduler.add_request
    return [engine.step()[late.request_id], engine.ask(PROMPT)]


def a_request_that_runs(engine: Engine) -> list[int]:
    """A running request goes on from what the old weights computed."""
    running = engine.add(PROMPT, length=60)
    found = [engine.step()[running.request_id]]
    engine.switch()
    for _ in range(40):
        engine.step()
    text = list(running.all_token_ids)
    return [*found, len(text) - len(PROMPT), engine.ask(text), engine.ask(PROMPT), engine.ask(text)]


def a_request_that_is_preempted(engine: Engine) -> list[int]:
    running = engine.add(PROMPT, length=60)
    engine.step()
    engine.switch()
    for _ in range(20):
        engine.step()
    engine.preempt(running)
    again = engine.step()[running.request_id]  # computes all of it with the new weights
    return [again, engine.ask(PROMPT), engine.ask(OTHER)]


def preempted_without_a_switch(engine: Engine) -> list[int]:
    running = engine.add(PROMPT, length=60)
    engine.step()
    engine.preempt(running)
    return [engine.step()[running.request_id]]


def salts(engine: Engine) -> list[int]:
    found = [engine.ask(PROMPT, "a"), engine.ask(PROMPT, "a"), engine.ask(PROMPT, "b"), engine.ask(PROMPT)]
    engine.switch()
    found += [engine.ask(PROMPT, "a"), engine.ask(PROMPT, "a"), engine.ask(PROMPT, "b"), engine.ask(PROMPT)]
    return found


def forged(engine: Engine) -> list[int]:
    """Blocks of old weights under a name that somebody else will ask for later."""
    for salt in ("1|", "1|a", "0|", "|", "2|", "2|a", "0|2|"):
        engine.ask(PROMPT, salt)
    found = []
    for _ in range(2):
        engine.switch()
        engine.ask(OTHER, "2|")
        engine.ask(OTHER, "2|a")
        found += [engine.ask(PROMPT), engine.ask(PROMPT, "a")]
    return [*found, engine.ask(OTHER), engine.ask(OTHER, "a")]


def names_before_the_first_switch(engine: Engine) -> list[bool]:
    """They are vLLM's own, so whoever computes them from outside still can."""
    plain = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    stranger = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(PROMPT),
        all_token_ids=PROMPT,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )
    return [plain(stranger) == list(engine.add(PROMPT).block_hashes)]


def versions_of_tokens(engine: Engine) -> list[Any]:
    """From the scheduler to the API server, with a switch while the third batch is in flight."""
    say = getattr(engine.core, SAY_VERSION)
    say("default")
    engine.ask(PROMPT)
    (those,) = engine.put_out.values()
    first = those.outputs[0].trace_headers
    say("7")
    processor = with_known(OutputProcessor, tokenizer=None, log_stats=False, stream_interval=1)
    engine.add(PROMPT, length=6)
    processor.add_request(engine.asked, None)
    told = []
    for number in range(6):
        engine.step((lambda: say("8")) if number == 2 else lambda: None)
        (those,) = engine.put_out.values()
        told.append(those.outputs[0].trace_headers)
        (output,) = processor.process_outputs(those.outputs).request_outputs
    (completion,) = output.outputs
    return [first, told, spans(completion, len(completion.token_ids)), spans(completion, 4), spans(completion, 2)]


CASES = (
    within_and_across,
    a_request_that_waits,
    a_request_that_is_made_during_the_switch,
    a_request_that_runs,
    a_request_that_is_preempted,
    preempted_without_a_switch,
    salts,
    forged,
    names_before_the_first_switch,
    versions_of_tokens,
)


def main() -> None:
    install()
    install()  # safe to call twice
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK,
            enable_prefix_caching=True,
            async_scheduling=False,
        )
        config = arguments.create_engine_config()
        said: dict[str, Any] = {}
        for case in CASES:
            try:
                said[case.__name__] = case(Engine(config))
            except Exception:  # noqa: BLE001  each case says its own
                said[case.__name__] = traceback.format_exc()
    print("RIG " + json.dumps(said))


if __name__ == "__main__":
    main()
