"""A headless Chromium that a test drives through its debugging pipe, without a package, a port or network."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without these it looks for updates and accounts at every start.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return Chromium's path, or the one in the environment variable `CHROMIUM`."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A page in Chromium.

    Attributes:
        said: messages on its console.
        requested: all addresses that it requested.
    """

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._held = b""
        self._calls = 0
        self._session: str | None = None
        self.said: list[str] = []
        self.requested: list[str] = []
        self._loaded = False

    def attach(self) -> None:
        """Attach to the first page."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol and return its result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file and wait for its load event, after its scripts have run."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._read()

    def evaluate(self, script: str) -> Any:
        """Return the JSON value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            if not select.select([self._read_fd], [], [], PATIENCE_S)[0]:
                raise RuntimeError(f"Chromium has said nothing for {PATIENCE_S:.0f} s")
            piece = os.read(self._read_fd, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._held += piece
        text, self._held = self._held.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._hear(message.get("method"), message.get("params", {}))
        return message

    def _hear(self, method: str | None, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.consoleAPICalled":
            self.said.append(f"{told['type']}: {told['args']}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(f"exception: {told['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.said.append(f"{told['entry']['level']}: {told['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Chromium]:
    """Run Chromium with an empty profile within the block. It reads commands on descriptor 3 and replies on
    4."""
    its_in, our_out = os.pipe()
    our_in, its_out = os.pipe()
    command = f'exec "$@" 3<&{its_in} 4>&{its_out}'
    arguments = ["bash", "-c", command, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        arguments, pass_fds=(its_in, its_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(its_in)
    os.close(its_out)
    try:
        browser = Chromium(our_out, our_in)
        browser.attach()
        yield browser
    finally:
        os.close(our_out)  # its end of the debugging pipe: Chromium exits when it is closed
        os.close(our_in)
        process.kill()
        process.wait()
