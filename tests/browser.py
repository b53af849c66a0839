"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver and no package is needed.

``Chromium`` starts one with one page, whose events are kept. https://chromedevtools.github.io has the protocol.
"""

from __future__ import annotations

import base64
import json
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")  # as Debian, others and Google call it
PATIENCE_S = 60  # for an answer; a browser that hangs must not hang the tests


def found() -> str | None:
    """Returns the path of a Chromium on this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one page; a context manager, which ends it.

    Attributes:
      events: what the page has reported: pairs of an event's name and its parameters.
    """

    def __init__(self, path: str):
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        options = (
            "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
            f"--user-data-dir={self._profile.name}", "about:blank",
        )  # fmt: skip
        self._process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh", path, *options],  # it reads 3 and writes 4
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._write, self._read = self._process.stdin, self._process.stdout
        self._count, self._rest, self._session = 0, b"", None

    def __enter__(self) -> Self:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._write.close()  # at the end of its input it ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read.close()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result; events that come before it are kept.

        Raises:
          RuntimeError: the browser refused, or ended.
          TimeoutError: it did not answer.
        """
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._keep(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser did not answer in {PATIENCE_S} s")
            read = self._read.read(1 << 20)
            if not read:
                raise RuntimeError(f"the browser ended with status {self._process.wait()}")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _keep(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self.events.append((message["method"], message["params"]))

    def open(self, url: str) -> None:
        """Loads a page, and forgets the events of the one before."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(name == "Page.loadEventFired" for name, _ in self.events):
            self._keep(self._next())

    def look(self, width: int, scheme: str) -> None:
        """Shows the page in a window of that width, to who prefers that scheme of colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript in the page; a promise's when it is kept.

        Raises:
          RuntimeError: the expression threw.
        """
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if thrown := result.get("exceptionDetails"):
            raise RuntimeError(thrown.get("exception", thrown).get("description", str(thrown)))
        return result["result"].get("value")

    def picture(self, path: pathlib.Path, whole: bool = False) -> None:
        """Writes what is seen of the page, or all of it, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))
