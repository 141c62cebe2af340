"""Certificates: each mismatch has its message, and nothing is sent before both ends trust each other."""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.helpers.certificates import Authority
from tests.helpers.clock import PATIENCE_S
from weightcast.cli.options import targets
from weightcast.comm.http import Client
from weightcast.comm.tls import client_context, server_context
from weightcast.config import Target
from weightcast.errors import ConfigError, TargetLost, TargetUnreachable, WeightcastError
from weightcast.update import diagnose


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("papers")
    ours, other = Authority(folder, "ours"), Authority(folder, "other")

    class Papers:
        ca, stranger_ca = ours.pem, other.pem
        server, expired, elsewhere = (
            ours.issue("127.0.0.1").pem,
            ours.issue("127.0.0.1", expired=True).pem,
            ours.issue("engine.example").pem,
        )
        trainer, stranger, late = (
            ours.issue("trainer").pem,
            other.issue("trainer").pem,
            ours.issue("trainer", expired=True).pem,
        )

    return Papers


def test_broken_connection_is_not_reported_as_a_certificate_error(papers):
    # The server trusts this client and fails at its request.
    context = server_context(cert_file=papers.server, key_file=None, client_ca_file=papers.ca)
    with serving(context) as port, pytest.raises(TargetLost) as caught:
        ask(port, path="/broken", ca_file=papers.ca, cert_file=papers.trainer)
    assert caught.value.hint is None


@contextmanager
def serving(context: ssl.SSLContext | None) -> Iterator[int]:
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    @app.get("/port")
    async def port(request: Request) -> int:
        return request.client.port

    @app.get("/broken")
    async def broken() -> StreamingResponse:
        async def no_body() -> AsyncIterator[bytes]:
            raise ConnectionError
            yield b""

        return StreamingResponse(no_body(), headers={"content-length": "5"})

    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off")
    config.load()
    config.ssl = context
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, path: str = "/hello", **settings: Any) -> bytes:
    scheme = settings.pop("scheme", "https")
    client = Client(Target(f"{scheme}://127.0.0.1:{port}", **settings), timeout_s=10.0)
    try:
        return client.get_json(path)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("server", "client_ca", "settings", "words", "hint"),
    [
        ("server", False, {"ca_file": "ca"}, "", ""),
        ("server", True, {"ca_file": "ca", "cert_file": "trainer"}, "", ""),
        ("server", False, {"ca_file": "stranger_ca"}, "its certificate is not trusted here", "--ca-file"),
        ("server", False, {}, "its certificate is not trusted here", "--ca-file"),
        ("expired", False, {"ca_file": "ca"}, "its certificate has expired", "--tls-cert"),
        ("elsewhere", False, {"ca_file": "ca"}, "its certificate is for another host", "use a host name"),
        ("server", True, {"ca_file": "ca"}, "it asks for a client certificate", "--cert-file"),
        ("server", True, {"ca_file": "ca", "cert_file": "stranger"}, "does not accept the client", "--tls-client-ca"),
        ("server", True, {"ca_file": "ca", "cert_file": "late"}, "does not accept the client", "expired"),
        (None, False, {"ca_file": "ca"}, "does not answer in TLS", "http://"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_certificate_error_has_its_message_and_hint(papers, server, client_ca, settings, words, hint):
    context = None
    if server is not None:
        context = server_context(
            cert_file=getattr(papers, server), key_file=None, client_ca_file=papers.ca if client_ca else None
        )
    settings = {name: getattr(papers, value) for name, value in settings.items()}
    with serving(context) as port:
        if not words:
            assert ask(port, **settings) == b'"hello"'
            return
        with pytest.raises(TargetUnreachable) as caught:
            ask(port, **settings)
    assert f"https://127.0.0.1:{port}: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_plain_http_to_a_tls_server_is_reported(papers):
    context = server_context(cert_file=papers.server, key_file=None, client_ca_file=None)
    with serving(context) as port, pytest.raises(WeightcastError) as caught:
        ask(port, scheme="http")
    assert "https://" in (caught.value.hint or "")


def test_unusable_certificate_files_are_named_before_anything_is_sent(papers, tmp_path):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    for settings in (
        {"ca_file": str(nonsense)},
        {"ca_file": str(tmp_path / "none.pem")},
        {"ca_file": papers.ca, "cert_file": str(nonsense)},
        {"ca_file": papers.ca, "cert_file": papers.trainer, "key_file": papers.stranger},
    ):
        with pytest.raises(ConfigError) as caught:
            Client(Target("https://127.0.0.1:9", **settings), timeout_s=1.0)
        assert list(settings.values())[-1] in str(caught.value)
    for arguments in (
        {"cert_file": str(nonsense), "key_file": None, "client_ca_file": None},
        {"cert_file": papers.server, "key_file": papers.trainer, "client_ca_file": None},
        {"cert_file": papers.server, "key_file": None, "client_ca_file": str(nonsense)},
    ):
        with pytest.raises(ConfigError):
            server_context(**arguments)


def test_certificates_without_https_are_refused(papers):
    with pytest.raises(ConfigError, match="https"):
        Target("http://h:1", ca_file=papers.ca)
    with pytest.raises(ConfigError, match="certificate"):
        Target("https://h:1", key_file=papers.trainer)
    with pytest.raises(ConfigError, match="https"):
        targets(["http://h:1"], None, ca_file=papers.ca)
    found = targets(["http://h:1", "https://h:2"], ["key"], ca_file=papers.ca)
    assert [target.ca_file for target in found] == [None, papers.ca]


def test_certificates_and_host_names_are_always_checked(papers):
    context = client_context(ca_file=papers.ca, cert_file=None, key_file=None)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("client_ca", "level", "words"),
    [(True, "ok", "none needed beside the client certificate"), (False, "warn", "cannot be told: ")],
)
def test_doctor_says_whether_the_engine_asks_for_the_client_certificate(papers, client_ca, level, words):
    # Here the server is no engine, which says nothing about certificates.
    context = server_context(cert_file=papers.server, key_file=None, client_ca_file=papers.ca if client_ca else None)
    with serving(context) as port:
        target = Target(f"https://127.0.0.1:{port}", ca_file=papers.ca, cert_file=papers.trainer)
        check = diagnose._key(Client(target, timeout_s=10.0))
    assert (check.name, check.level) == ("key", level)
    assert check.text.startswith(words)


def test_connection_with_tls_is_used_again(papers):
    context = server_context(cert_file=papers.server, key_file=None, client_ca_file=papers.ca)
    with serving(context) as port:
        target = Target(f"https://127.0.0.1:{port}", ca_file=papers.ca, cert_file=papers.trainer)
        client = Client(target, timeout_s=PATIENCE_S)
        ports = {client.get_json("/port") for _ in range(3)}
        client.close()
    assert len(ports) == 1
