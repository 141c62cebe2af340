"""The answer to one HTTP request: its head, its body or the first frame of its stream, as the bytes arrive."""

from __future__ import annotations

import asyncio
from typing import Any

_FRAME_BYTES = 4
_MAX_HEAD_BYTES = 100 << 10
_BAD_GATEWAY_OR_WORSE = 500


class NoAnswer(Exception):
    """The connection ended or broke, or what came is no HTTP."""


class Answer:
    """The answer to one request, for the thread of the event loop.

    ``done`` completes when it is whole; for a stream, when its first frame is.  The ``status`` is 0 before the head has
    come.  The connection is ``reusable`` if it may carry another request after a whole answer.
    """

    def __init__(self, *, stream: bool, max_bytes: int, max_frame_bytes: int) -> None:
        """Takes the limits; ``stream`` is True if a good answer is a stream of frames that stays open."""
        # Here, not at the top: engines import this module, and one without httptools can be updated all the same.
        from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.encoding = b"identity"
        self.location = b""
        self.reusable = self.too_large = False
        self._wants_stream = stream
        self._max_bytes, self._max_frame_bytes = max_bytes, max_frame_bytes
        self._errors = (HttpParserError, HttpParserUpgrade)
        self._parser: Any = HttpResponseParser(self)
        self._head_bytes = 0
        self._length: bytes | None = None
        self._chunked = False
        self._complete = False
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks)

    @property
    def frame(self) -> bytes | None:
        """The first frame of the stream, a 4-byte big-endian length and that many bytes; None before it has come."""
        end = self._frame_end()
        return self.body[_FRAME_BYTES:end] if end is not None and self._size >= end else None

    # -- the connection's listener

    def received(self, data: bytes) -> None:
        """Takes bytes of the connection."""
        if self.done.done():
            self.reusable = False  # nobody has asked for more
            return
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except self._errors as error:
            self._fail(NoAnswer(str(error) or "the engine switches to another protocol"))
            return
        if not self.status and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail(NoAnswer(f"the head of the answer is longer than {_MAX_HEAD_BYTES} bytes"))

    def ended(self, error: Exception | None) -> None:
        """The connection gives nothing more."""
        self.reusable = False
        if self.done.done():
            return
        if error is not None:
            failed = NoAnswer(str(error))
            failed.__cause__ = error
            self._fail(failed)
        elif not self.status:
            self._fail(NoAnswer("Server disconnected without sending a response."))
        elif self._length is not None:
            came = f"received {self._size} bytes, expected {self._length.decode(errors='replace')}"
            self._fail(NoAnswer(f"peer closed connection without sending complete message body ({came})"))
        elif self._chunked:
            what = "incomplete chunked read"
            self._fail(NoAnswer(f"peer closed connection without sending complete message body ({what})"))
        else:
            self._finish()  # a body without a length ends with the connection

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        """Another head follows an answer of the kind 1xx; after the answer itself nothing may follow."""
        if self._complete:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes the headers that matter."""
        if self._complete:
            return
        name = name.lower()
        if name == b"content-encoding":
            self.encoding = value
        elif name == b"location":
            self.location = value
        elif name == b"content-length":
            self._length = value
        elif name == b"transfer-encoding":
            self._chunked = True

    def on_headers_complete(self) -> None:
        """Notes the status, unless it only announces another one."""
        status = self._parser.get_status_code()
        if status < 200 or self._complete:
            return
        self.status = status
        # When a route raises, uvicorn answers and closes the connection a moment later without notice.  The next
        # request on that connection would be lost.
        self.reusable = status < _BAD_GATEWAY_OR_WORSE and self._parser.should_keep_alive()
        if self.encoding.lower() != b"identity":
            self.reusable = False
            self._finish()  # the body would be of no use

    def on_body(self, data: bytes) -> None:
        """Takes a part of the body."""
        if self._complete or self.done.done():
            return
        self._chunks.append(data)
        self._size += len(data)
        if self._wants_stream and self.status < 300:
            self._look_for_frame()
        elif self._size > self._max_bytes:
            self.too_large = True
            self._finish()
            self.reusable = False

    def on_message_complete(self) -> None:
        """Ends the answer, unless it only announced another one."""
        if not self.status or self._complete:
            return
        self._complete = True
        if self._wants_stream and self.status < 300 and not self.done.done():
            self._fail(NoAnswer("the answer ended early"))
        else:
            self._finish()

    def _look_for_frame(self) -> None:
        end = self._frame_end()
        if end is None:
            return
        if end > self._max_frame_bytes:
            self._fail(NoAnswer("the first frame is too large to be an answer"))
        elif self._size >= end:
            self._finish()

    def _frame_end(self) -> int | None:
        if self._size < _FRAME_BYTES:
            return None
        if len(self._chunks[0]) < _FRAME_BYTES:
            self._chunks = [self.body]
        return _FRAME_BYTES + int.from_bytes(self._chunks[0][:_FRAME_BYTES], "big")

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: NoAnswer) -> None:
        self.reusable = False
        if not self.done.done():
            self.done.set_exception(error)

    def release(self) -> None:
        """Drops the parser, which refers to this answer; nothing may be received afterwards."""
        self._parser = None
