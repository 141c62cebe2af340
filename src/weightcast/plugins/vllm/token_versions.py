"""The version of the weights that computed each token of an answer, from vLLM's scheduler to its API server.

The scheduler notes with each batch which weights will compute it; the batch that is in flight at a switch has the old
ones.  The first output of a request carries its version to the API server, and so does the first one with another
version.  They travel in the output's headers for tracing, which all versions of vLLM have and nobody else reads.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

# Name of the method for ``call_utility_async``.
SAY_VERSION = "weightcast_say_version"

_HEADER = "weightcast-version"
_VERSION = "weightcast_version"  # of a scheduler, of a batch, and of a request as the API server was told
_STARTS = "weightcast_starts"  # of a request in the API server: versions, each with its first token's number
_WRAPPED = "_weightcast_versions"
_CLASSES = {
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.engine.output_processor": "OutputProcessor",
}


def install(core_class: Any) -> None:
    """Adds versions to the scheduler's and the API server's classes; does nothing if one is not as we know it.

    Safe to call twice.
    """
    setattr(core_class, SAY_VERSION, say_version)
    try:
        scheduler, processor = (getattr(importlib.import_module(name), _CLASSES[name]) for name in _CLASSES)
        request = importlib.import_module("vllm.v1.engine.output_processor").RequestState
        if not hasattr(scheduler, _WRAPPED):
            named = {
                (scheduler, "schedule"): _scheduling,
                (scheduler, "update_from_output"): _put_out,
                (processor, "process_outputs"): _processing,
                (request, "_new_completion_output"): _completing,
            }
            wrapped = {place: wrap(getattr(*place)) for place, wrap in named.items()}
            for (owner, name), method in wrapped.items():
                setattr(owner, name, method)
            setattr(scheduler, _WRAPPED, True)
    except (ImportError, AttributeError):
        return


def say_version(core: Any, stamp: str) -> bool:
    """Sets the version of the batches from now on.

    Args:
        stamp: The version; any other word, as vLLM's first one is, means the weights that vLLM was started with.

    Returns:
        False if this version of vLLM has another scheduler, which then says no versions.
    """
    setattr(core.scheduler, _VERSION, int(stamp) if stamp.isdecimal() else 0)
    return hasattr(type(core.scheduler), _WRAPPED)


def spans(completion: Any, tokens: int) -> list[tuple[int, int]]:
    """Returns versions, each with its number of tokens in a row, of the first ``tokens`` tokens of an answer."""
    starts: Iterable[tuple[int, int]] = getattr(completion, _STARTS, ())
    known = [(version, start) for version, start in starts if start < tokens]
    ends = pairwise([*(start for _, start in known), tokens])
    return [(version, end - start) for (version, _), (start, end) in zip(known, ends, strict=True)]


def _scheduling(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(scheduler: Any, *arguments: Any, **named: Any) -> Any:
        batch = schedule(scheduler, *arguments, **named)
        setattr(batch, _VERSION, getattr(scheduler, _VERSION, None))
        return batch

    return wrapped


def _put_out(update_from_output: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        version = getattr(batch, _VERSION, None)
        if version is None:
            return update_from_output(scheduler, batch, *arguments, **named)
        requests = {name: scheduler.requests.get(name) for name in batch.num_scheduled_tokens}
        outputs = update_from_output(scheduler, batch, *arguments, **named)
        for output in (output for those in outputs.values() for output in those.outputs):
            request = requests.get(output.request_id)
            if output.new_token_ids and request is not None and getattr(request, _VERSION, None) != version:
                output.trace_headers = {**(output.trace_headers or {}), _HEADER: str(version)}
                setattr(request, _VERSION, version)
        return outputs

    return wrapped


def _processing(process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(processor: Any, outputs: Any, *arguments: Any, **named: Any) -> Any:
        for output in outputs:
            if output.trace_headers and _HEADER in output.trace_headers:
                headers = dict(output.trace_headers)
                version, output.trace_headers = int(headers.pop(_HEADER)), headers or None
                request = processor.request_states.get(output.request_id)
                if request is not None and request.detokenizer is not None:
                    starts = vars(request).setdefault(_STARTS, [])
                    starts.append((version, request.detokenizer.num_output_tokens()))
        return process_outputs(processor, outputs, *arguments, **named)

    return wrapped


def _completing(new_completion_output: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(request: Any, *arguments: Any, **named: Any) -> Any:
        completion = new_completion_output(request, *arguments, **named)
        # The same list for all outputs of a request: vLLM may put several into one.
        setattr(completion, _STARTS, vars(request).setdefault(_STARTS, []))
        return completion

    return wrapped
