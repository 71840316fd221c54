"""Drives a headless Chromium over its debugging pipe: pages, keys, media, screenshots."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """One page of a browser.

    problems: what it refused or could not run: scripts that raised, what the page's policy or the
        absence of a file kept from loading.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self._count = 0
        self._session = ""
        self._rest = b""
        self._loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._writes.write(json.dumps(message).encode() + b"\0")
        self._writes.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(
        self,
        page: Path,
        query: str = "",
        *,
        width: int = 1280,
        scheme: str = "light",
        media: str = "screen",
    ) -> None:
        """Load a page of a given width in CSS pixels, in a colour scheme ("light" or "dark"), on a
        screen or in "print"."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        # From one place of a page to another, nothing would be loaded.
        self.load(lambda: self.call("Page.navigate", url="about:blank"))
        self.load(lambda: self.call("Page.navigate", url=page.absolute().as_uri() + query))

    def close(self) -> None:
        """Close the pipes, upon which the browser ends."""
        self._reads.close()
        self._writes.close()

    def load(self, action: Callable[[], Any]) -> None:
        """Do what makes the browser load a page, and wait until it is there."""
        self._loaded = False
        action()
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """What a JavaScript expression comes to, as plain data."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press a key, such as "Tab"."""
        code = {"Tab": 9, "Enter": 13}[key]
        given = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path, *, height: int = 900) -> None:
        """Write what the page looks like from its top as a PNG."""
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._reads.fileno(), 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        self._note(event.get("method", ""), event.get("params", {}))
        return event

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(params["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(str(params["request"]["url"]))


def _high(descriptor: int) -> int:
    """The same, with a number of 10 at least."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in a folder of its own."""
    # Chromium reads from descriptor 3 and writes to 4: none of ours may be called so.
    to_browser, writes, reads, from_browser = map(_high, (*os.pipe(), *os.pipe()))
    command = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, "-", CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        opened = Browser(reads, writes)
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait(30)
