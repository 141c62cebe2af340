"""A real engine that speaks TLS and wants a key and a certificate from everybody: who has them gets through, others
get one line that says what to do, and a trainer that dies is noticed through TLS too."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.certificates import Authority
from tests.helpers.clock import PATIENCE_S
from tests.helpers.commands import context
from tests.helpers.engines import Engine, weightcast
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import Target
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.connect import connect as connect_in_lab

KEY = "sesame"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """An engine behind mutual TLS and a key, and everything that its callers need."""

    engine: Engine
    first: Path
    second: Path
    ca: str
    trainer: str
    stranger_ca: str
    stranger: str

    @property
    def papers(self) -> list[str]:
        return ["--api-key", KEY, "--ca-file", self.ca, "--cert-file", self.trainer]

    @property
    def target(self) -> Target:
        return Target(self.engine.url, api_key=KEY, ca_file=self.ca, cert_file=self.trainer)

    def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.trainer)
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(verify=context, headers=headers, timeout=300, trust_env=False) as client:
            return client.request(method, self.engine.url + path, **body)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    ours, other = Authority(folder, "ours"), Authority(folder, "other")
    for number, name in enumerate(("first", "second")):
        tiny_model(folder / name, seed=number)
        tiny_tokenizer(folder / name)
    log = folder / "engine.log"
    engine = Engine.start(
        folder / "first",
        log=log,
        api_key=KEY,
        tls_cert=ours.issue("127.0.0.1").pem,
        tls_client_ca=ours.pem,
    )
    try:
        engine.ready(log)
        yield Guarded(
            engine=engine,
            first=folder / "first",
            second=folder / "second",
            ca=ours.pem,
            trainer=ours.issue("trainer").pem,
            stranger_ca=other.pem,
            stranger=other.issue("trainer").pem,
        )
    finally:
        engine.stop()


def test_who_has_key_and_certificate_gets_through(guarded):
    url = guarded.engine.url
    assert url.startswith("https://")
    before = guarded.ask("GET", "/weightcast/info").json()["version"]
    pushed = weightcast("push", guarded.second, "--to", url, "--version", before + 1, "--json", *guarded.papers)
    assert pushed.returncode == 0, pushed.stderr
    assert weightcast("verify", guarded.second, "--at", url, *guarded.papers).returncode == 0
    shown = weightcast("status", url, "--json", *guarded.papers)
    assert json.loads(shown.stdout)["engines"][0]["version"] == before + 1
    examined = weightcast("doctor", url, *guarded.papers)
    assert examined.returncode == 0, examined.stdout
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}
    answer = guarded.ask("POST", "/v1/completions", json=body).json()
    assert answer["choices"][0]["weight_version"] == before + 1


@pytest.mark.parametrize(
    ("change", "words", "hint"),
    [
        ({"--ca-file": "stranger_ca"}, "its certificate is not trusted here", "--ca-file"),
        ({"--cert-file": None}, "it asks for a client certificate", "--cert-file"),
        ({"--cert-file": "stranger"}, "it does not accept the client certificate", "--tls-client-ca"),
        ({"--api-key": None}, "status 401", "--api-key"),
    ],
    ids=["ca", "no certificate", "a stranger's certificate", "no key"],
)
def test_who_lacks_one_of_them_is_told_which(guarded, change, words, hint):
    given = dict(zip(guarded.papers[::2], guarded.papers[1::2], strict=True))
    for name, value in change.items():
        given.pop(name)
        if value is not None:
            given[name] = getattr(guarded, value)
    papers = [part for pair in given.items() for part in pair]
    before = guarded.ask("GET", "/weightcast/info").content
    done = weightcast("push", guarded.first, "--to", guarded.engine.url, "--version", 1000, *papers)
    assert done.returncode == 1
    error, *rest = [line for line in done.stderr.splitlines() if line]
    assert error.startswith("error: ")
    assert words in error
    assert hint in " ".join(rest)
    assert guarded.ask("GET", "/weightcast/info").content == before


def test_a_host_name_that_the_certificate_does_not_have_is_named(guarded):
    url = guarded.engine.url.replace("127.0.0.1", "localhost")
    done = weightcast("status", url, *guarded.papers)
    assert done.returncode == 1
    assert "its certificate is for another host" in done.stderr


def _update_and_stop(target: Target, checkpoint: Path, version: int, arrived: Any) -> None:
    def progress(sent: int, total: int) -> None:
        arrived.set()
        time.sleep(60)

    with CheckpointExporter(checkpoint) as exporter:
        options = {"bucket_bytes": 100_000, "timeout_s": 30.0, "progress": progress}
        connect_in_lab(exporter, [target], **options).update(version=version)


def test_a_trainer_that_is_killed_is_noticed_through_tls(guarded):
    version = guarded.ask("GET", "/weightcast/info").json()["version"]
    arrived = context.Event()
    trainer = context.Process(
        target=_update_and_stop, args=(guarded.target, guarded.first, version + 1, arrived), daemon=True
    )
    trainer.start()
    try:
        assert arrived.wait(PATIENCE_S)
        assert guarded.ask("GET", "/weightcast/info").json()["state"] == "updating"
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while (info := guarded.ask("GET", "/weightcast/info").json())["state"] == "updating":
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        trainer.kill()
        trainer.join()
    assert (info["state"], info["version"]) == ("serving", version)


@pytest.mark.parametrize("options", [["--tls-key", "x"], ["--tls-cert", "nowhere.pem"], ["--tls-client-ca", "x"]])
def test_certificates_that_cannot_be_used_stop_the_engine_before_it_loads(guarded, options):
    done = weightcast("serve", guarded.first, "--port", 0, *options)
    assert done.returncode == 2
    assert "certificate" in done.stderr
