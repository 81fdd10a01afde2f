"""A tab of a headless Chromium, driven through its DevTools protocol."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from extproc.lab.harness.processes import Process
from tests.waiting import PATIENCE_S, until

BINARY = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = """--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars
--disable-quic --no-first-run --no-default-browser-check --disable-sync
--disable-background-networking --disable-component-update --disable-extensions
--remote-debugging-port=0"""


class BrowserPage:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self.problems: list[str] = []  # of console, content security policy and scripts
        self.requested: list[str] = []  # addresses
        self.received = 0  # pieces of responses

    async def command(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            while (message := await self._socket.receive_json()).get("id") != number:
                self._note(message.get("method", ""), message.get("params", {}))
        assert "error" not in message, message["error"]
        return dict(message["result"])

    def _note(self, event: str, details: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(details["request"]["url"])
        self.received += event == "Network.dataReceived"
        if event in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(details))

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await self.command(f"{domain}.enable")
        await self.command("Page.navigate", url=url)
        await self.until("document.readyState == 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited; ``$`` and ``$$`` find elements."""
        flags = dict.fromkeys(("awaitPromise", "returnByValue", "includeCommandLineAPI"), True)
        answer = await self.command("Runtime.evaluate", expression=expression, **flags)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        await until(lambda: self.evaluate(f"Boolean({expression})"))

    async def press(self, key: str, code: int) -> None:
        event = {"key": key, "windowsVirtualKeyCode": code}
        event |= {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.command("Input.dispatchKeyEvent", type=kind, **event)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.command("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.command("Emulation.setEmulatedMedia", features=features)


@asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[str]:
    """A browser with an empty profile; yields the URL of its DevTools."""
    assert BINARY is not None
    ports = directory / "profile" / "DevToolsActivePort"

    async def ready() -> bool:
        return ports.exists() and len(ports.read_text().splitlines()) == 2

    argv = [BINARY, *_FLAGS.split(), f"--user-data-dir={ports.parent}", "about:blank"]
    log = directory / "chromium.log"
    async with await Process.start("chromium", argv, log=log, ready=ready, ready_s=PATIENCE_S):
        yield f"http://127.0.0.1:{ports.read_text().splitlines()[0]}/json"


@asynccontextmanager
async def tab(browser: str) -> AsyncIterator[BrowserPage]:
    """A new tab, closed at the end."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{browser}/new?about:blank") as response:
            target = await response.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            yield BrowserPage(socket)
        async with session.get(f"{browser}/close/{target['id']}") as response:
            assert response.status == 200
