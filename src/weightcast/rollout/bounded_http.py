"""Limits the bytes that uvicorn's HTTP parser keeps of a request before a route can refuse it."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # the limit of uvicorn's other parser, h11


class BoundedHttp(HttpToolsProtocol):
    """Refuses headers and trailers that are too long.

    httptools keeps headers of any length until they are complete, so without this limit a client without a key could
    fill the server's memory.  The parser passes bodies on as they arrive, and the routes limit them.
    """

    _kept_bytes = 0  # since the parser last passed something on

    def data_received(self, data: bytes) -> None:
        """Parses data; answers 400 and closes the connection if the parser keeps too much."""
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request header fields too large.")

    def on_headers_complete(self) -> None:
        """Passes the head on and starts to count anew."""
        self._kept_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Passes a part of the body on and starts to count anew."""
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request and starts to count anew."""
        self._kept_bytes = 0
        super().on_message_complete()
