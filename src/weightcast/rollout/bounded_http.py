"""HTTP as uvicorn reads it, with a limit on what is kept of a request before anybody can refuse it."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # as uvicorn's other parser, h11, has it


class BoundedHttp(HttpToolsProtocol):
    """Refuses a head, or what follows a body, that does not end.

    httptools keeps headers of any length until they are complete, so without this a client that has no key could fill
    the server's memory.  A body is handed on as it comes, and is the routes' business.
    """

    _kept_bytes = 0  # since the parser last handed something on

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, then 400 and the end of the connection if the parser keeps too much."""
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request header fields too large.")

    def on_headers_complete(self) -> None:
        """As uvicorn's."""
        self._kept_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's."""
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """As uvicorn's."""
        self._kept_bytes = 0
        super().on_message_complete()
