"""Client of Chromium's DevTools protocol over a pipe, without a driver or a port.

https://chromedevtools.github.io/devtools-protocol
"""
from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome-headless-shell")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            "--disable-dev-shm-usage", "--remote-debugging-pipe")
# Executes the browser, which reads descriptor 3 and writes descriptor 4.
_START = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_TIMEOUT_SECS = 60.0


def executable() -> str | None:
    """Return the path of the Chromium executable on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """Browser tab, with the messages that it wrote to its console."""

    def __init__(self, send: Callable[[bytes], None], receive: Callable[[], bytes]) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self.errors: list[str] = []         # errors of scripts, the console and requests
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._send(json.dumps({**message, **({"sessionId": self._session} if self._session else {})}).encode() + b"\0")
        while True:
            answer = json.loads(self._receive())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(json.dumps(parameters["args"])[:500])

    def show(self, url: str, width: int, height: int = 1000, scheme: str = "light") -> None:
        """Open an address in a window of this size, and discard the errors of the previous page."""
        self.call("Page.navigate", url="about:blank")
        self.evaluate("0")
        self.errors.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + _TIMEOUT_SECS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} did not become true; errors: {self.errors}"
            time.sleep(0.05)
        return value

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """Start a browser and yield a page. folder: an empty folder for its profile."""
    browser = executable()
    assert browser
    (commands, write), (read, answers) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(commands), str(answers), browser, *_OPTIONS, f"--user-data-dir={folder}"],
        pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(commands)
    os.close(answers)
    received = bytearray()

    def send(data: bytes) -> None:
        while data:
            data = data[os.write(write, data):]

    def receive() -> bytes:
        while (end := received.find(b"\0")) < 0:
            ready, _, _ = select.select([read], [], [], _TIMEOUT_SECS)
            data = os.read(read, 1 << 20) if ready else b""
            assert data, "the browser has ended, or does not answer"
            received.extend(data)
        message = bytes(received[:end])
        del received[:end + 1]
        return message

    try:
        yield Page(send, receive)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(write)
        os.close(read)
