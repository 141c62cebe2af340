"""Lines of an answer of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

import httpx


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """The lines, without their ends.

    httpx's own ``iter_lines`` also splits at characters that JSON may contain as they are, such as U+0085 and U+2028.
    """
    rest = b""
    for data in answer.iter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()
