"""A page in headless Chromium, steered through the pipes of its DevTools protocol: no port, no further package."""

import json
import os
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from select import select
from time import monotonic, sleep
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium")
_SECONDS = 60.0


class Browser:
    """One tab. `messages` has what the console and the log of the page said, `requests` the addresses it asked for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The protocol is spoken on descriptors 3 and 4. Not sh: dash takes descriptors of one digit only.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        with (profile / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command, CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(to_read, to_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._number, self._session = b"", 0, ""
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._to)  # ends the browser
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path | str, *, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Loads a file or an address.

        width, height: of the window, in CSS pixels. media: "print" to see it as it is printed.
        """
        self.messages.clear()
        self.requests.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._loaded:
            self._note(self._receive())

    def press(self, key: str, text: str = "", *, shift: bool = False) -> None:
        """A key of the keyboard; text: what it writes."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def write(self, text: str) -> None:
        """Text for what has the focus."""
        self.call("Input.insertText", text=text)

    def wait_for(self, expression: str) -> None:
        """Until a JavaScript expression is true in the page."""
        end = monotonic() + _SECONDS
        while not self.value(expression):
            assert monotonic() < end, f"never true: {expression}"
            sleep(0.02)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, *, whole: bool = True) -> bytes:
        """PNG of the page, or of what the window shows of it."""
        return b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        size = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True, "printBackground": False}
        return b64decode(self.call("Page.printToPDF", **size)["data"])

    def _receive(self) -> dict[str, Any]:
        end = monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select([self._from], [], [], max(end - monotonic(), 0))
            assert ready, f"the browser said nothing for {_SECONDS:g} s"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Log.entryAdded":
            self.messages.append(found["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(found["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str(found["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
