"""Sends random requests to every route of ``weightcast serve``: ``python -m tests.fuzz.surface --count 200``.

Schemathesis makes requests out of our own OpenAPI document, valid ones and invalid ones.  For the update protocol the
document has no schemas, so these routes get the messages of ``inputs`` as well.  No answer may be a server error, every
status and content type has to be one that the document promises, and afterwards the engine keeps what it kept.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.inputs import make
from tests.helpers.engines import Engine
from tests.helpers.tiny import tiny_model, tiny_tokenizer

KEY = "sesame"
CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)
# What these do on purpose has to be undone before the next request, which would wait for it.
UNDO = {"/pause": "/continue", "/sleep": "/wake"}
ANSWER_S = 60.0


class Surface:
    """A running engine, its schema, and what it kept before."""

    def __init__(self, engine: Engine, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self.engine = engine
        engine.client.headers["authorization"] = f"Bearer {KEY}"
        self.before = self._state()
        self.failures: list[str] = []
        self.statuses: Counter[tuple[str, int]] = Counter()
        schema = schemathesis.openapi.from_url(f"{engine.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
        self.operations = [found.ok() for found in schema.get_all_operations()]

    def throw(self, operation: Any, count: int, seed: int) -> None:
        """Sends ``count`` requests to one route, half of them malformed on purpose."""
        label = f"{operation.method.upper()} {operation.path}"
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=max(1, count // 2),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def one(case: Any) -> None:
                self._ask(case, label)

            try:
                one()
            except hypothesis.errors.Unsatisfiable:
                continue  # a route without a body has no wrong one
            except FailureGroup as group:
                self.failures += [f"{label}: {failure}" for failure in group.exceptions]

    def throw_messages(self, operation: Any, count: int, seed: int) -> None:
        """Sends ``count`` messages to a route of the update protocol, most of them damaged."""
        label, random_ = f"{operation.method.upper()} {operation.path}", random.Random(seed)
        for _ in range(count):
            try:
                self._ask(operation.Case(body=make(random_), media_type="application/json"), label)
            except FailureGroup as group:
                self.failures += [f"{label}: {failure}" for failure in group.exceptions]

    def check(self) -> None:
        """Checks that nothing has changed."""
        assert self._state() == self.before
        assert self.engine.get("/health")["status"] == "ok"

    def _ask(self, case: Any, label: str) -> None:
        case.headers["Authorization"] = f"Bearer {KEY}"
        answer = case.call(timeout=ANSWER_S)
        self.statuses[label, answer.status_code] += 1
        checks = list(CHECKS)
        if answer.status_code != 504:  # a deadline of the request's own, which may be as short as it likes
            checks.append(not_a_server_error)
        elif case.operation.path not in UNDO:
            raise AssertionError(f"{label}: {answer.text}")
        if self._verbose and answer.status_code >= 400:
            print(label, answer.status_code, answer.text[:300], str(case.body)[:300])
        case.validate_response(answer, checks=checks)
        if case.operation.path in UNDO:
            self.engine.client.post(self.engine.url + UNDO[case.operation.path]).raise_for_status()

    def _state(self) -> Any:
        info = self.engine.info()
        return info, self.engine.digests()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200, help="requests to each route")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="routes with this in their path")
    parser.add_argument("--verbose", action="store_true", help="show every refusal")
    args = parser.parse_args()
    started = time.monotonic()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tiny_model(folder)
        tiny_tokenizer(folder)
        engine = Engine.start(folder, log=folder / "engine.log", api_key=KEY, max_len=64)
        try:
            engine.ready(folder / "engine.log")
            surface = Surface(engine, verbose=args.verbose)
            for operation in surface.operations:
                if args.only in operation.path:
                    surface.throw(operation, args.count, args.seed)
                    if operation.path.startswith("/weightcast/") and operation.method == "post":
                        surface.throw_messages(operation, args.count, args.seed)
            surface.check()
        finally:
            engine.stop()
    for (label, status), number in sorted(surface.statuses.items()):
        print(f"{label:32} {status} {number}")
    if surface.failures:
        print("\n\n".join(surface.failures))
        raise SystemExit(1)
    print(f"{surface.statuses.total()} requests, {time.monotonic() - started:.0f} s; nothing changed")


if __name__ == "__main__":
    main()
