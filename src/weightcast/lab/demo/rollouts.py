"""Samples completions from engines over the OpenAI completions endpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import TargetRejected
from weightcast.wire.codec import decode_info


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion.

    Attributes:
        text: Text without special tokens.
        token_ids: Token ids, including the end-of-text token if it was sampled.
        logprobs: Natural log-probability of each token under the engine's weights, at temperature 1.
        finished: True if the model ended it, False if it reached ``max_tokens``.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    version: int


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    text: str
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    weight_version: int | None = None


_reply_decoder = msgspec.json.Decoder(_Reply, strict=False)  # some servers write the version as text


class Engines:
    """Engines that serve the same model; prompts are assigned to them round robin."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        self._clients = [Client(Target(url), timeout_s=timeout_s) for url in urls]
        self._pool = ThreadPoolExecutor(max_workers=8 * len(urls), thread_name_prefix="rollout")

    def sample(
        self, prompts: Sequence[list[int]], *, group_size: int, max_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """Samples ``group_size`` completions at temperature 1 for each prompt, from all engines in parallel.

        Args:
            seed: Random seed of the first prompt; each following prompt takes the next number.

        Raises:
            TargetError, DeadlineExceeded, WireError: See ``Client.post_json``.
        """
        before = self._versions()
        waiting = [
            self._pool.submit(
                _complete,
                client,
                prompt,
                group_size=group_size,
                max_tokens=max_tokens,
                seed=seed + number,
                version=version,
            )
            for number, (prompt, client, version) in enumerate(
                zip(prompts, itertools.cycle(self._clients), itertools.cycle(before), strict=False)
            )
        ]
        found = [future.result() for future in waiting]
        if self._versions() != before:
            raise TargetRejected("an engine was updated while it sampled", url=self._clients[0].target.url)
        return found

    def _versions(self) -> list[int | None]:
        """Returns the weight version that each engine serves now."""
        return [decode_info(client.get_json("/weightcast/info")).version for client in self._clients]

    def close(self) -> None:
        """Closes every connection."""
        self._pool.shutdown(cancel_futures=True)
        for client in self._clients:
            client.close()


def completion_request(prompt: list[int], *, group_size: int, max_tokens: int, seed: int) -> bytes:
    """Encodes the body of ``POST /v1/completions``."""
    body = {
        "prompt": prompt,
        "n": group_size,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return msgspec.json.encode(body)


def parse_completions(reply: bytes, *, url: str, version: int | None = None) -> list[Completion]:
    """Parses an answer of ``POST /v1/completions``.

    Args:
        version: Weight version, for an engine such as vLLM that does not report it with each answer.

    Raises:
        TargetRejected: The answer lacks token ids, log-probabilities or the version.
    """
    try:
        decoded = _reply_decoder.decode(reply)
    except msgspec.MsgspecError as error:
        raise TargetRejected(f"{url}: POST /v1/completions: the answer is malformed: {error}", url=url) from error
    version = version if decoded.weight_version is None else decoded.weight_version
    if version is None:
        raise TargetRejected(f"{url}: POST /v1/completions: the answer has no weight version", url=url)
    completions = [
        Completion(
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs.token_logprobs,
            finished=choice.finish_reason == "stop",
            version=version,
        )
        for choice in decoded.choices
    ]
    for completion in completions:
        if len(completion.token_ids) != len(completion.logprobs) or not completion.token_ids:
            raise TargetRejected(
                f"{url}: {len(completion.token_ids)} token ids but {len(completion.logprobs)} log-probabilities",
                url=url,
            )
    return completions


def _complete(
    client: Client, prompt: list[int], *, group_size: int, max_tokens: int, seed: int, version: int | None
) -> list[Completion]:
    body = completion_request(prompt, group_size=group_size, max_tokens=max_tokens, seed=seed)
    return parse_completions(client.post_json("/v1/completions", body), url=client.target.url, version=version)
