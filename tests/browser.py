"""A headless Chromium, spoken to through chromedriver's WebDriver protocol; both are Debian packages."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaverl.processes import ending_with_parent

# nothing of a browser's own talks to the network
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def why_absent() -> str:
    """Empty where the browser and its driver are there."""
    missing = [
        name for name in ("chromium", "chromedriver") if shutil.which(name) is None
    ]
    return (
        f"{' and '.join(missing)} not found (Debian: apt-get install chromium chromium-driver)"
        if missing
        else ""
    )


class Browser:
    """One window. Raises RuntimeError with the driver's words where a command fails."""

    def __init__(self, port: int, profile: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._send(
            "POST", "/session", {"capabilities": {"alwaysMatch": capabilities}}
        )
        self._base += f"/session/{answer['sessionId']}"

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """The size of the page itself, in CSS pixels."""
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 2 if phone else 1,
            "mobile": phone,
        }
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, path: Path) -> None:
        self._send("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The body of a JavaScript function; returns what it returns."""
        return self._send(
            "POST", "/execute/sync", {"script": script, "args": list(arguments)}
        )

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._send(
            "POST", "/goog/cdp/execute", {"cmd": command, "params": parameters}
        )

    def log(self, kind: str) -> list[dict[str, Any]]:
        """`browser`: what the page says on its console; `performance`: among others, every request."""
        found: list[dict[str, Any]] = self._send("POST", "/se/log", {"type": kind})
        return found

    def picture(self, path: Path) -> Path:
        """A PNG of the whole page."""
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.devtools(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={
                "x": 0,
                "y": 0,
                "width": size["width"],
                "height": size["height"],
                "scale": 1,
            },
        )
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        self._send("DELETE", "", None)

    def _send(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`."""
    log = folder / "chromedriver.log"
    command = ending_with_parent(["chromedriver", "--port=0", f"--log-path={log}"])
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "successfully on port" in line)
        port = int(line.rstrip(".\n").rsplit(" ", 1)[1])
        window = _started(port, folder / "profile")
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()


def _started(port: int, profile: Path) -> Browser:
    for attempt in range(3):
        try:
            return Browser(port, profile)
        except (RuntimeError, OSError):
            if attempt == 2:
                raise
            time.sleep(0.5)
    raise AssertionError
