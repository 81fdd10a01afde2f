"""A client of the whole system, and what the router says of its requests."""

import io
import json
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from extproc.clock import monotonic
from extproc.demo.stack import MODEL
from tests.e2e.stack import Stack
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    sent: float
    """On the monotonic clock."""
    status: int
    body: bytes
    headers: dict[str, str]
    decisions: list[dict[str, Any]]
    """The router's records of this request."""

    @property
    def decision(self) -> dict[str, Any]:
        (record,) = self.decisions
        return record


class Client:
    """Sends requests through Envoy."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._session = session

    async def chat(
        self, tokens: int = 8, headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
        """A chat whose answer has ``tokens`` tokens; the router does not know that."""
        body = {"model": MODEL, "messages": MESSAGES} | fields
        wanted = {"x-simulate-output-tokens": str(tokens)}
        return await self.request("POST", CHAT, body, wanted | (headers or {}))

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Any request; a dict is sent as JSON, anything else as it is."""
        name, sent = str(uuid.uuid4()), monotonic()
        if isinstance(body, dict):
            body = io.BytesIO(json.dumps(body).encode())
            headers = {"content-type": "application/json"} | (headers or {})
        async with self._session.request(
            method,
            self._stack.url + path,
            headers={"x-request-id": name} | (headers or {}),
            data=body,
        ) as response:
            content = await response.read()
            told = dict(response.headers)
            name = response.headers.get("x-request-id", name)  # tracing changes a digit
        return Answer(sent, response.status, content, told, await self._settled(name))

    async def _settled(self, request_id: str) -> list[dict[str, Any]]:
        """The records, once the router has heard that the response has ended."""

        async def settled() -> bool:
            outcomes = [record["outcome"] for record in await self.decisions(request_id)]
            return all(one["completion_s"] or (one["status"] or 0) >= 400 for one in outcomes)

        with suppress(TimeoutError):  # a request that Envoy did not wait for has no outcome
            await until(settled, seconds=5)
        return await self.decisions(request_id)

    async def decisions(self, request_id: str) -> list[dict[str, Any]]:
        """The router's records of a request; none while it is down."""
        try:
            return list(await self._admin(f"/decisions?request_id={request_id}"))
        except (aiohttp.ClientError, TimeoutError):
            return []

    async def fleet(self) -> dict[str, Any]:
        """The fleet as the router sees it."""
        return dict(await self._admin("/fleet"))

    async def replica(self, name: str) -> dict[str, Any]:
        """One replica as the router sees it."""
        replicas = (await self.fleet())["replicas"]
        return next(one for one in replicas if one["name"] == name)

    async def metric(self, name: str) -> float:
        """The router's, summed over its workers."""
        return sum([await self.metric_of(admin, name) for admin in self._stack.worker_admins()])

    async def metric_of(self, admin: str, name: str) -> float:
        """One worker's."""
        async with self._session.get(f"{admin}/metrics") as page:
            found = re.search(rf"^{re.escape(name)} (\S+)$", await page.text(), re.M)
        return float(found[1]) if found else 0.0

    async def routed(self, admin: str) -> float:
        """How many requests a router, or one of its workers, has routed."""
        return await self.metric_of(admin, 'extproc_requests_total{result="routed"}')

    async def simulate(self, name: str, **door: Any) -> None:
        """Makes a simulated replica slow, hung or failing."""
        await self.post(f"http://{self._stack.address(name)}/simulate", door)

    async def post(self, url: str, body: dict[str, Any]) -> None:
        """Asks a replica itself, not through Envoy."""
        async with self._session.post(url, json=body) as response:
            assert response.status == 200, await response.text()

    async def ledger_empty(self) -> None:
        """Returns when the router has no request in flight."""

        async def empty() -> bool:
            return bool((await self.fleet())["in_flight"] == 0)

        await until(empty)

    async def _admin(self, path: str) -> Any:
        url, limit = self._stack.router_admin + path, aiohttp.ClientTimeout(total=5)
        async with self._session.get(url, timeout=limit) as response:
            return await response.json()
