"""Parameters of requests that the engine does not have.

A value that asks for nothing is accepted, because clients and frameworks send defaults.  Any other value is refused:
an engine that ignores a parameter samples from another distribution than its caller believes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Values that change no answer here, besides null.  They are OpenAI's, vLLM's and SGLang's names.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),  # without tools there are no calls
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # about a join of texts that fast tokenizers never make
    "stop_regex": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Notes for the operator, which no engine answers differently for.
_NOTES = frozenset({"metadata", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "store", "user"})


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields, without those of this engine's missing parameters that ask for nothing."""
    return {name: value for name, value in body.items() if name not in _NOTES and not _asks_nothing(name, value)}


def refusal(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Says which parameters are refused, and why."""
    missing = [name for name in unknown if name in _NEUTRAL]
    words = [f"this engine does not support {', '.join(missing)}"] if missing else []
    names = list(known)
    for name in unknown:
        if name not in _NEUTRAL:
            near = difflib.get_close_matches(name, names, n=1)
            words.append(f"there is no parameter {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return "; ".join(words)


def _asks_nothing(name: str, value: object) -> bool:
    if name not in _NEUTRAL:
        return False
    # True equals 1 in Python, and is another value in JSON.
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
    )
