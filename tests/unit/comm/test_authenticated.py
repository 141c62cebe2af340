"""Authenticated connections: two ends that know a secret, everybody else, and a network that cannot be trusted."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from tests.helpers.clock import PATIENCE_S, wait_until
from weightcast.comm import authenticated
from weightcast.comm.authenticated import (
    AuthenticatedConnection,
    BrokenConnection,
    Gate,
    NotAuthenticated,
    Secret,
    dial,
)
from weightcast.errors import ConfigError, DeadlineExceeded, WeightcastError

pytestmark = pytest.mark.timeout(300)

SECRET = Secret(b"0123456789abcdef", origin="the test")
OTHER = Secret(b"fedcba9876543210", origin="another test")
HELLO_BYTES = len(b"weightcast authenticated 1\n") + 32
HEAD_BYTES = 8 + 32


class Wire:
    """A network between two ends that records what passes and can change it.

    ``change`` gets everything that the dialer sends after the proofs, piece by piece, and returns what passes.
    """

    def __init__(self, port: int, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.change = change
        self.heard = {"dialer": b"", "listener": b""}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._there = port
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._there))
        self.ends = [near, far]
        threading.Thread(target=self._pump, args=(far, near, "listener"), daemon=True).start()
        self._pump(near, far, "dialer")

    def _pump(self, source: socket.socket, sink: socket.socket, who: str) -> None:
        proofs = HELLO_BYTES + 8 + 32
        with suppress(OSError):
            while data := source.recv(1 << 16):
                early = max(0, proofs - len(self.heard[who])) if who == "dialer" else len(data)
                self.heard[who] += data
                sink.sendall(data[:early] + self.change(data[early:]) if data[early:] else data[:early])
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (self._listener, *self.ends):
            end.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate("127.0.0.1", SECRET, context=b"this", timeout_s=PATIENCE_S) as made:
        yield made


def dialled(port: int, secret: Secret = SECRET, context: bytes = b"this") -> AuthenticatedConnection:
    return dial("127.0.0.1", port, secret, number=7, context=context, timeout_s=PATIENCE_S)


def admitted(gate: Gate) -> AuthenticatedConnection:
    connection = gate.admit(PATIENCE_S)
    assert connection is not None
    return connection


def raw(gate: Gate) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gate.port), timeout=PATIENCE_S)


def hung_up(end: socket.socket) -> bool:
    """Waits until the other end has closed the connection."""
    try:
        while end.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_messages_of_any_size_go_both_ways(gate):
    sizes = (0, 1, 1 << 20, (3 << 20) + 5)
    with dialled(gate.port) as near, admitted(gate) as far, ThreadPoolExecutor(1) as pool:
        assert far.number == near.number == 7
        for one, other in ((near, far), (far, near)):
            sending = pool.submit(lambda end=one: [end.send_bytes(bytes([size % 251]) * size) for size in sizes])
            assert [other.recv_bytes() for _ in sizes] == [bytes([size % 251]) * size for size in sizes]
            sending.result()
        near.close()
        with pytest.raises(EOFError):
            far.recv_bytes()


def test_what_several_threads_send_arrives_whole(gate):
    with dialled(gate.port) as near, admitted(gate) as far, ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(near.send_bytes, bytes([number]) * 5000) for number in range(40)]
        found = sorted(far.recv_bytes() for _ in sending)
        assert found == [bytes([number]) * 5000 for number in range(40)]


def test_another_secret_is_refused_at_both_ends(gate):
    with pytest.raises(NotAuthenticated, match=r"refused the secret of another test: .* different secrets"):
        dialled(gate.port, OTHER)
    wait_until(lambda: gate.dropped, "the gate to drop the peer")
    assert gate.dropped == ["127.0.0.1: it does not know the secret of the test"]
    assert gate.admit(0.0) is None
    with dialled(gate.port), admitted(gate):
        pass


def test_proof_for_another_context_is_refused(gate):
    with pytest.raises(NotAuthenticated, match="refused"):
        dialled(gate.port, context=b"that")


def test_listener_without_the_secret_is_refused():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(dialled, listener.getsockname()[1])
        end, _ = listener.accept()
        with end:
            hello = end.recv(HELLO_BYTES, socket.MSG_WAITALL)
            end.sendall(hello)  # the dialer's own nonce, back
            proof = end.recv(8 + 32, socket.MSG_WAITALL)
            end.sendall(b"+" + proof[8:])  # its own proof, back
            with pytest.raises(NotAuthenticated, match="does not know the secret of the test"):
                calling.result()


def test_proof_of_another_connection_is_refused(gate):
    with closing(Wire(gate.port)) as wire, dialled(wire.port), admitted(gate):
        recorded = wire.heard["dialer"]
    with raw(gate) as end:
        end.sendall(recorded[:HELLO_BYTES])
        end.recv(HELLO_BYTES, socket.MSG_WAITALL)
        end.sendall(recorded[HELLO_BYTES:])
        assert end.recv(1) == b"-"
        assert hung_up(end)
    assert gate.admit(0.0) is None


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 100, b"\0" * 200, b"\xff" * 100_000]
)
def test_garbage_is_dropped_unread(gate, garbage):
    with raw(gate) as end:
        with suppress(ConnectionError):
            end.sendall(garbage)
        assert hung_up(end)
    wait_until(lambda: gate.dropped, "the gate to drop the peer")
    assert "does not speak this protocol" in gate.dropped[0]


@pytest.mark.deadlines
def test_silent_and_trickling_peers_are_dropped_at_the_deadline_and_keep_nobody_out():
    with Gate("127.0.0.1", SECRET, context=b"this", timeout_s=1.5) as gate, raw(gate) as silent, raw(gate) as slow:
        over = threading.Event()

        def trickle() -> None:
            with suppress(OSError):
                for byte in b"weightcast authenticated 1\n" + bytes(32):
                    slow.sendall(bytes([byte]))
                    if over.wait(0.2):
                        return

        threading.Thread(target=trickle, daemon=True).start()
        begin = time.monotonic()
        with dialled(gate.port), admitted(gate):
            pass
        assert hung_up(silent)
        assert hung_up(slow)
        assert time.monotonic() - begin < 30  # the trickle alone would take 12 s, and more on a busy machine
        over.set()
        wait_until(lambda: gate.dropped, "the gate to name them")
        assert gate.dropped == ["127.0.0.1: it: waited 1.5 s for its proof that it knows the secret"]


def test_a_listener_that_says_nothing_is_given_up():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, pytest.raises(DeadlineExceeded, match="proof"):
        dial("127.0.0.1", listener.getsockname()[1], SECRET, number=0, context=b"", timeout_s=0.5)


def test_peers_beyond_the_limit_are_dropped_at_once(gate, monkeypatch):
    monkeypatch.setattr(authenticated, "_MOST_STRANGERS", 2)
    with raw(gate) as one, raw(gate) as two:
        one.sendall(b"w")
        two.sendall(b"w")
        with raw(gate) as three:
            assert hung_up(three)
        wait_until(lambda: gate.dropped, "the gate to drop the third")
        assert gate.dropped == ["127.0.0.1: more than 2 peers at once"]


def test_closing_the_gate_drops_those_who_wait(gate):
    with raw(gate) as stranger, dialled(gate.port) as early:
        gate.close()
        assert hung_up(stranger)
        with pytest.raises((EOFError, OSError)):
            early.recv_bytes()
    with pytest.raises(OSError, match="refused"):
        dialled(gate.port)


def message(wire: Wire, near: AuthenticatedConnection, data: bytes) -> bytes:
    """The bytes of one message on the wire; none of them passes."""
    wire.change = lambda piece: b""
    before = len(wire.heard["dialer"])
    near.send_bytes(data)
    wait_until(lambda: len(wire.heard["dialer"]) == before + HEAD_BYTES + len(data), "the message")
    return wire.heard["dialer"][before:]


def send_raw(wire: Wire, data: bytes) -> None:
    wire.ends[1].sendall(data)


def test_repeated_message_ends_the_connection(gate):
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate) as far:
        first = message(wire, near, b"commit")
        send_raw(wire, first)
        assert far.recv_bytes() == b"commit"
        send_raw(wire, first)
        with pytest.raises(BrokenConnection, match="wrong MAC"):
            far.recv_bytes()
        with pytest.raises((EOFError, OSError)):
            far.recv_bytes()


def test_messages_in_another_order_end_the_connection(gate):
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate) as far:
        first, second = message(wire, near, b"open"), message(wire, near, b"commit")
        send_raw(wire, second + first)
        with pytest.raises(BrokenConnection, match="wrong MAC"):
            far.recv_bytes()


@pytest.mark.parametrize("place", [7, 8, 39, HEAD_BYTES, HEAD_BYTES + 5])  # the length, the MAC, the bytes
def test_changed_message_ends_the_connection(gate, place):
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate) as far:
        changed = bytearray(message(wire, near, b"commit"))
        changed[place] ^= 1
        send_raw(wire, bytes(changed))
        wire.ends[1].shutdown(socket.SHUT_WR)
        with pytest.raises(BrokenConnection):
            far.recv_bytes()


def test_message_that_is_sent_back_to_its_author_ends_the_connection(gate):
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate):
        mine = message(wire, near, b"commit")
        wire.ends[0].sendall(mine)
        with pytest.raises(BrokenConnection, match="wrong MAC"):
            near.recv_bytes()


def test_message_of_another_connection_ends_this_one(gate):
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate):
        recorded = message(wire, near, b"commit")
    with closing(Wire(gate.port)) as wire, dialled(wire.port), admitted(gate) as far:
        send_raw(wire, recorded)
        with pytest.raises(BrokenConnection, match="wrong MAC"):
            far.recv_bytes()


@pytest.mark.parametrize("kept", [1, HEAD_BYTES, HEAD_BYTES + 3])
def test_message_that_is_cut_off_is_not_taken_for_the_end(gate, kept):
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate) as far:
        send_raw(wire, message(wire, near, b"commit")[:kept])
        wire.ends[1].shutdown(socket.SHUT_WR)
        with pytest.raises(BrokenConnection, match="ended inside of a message"):
            far.recv_bytes()


def test_message_that_never_ends_is_given_up(gate, monkeypatch):
    monkeypatch.setattr(authenticated, "_MESSAGE_S", 0.5)
    with closing(Wire(gate.port)) as wire, dialled(wire.port) as near, admitted(gate) as far:
        send_raw(wire, message(wire, near, b"commit")[:-1])
        with pytest.raises(BrokenConnection, match="did not end a message within"):
            far.recv_bytes()


def test_announced_size_is_refused_before_memory_is_taken(gate):
    with closing(Wire(gate.port)) as wire, dialled(wire.port), admitted(gate) as far:
        send_raw(wire, (authenticated.MOST_MESSAGE_BYTES + 1).to_bytes(8, "big") + bytes(32))
        with pytest.raises(BrokenConnection, match="announced a message of"):
            far.recv_bytes()


def test_larger_message_is_not_sent(gate, monkeypatch):
    monkeypatch.setattr(authenticated, "MOST_MESSAGE_BYTES", 10)
    with dialled(gate.port) as near, admitted(gate) as far:
        with pytest.raises(ValueError, match="11 bytes"):
            near.send_bytes(bytes(11))
        near.send_bytes(bytes(10))
        assert far.recv_bytes() == bytes(10)


def test_close_wakes_a_thread_that_waits_for_a_message(gate):
    with dialled(gate.port), admitted(gate) as far, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(far.recv_bytes)
        far.close()
        far.close()
        with pytest.raises((EOFError, OSError)):
            waiting.result(PATIENCE_S)


def test_secret_is_long_and_never_printed():
    with pytest.raises(ConfigError, match="the secret in HERE has 15 bytes") as caught:
        Secret(b"x" * 15, origin="HERE")
    assert "openssl" in str(caught.value.hint)
    assert "xxx" not in str(caught.value)
    assert "0123" not in repr(SECRET)


def test_address_of_another_host_is_no_place_for_a_gate():
    with pytest.raises(WeightcastError, match=r"cannot listen at 192\.0\.2\.1"):
        Gate("192.0.2.1", SECRET, context=b"", timeout_s=1.0)
