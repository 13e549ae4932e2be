"""A headless Chromium, driven over its pipe for debugging."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --hide-scrollbars "
    "--disable-extensions --disable-dev-shm-usage --remote-debugging-pipe"
)


class Browser:
    """One tab. It fails every request to a network.

    Args:
        folder: a new folder for the profile.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = f'exec "$0" {_FLAGS} --user-data-dir="$1" about:blank 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, str(folder)],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        """Uncaught errors and messages of the console."""
        self.requests: list[str] = []
        """Addresses of all requests."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser ended"
            self._left += piece
        line, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        method, given = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(given["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        return found

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window in pixels, and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a page and wait until it is ready."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.run(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )

    def run(self, source: str) -> Any:
        """Return the value of an expression in JavaScript, after its promise."""
        found = self.call("Runtime.evaluate", expression=source, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, for example ``"Tab"``, ``"Enter"`` or ``"ArrowRight"``, or type a text of one character each."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36}
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else None
            given = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            self.call("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def picture(self, file: Path, whole: bool = True) -> None:
        """Write a picture of the page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip} if whole else {}
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"])
        )

    def close(self) -> None:
        """End the browser and wait for it."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)
