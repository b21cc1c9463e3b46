"""A real browser for tests: chromium without a window, told what to do through a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any


class Browser:
    """One page. Everything in it happens as if somebody sat there."""

    def __init__(self, folder: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        command = f'exec chromium {flags} "--user-data-dir={folder}" about:blank 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self._session = b"", 0, {}

    def open(self, url: str) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **key)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({selector!r}).click()")

    def close(self) -> None:
        os.close(self._out)
        self._process.kill()
        self._process.wait()
        os.close(self._in)

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._in, 1 << 16)
                assert read, "the browser ended"
                self._rest += read
            line, self._rest = self._rest.split(b"\0", 1)
            found = json.loads(line)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
