"""The event loop of requests: forks and the end of the interpreter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.unit.comm import test_event_loop
from tests.unit.comm.test_event_loop import client_of
from weightcast.comm import event_loop

silent = test_event_loop.silent  # a fixture


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 warns of every fork with threads
def test_forked_process_has_a_loop_of_its_own_and_keeps_no_lease_open(silent: socket.socket) -> None:
    client = client_of(silent)
    (asked,) = event_loop.submit([client.lease("/open", b"{}")])
    end, _ = silent.accept()
    assert end.recv(65536).startswith(b"POST /open")
    end.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n\0\0\0\2ok\r\n")
    frame, lease = asked.result(PATIENCE_S)
    assert frame == b"ok"
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if client.get_json("/from-the-child", timeout_s=PATIENCE_S) == b"hello" else 1)
        finally:
            os._exit(2)
    theirs, _ = silent.accept()
    assert theirs.recv(65536).startswith(b"GET /from-the-child")
    lease.close()  # while the child lives
    end.settimeout(PATIENCE_S)
    assert end.recv(65536) == b""
    theirs.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (again,) = event_loop.submit([client.get("/from-the-parent")])  # whose selector the child has left alone
    with silent.accept()[0] as ours:
        assert ours.recv(65536).startswith(b"GET /from-the-parent")
        ours.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        assert again.result(PATIENCE_S) == b""
    theirs.close()
    end.close()
    client.close()


_LEAVES = """
import atexit, sys
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.config import Target
client = Client(Target(sys.argv[1]), timeout_s=60.0)
atexit.register(lambda: print(client.get_json("/last").decode(), flush=True))
print(client.get_json("/first").decode(), flush=True)
event_loop.submit([client.get("/never")])
client.get_json("/second")
"""


def test_interpreter_ends_with_a_request_under_way_and_serves_exit_handlers(silent: socket.socket) -> None:
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"

    def answer(end: socket.socket) -> None:
        with end:
            while asked := end.recv(65536):
                path = asked.split(b" ")[1]
                if path != b"/never":
                    end.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(path), path))

    def serve() -> None:
        while True:
            try:
                end, _ = silent.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(end,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    ended = subprocess.run([sys.executable, "-c", _LEAVES, url], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["/first", "/last"]
    silent.shutdown(socket.SHUT_RDWR)
