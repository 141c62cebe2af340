"""A TCP connection whose two ends have proven to each other that they know one secret.

One end dials, the other listens.  Both send a fresh nonce, then the dialer proves itself, then the listener.  A proof
is an HMAC-SHA256 of the secret over the role, both nonces and a context that both ends know.  So no proof fits another
connection, and a proof that is sent back to its author has the wrong role.

From then on each message has a MAC, with a key for this connection and this direction, over its number and its bytes.
A message that was changed, repeated, left out, moved or sent back ends the connection.  Nothing is encrypted.

CURVE of ZeroMQ would encrypt, and is no less code: libzmq ends the connections of a port with the port, so it would
have to stay open as long as the engine runs, to any number of strangers at once.

Before the proof an end reads a fixed number of bytes, under one deadline.  The secret never crosses the network.  A
listener that is not genuine gets one proof, against which it can try secrets: use long random ones.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

from weightcast.errors import ConfigError, DeadlineExceeded, WeightcastError
from weightcast.runtime.deadline import Deadline

LEAST_SECRET_BYTES = 16
MOST_MESSAGE_BYTES = 1 << 30
_MAGIC = b"weightcast authenticated 1\n"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_YES, _NO = b"+", b"-"
_LENGTH = struct.Struct(">Q")
_CHUNK_BYTES = 1 << 20  # memory grows with what has come, not with what a header announces
_LOOK_S = 1  # whole seconds between two looks at the deadline of a message that has begun
_MESSAGE_S = 60.0
_SEND_S = 15  # whole seconds without any progress
# A host that lost its power or its network says nothing: it is asked after so many whole seconds, and so many times.
_ASK_S = 5
_ASKS = 3
_MOST_STRANGERS = 64
_MOST_NAMED = 8
_LISTENER, _DIALER = b"listener", b"dialer"


class NotAuthenticated(WeightcastError):
    """The other end did not prove that it knows the secret, or this end's proof was refused."""


class BrokenConnection(OSError):
    """The connection carried something that the other end did not send so, or ended inside of a message."""


