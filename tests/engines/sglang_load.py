"""Requests that keep an SGLang server busy while its weights change: some run, the others wait for their turn."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tests.helpers.clock import PATIENCE_S
from tests.helpers.server_events import lines_of

_LOADS = ("/v1/loads", "/get_load")


class Stream:
    """One streamed, greedy answer of a fixed length; it begins when this is made.

    Attributes:
        tokens: What has come so far.
        finish: Type of SGLang's finish reason (``length``, ``abort``); empty until the answer is over.
        failure: What broke the answer off; empty if nothing did.
        meta: What SGLang says of the answer so far.
    """

    def __init__(self, url: str, prompt: Sequence[int], count: int) -> None:
        self.prompt = list(prompt)
        self.count = count
        self.tokens: list[int] = []
        self.finish = ""
        self.failure = ""
        self.meta: dict[str, Any] = {}
        self._url = url
        self._news = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="sglang-stream", daemon=True)
        self._thread.start()

    def body(self) -> dict[str, Any]:
        """Returns the request."""
        sampling = {"temperature": 0, "max_new_tokens": self.count, "ignore_eos": True}
        return {"input_ids": self.prompt, "sampling_params": sampling, "stream": True}

    def wait_for(self, count: int) -> None:
        """Return when so many tokens have come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while len(self.tokens) < count and not self._over:
                assert self._news.wait(deadline - time.monotonic()), f"{len(self.tokens)} of {count} tokens came"
        assert len(self.tokens) >= count, f"ended after {len(self.tokens)} tokens: {self.finish} {self.failure}"

    def ended(self) -> Stream:
        """This stream, when its answer is over."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"no end of the answer; {len(self.tokens)} of {self.count} tokens came"
        return self

    def _run(self) -> None:
        try:
            with (
                httpx.Client(timeout=PATIENCE_S, trust_env=False) as client,
                client.stream("POST", f"{self._url}/generate", json=self.body()) as answer,
            ):
                for line in lines_of(answer):
                    if line.startswith("data: {"):
                        self._heard(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            with self._news:
                self._over = True
                self._news.notify_all()

    def _heard(self, said: dict[str, Any]) -> None:
        if "error" in said:
            self.failure = str(said["error"])
            return
        with self._news:
            came = list(said.get("output_ids") or ())
            total = int(said["meta_info"]["completion_tokens"])
            # By default every message has the whole answer so far; with a flag of SGLang's, what is new.
            self.tokens = came if len(came) == total else self.tokens + came
            self.meta = said["meta_info"]
            self.finish = str((self.meta.get("finish_reason") or {}).get("type") or "")
            self._news.notify_all()


def waiting(url: str) -> int:
    """Requests that SGLang's scheduler has queued and not begun, as it says itself."""
    for path in _LOADS:
        answer = httpx.get(url + path, timeout=300, trust_env=False)
        if answer.status_code == 200:
            said = answer.json()
            ranks = said.get("loads", []) if isinstance(said, dict) else said
            return sum(int(rank["num_waiting_reqs"]) for rank in ranks)
    raise AssertionError(f"{url} has none of {', '.join(_LOADS)}")


def wait_until_waiting(url: str, count: int, running: Stream | None = None) -> bool:
    """Return when so many requests wait; False if ``running`` has ended, so that they need not wait any more."""
    deadline = time.monotonic() + PATIENCE_S
    while (now := waiting(url)) < count:
        if running is not None and running.finish:
            return False
        assert time.monotonic() < deadline, f"{now} of {count} requests wait"
        time.sleep(0.05)
    return True
