"""A headless Chromium for tests of pages, over the DevTools protocol on two pipes.

Debian's package ``chromium-headless-shell`` is enough; any Chromium or Chrome on the path will do.
"""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.clock import PATIENCE_S
from tests.helpers.procs import end

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
# The browser reads from descriptor 3 and writes to 4.
_LAUNCH = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The path of a Chromium; None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """The one page of a browser.

    Attributes:
        requests: URL of everything that the page has asked for.
        complaints: Errors of scripts and of the content security policy.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._count = 0
        self._session = ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Opens a page and waits until it is loaded."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.complaints.clear()
        self._send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'", f"{url} to load")

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, what: str) -> Any:
        """Waits until an expression is true and returns its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}; {self.complaints}"
            time.sleep(0.05)
        return found

    def point_at(self, selector: str) -> None:
        """Moves the mouse to the middle of the first element that the selector finds."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """Writes what the page looks like as a PNG; ``whole``: beyond the window too."""
        shot = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Starts a browser with an empty profile in ``folder``, and ends it."""
    found = find()
    assert found is not None
    (ours_read, theirs_write), (theirs_read, ours_write) = os.pipe(), os.pipe()
    command = [
        *(sys.executable, "-c", _LAUNCH, str(theirs_read), str(theirs_write), found),
        "--remote-debugging-pipe",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
    ]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(theirs_read, theirs_write), stdout=log, stderr=log)
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Page(ours_write, ours_read)
    finally:
        os.close(ours_write)  # the browser ends when its pipe is closed
        os.close(ours_read)
        end(process, PATIENCE_S)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves the files of a folder on this machine; yields the URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