class Secret:
    """A secret that several processes share.  It is never printed."""

    def __init__(self, value: bytes, *, origin: str) -> None:
        """Raises ConfigError if it is too short; ``origin`` names the variable or file that it comes from."""
        if len(value) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"the secret in {origin} has {len(value)} bytes, and at least {LEAST_SECRET_BYTES} are needed",
                hint="make one with: openssl rand -hex 32",
            )
        self._value = value
        self.origin = origin

    def mac(self, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the parts and their lengths."""
        return _mac(self._value, *parts)


class AuthenticatedConnection:
    """One end, with the methods of ``multiprocessing.connection.Connection`` that executors use.

    One thread at a time may receive; any threads may send.  ``number`` is the dialer's, at both ends.
    """

    def __init__(self, end: socket.socket, peer: str, number: int, *, send_key: bytes, receive_key: bytes) -> None:
        self.peer = peer
        self.number = number
        self._socket = end
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._send_lock = threading.Lock()
        end.settimeout(None)  # a socket has one timeout for both directions, so the kernel's are used
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _LOOK_S, 0))
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKS),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (1 + _ASKS) * _ASK_S * 1000),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            end.setsockopt(level, name, value)

    def fileno(self) -> int:
        """Descriptor to wait for; nothing that has arrived is held back elsewhere."""
        return self._socket.fileno()

    def send_bytes(self, data: bytes) -> None:
        """Sends one message of at most ``MOST_MESSAGE_BYTES``; after an OSError the connection has ended."""
        if len(data) > MOST_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is larger than {MOST_MESSAGE_BYTES}")
        with self._send_lock:
            length = _LENGTH.pack(len(data))
            head = length + _message_mac(self._send_key, self._sent, length, data)
            self._sent += 1
            try:
                self._socket.sendall(head + data if len(data) < _CHUNK_BYTES else head)
                if len(data) >= _CHUNK_BYTES:
                    self._socket.sendall(data)
            except OSError:
                self._hang_up()  # a part of it may have gone, so the other end cannot find the next message
                raise

    def recv_bytes(self) -> bytes:
        """Waits for one message, without a deadline until its first byte.

        It raises EOFError if the other end has closed the connection between two messages, and BrokenConnection, a kind
        of OSError, if one was changed, repeated, left out or cut off; the connection has ended then.
        """
        try:
            return self._receive()
        except OSError:
            self._hang_up()
            raise

    def close(self) -> None:
        """Ends the connection, also for a thread that waits for a message; safe to call twice."""
        self._hang_up()
        self._socket.close()

    def __enter__(self) -> AuthenticatedConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> bytes:
        head = self._read(_LENGTH.size + _MAC_BYTES, begun=None)
        begun = time.monotonic()
        length, mac = head[: _LENGTH.size], head[_LENGTH.size :]
        (size,) = _LENGTH.unpack(length)
        if size > MOST_MESSAGE_BYTES:
            raise BrokenConnection(f"{self.peer} announced a message of {size} bytes")
        data = self._read(size, begun=begun)
        if not hmac.compare_digest(mac, _message_mac(self._receive_key, self._received, length, data)):
            raise BrokenConnection(f"a message from {self.peer} has a wrong MAC: it was changed on the way or repeated")
        self._received += 1
        return data

    def _read(self, size_bytes: int, *, begun: float | None) -> bytes:
        found = bytearray()
        while len(found) < size_bytes:
            try:
                part = self._socket.recv(min(size_bytes - len(found), _CHUNK_BYTES))
            except BlockingIOError:
                part = None
            if part == b"":
                if begun is None and not found:
                    raise EOFError
                raise BrokenConnection(f"the connection to {self.peer} ended inside of a message")
            found += part or b""
            if found and begun is None:
                begun = time.monotonic()
            if begun is not None and time.monotonic() - begun > _MESSAGE_S and len(found) < size_bytes:
                raise BrokenConnection(f"{self.peer} did not end a message within {_MESSAGE_S:g} s")
        return bytes(found)

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Gate:
    """Listens at one address, and lets in the peers that prove themselves; drops the others."""

    def __init__(self, host: str, secret: Secret, *, context: bytes, timeout_s: float) -> None:
        """Listens on a free port; ConfigError if the address does not belong to this host.

        Both ends know ``context``, so that a proof counts for nothing else; ``timeout_s`` limits one peer's proof.
        """
        self.host = host
        self._secret, self._context, self._timeout_s = secret, context, timeout_s
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host}: {error}", hint="name an address of this host that the others can reach"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._let_in: queue.SimpleQueue[AuthenticatedConnection] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._dropped: dict[str, None] = {}
        self._closed = False
        threading.Thread(target=self._accept, name="weightcast-gate", daemon=True).start()

    @property
    def dropped(self) -> list[str]:
        """Each kind of peer that was not let in, in words."""
        with self._lock:
            return list(self._dropped)

    def admit(self, timeout_s: float) -> AuthenticatedConnection | None:
        """Returns the next peer that has proven itself, or None if none does so in time."""
        try:
            return self._let_in.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops listening, and drops peers that nobody has admitted; safe to call twice."""
        with self._lock:
            self._closed = True
            strangers = list(self._strangers)
        for end in (self._listener, *strangers):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while (connection := self.admit(0.0)) is not None:
            connection.close()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:
                return  # closed
            peer = f"{address[0]}:{address[1]}"
            with self._lock:
                welcome = not self._closed and len(self._strangers) < _MOST_STRANGERS
                if welcome:
                    self._strangers.add(end)
                elif not self._closed:
                    self._drop(peer, f"more than {_MOST_STRANGERS} peers at once")
            if not welcome:
                end.close()
                continue
            threading.Thread(target=self._meet, args=(end, peer), name="weightcast-gate-peer", daemon=True).start()

    def _drop(self, peer: str, why: str) -> None:
        if len(self._dropped) < _MOST_NAMED:
            self._dropped[f"{peer.rpartition(':')[0]}: {why}"] = None

    def _meet(self, end: socket.socket, peer: str) -> None:
        try:
            connection = _listen(end, peer, self._secret, self._context, Deadline(self._timeout_s))
        except (OSError, WeightcastError) as error:
            with self._lock:
                self._strangers.discard(end)
                self._drop(peer, str(error))
            with suppress(OSError):
                end.sendall(_NO + bytes(_MAC_BYTES))
            end.close()
            return
        with self._lock:
            self._strangers.discard(end)
            if not self._closed:
                self._let_in.put(connection)
                return
        connection.close()


def dial(
    host: str, port: int, secret: Secret, *, number: int, context: bytes, timeout_s: float
) -> AuthenticatedConnection:
    """Connects to a ``Gate`` and proves itself; ``timeout_s`` limits connection and proofs together.

    The listener knows this end by ``number``, such as a rank; ``context`` is as for ``Gate``.  It raises
    NotAuthenticated if the ends have different secrets or the other is no gate, DeadlineExceeded if that is silent, and
    OSError if nothing listens there.
    """
    deadline = Deadline(timeout_s)
    peer = f"{host}:{port}"
    end = socket.create_connection((host, port), timeout=timeout_s)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        _write(end, _MAGIC + nonce, peer, deadline)
        theirs = _nonce_in(_read(end, len(_MAGIC) + _NONCE_BYTES, peer, deadline), peer)
        name = _LENGTH.pack(number)
        about = nonce, theirs, name, context
        _write(end, name + secret.mac(_DIALER, *about), peer, deadline)
        answer = _read(end, len(_YES) + _MAC_BYTES, peer, deadline)
        if answer[:1] != _YES:
            raise NotAuthenticated(f"{peer} refused the secret of {secret.origin}: the two ends have different secrets")
        if not hmac.compare_digest(answer[1:], secret.mac(_LISTENER, *about)):
            raise NotAuthenticated(f"{peer} does not know the secret of {secret.origin}")
        return AuthenticatedConnection(
            end,
            peer,
            number,
            send_key=secret.mac(b"from dialer", *about),
            receive_key=secret.mac(b"from listener", *about),
        )
    except BaseException:
        end.close()
        raise


def _listen(
    end: socket.socket, peer: str, secret: Secret, context: bytes, deadline: Deadline
) -> AuthenticatedConnection:
    it = "it"  # the port of a stranger, which is another each time, says nothing
    theirs = _nonce_in(_read(end, len(_MAGIC) + _NONCE_BYTES, it, deadline), it)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _write(end, _MAGIC + nonce, it, deadline)
    proof = _read(end, _LENGTH.size + _MAC_BYTES, it, deadline)
    name = proof[: _LENGTH.size]
    about = theirs, nonce, name, context
    if not hmac.compare_digest(proof[_LENGTH.size :], secret.mac(_DIALER, *about)):
        raise NotAuthenticated(f"it does not know the secret of {secret.origin}")
    _write(end, _YES + secret.mac(_LISTENER, *about), it, deadline)
    return AuthenticatedConnection(
        end,
        peer,
        _LENGTH.unpack(name)[0],
        send_key=secret.mac(b"from listener", *about),
        receive_key=secret.mac(b"from dialer", *about),
    )


def _nonce_in(hello: bytes, peer: str) -> bytes:
    if hello[: len(_MAGIC)] != _MAGIC:
        raise NotAuthenticated(f"{peer} does not speak this protocol")
    return hello[len(_MAGIC) :]


def _read(end: socket.socket, size_bytes: int, peer: str, deadline: Deadline) -> bytes:
    """Reads so many bytes under a deadline that a peer cannot move by sending them one by one."""
    found = b""
    while len(found) < size_bytes:
        _arm(end, peer, deadline)
        try:
            part = end.recv(size_bytes - len(found))
        except TimeoutError:
            continue
        if not part:
            raise NotAuthenticated(f"{peer} hung up before it had proven itself")
        found += part
    return found


def _write(end: socket.socket, data: bytes, peer: str, deadline: Deadline) -> None:
    _arm(end, peer, deadline)
    end.sendall(data)


def _arm(end: socket.socket, peer: str, deadline: Deadline) -> None:
    left_s = deadline.left_s()
    if left_s <= 0:
        raise DeadlineExceeded(who=peer, waiting_for="its proof that it knows the secret", timeout_s=deadline.limit_s)
    end.settimeout(left_s)


def _message_mac(key: bytes, number: int, length: bytes, data: bytes) -> bytes:
    mac = hmac.new(key, _LENGTH.pack(number) + length, hashlib.sha256)
    mac.update(data)
    return mac.digest()


def _mac(key: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, _MAGIC, hashlib.sha256)
    for part in parts:
        mac.update(_LENGTH.pack(len(part)))
        mac.update(part)
    return mac.digest()
