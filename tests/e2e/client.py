import io
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from extproc.ground.clock import monotonic
from extproc.lab.harness.stack import MODEL
from tests.e2e.stack import Stack
from tests.waiting import PATIENCE_S, until, until_read

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    sent: float  # on the monotonic clock
    status: int
    body: bytes
    headers: Mapping[str, str]
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """The router's records of this request."""

    @property
    def decision(self) -> dict[str, Any]:
        (record,) = self.decisions
        return record


class Client:
    """Sends requests through Envoy, to a host where one is given."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession, host: str = "") -> None:
        self._stack = stack
        self._session = session
        self._headers = {"host": host} if host else {}

    def of(self, pool: str) -> "Client":
        """A client of the host that a route gives to this pool."""
        return Client(self._stack, self._session, f"{pool}.example")

    async def chat(
        self, tokens: int = 8, headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
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
        name = str(uuid.uuid4())
        answer = await self.send(method, path, body, {"x-request-id": name} | (headers or {}))
        name = answer.headers.get("x-request-id", name)  # tracing changes a digit
        await until(lambda: self._settled(name))
        answer.decisions = await self.decisions(name)
        return answer

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        sent = monotonic()
        headers = self._headers | (headers or {})
        if isinstance(body, dict):
            body = io.BytesIO(json.dumps(body).encode())
            headers = {"content-type": "application/json"} | headers
        async with self._session.request(
            method,
            self._stack.url + path,
            headers=headers,
            data=body,
        ) as response:
            content = await response.read()
            told = response.headers
        return Answer(sent, response.status, content, told)

    async def _settled(self, request_id: str) -> bool:
        """Whether the router has heard that the response has ended, or has nothing in flight:
        what it does not read, or Envoy did not wait for, has no outcome."""
        outcomes = [record["outcome"] for record in await self.decisions(request_id)]
        if all(one["completion_s"] or (one["status"] or 0) >= 400 for one in outcomes):
            return True
        try:
            return not (await self.fleet())["in_flight"]
        except aiohttp.ClientError:
            return True

    async def decisions(self, request_id: str) -> list[dict[str, Any]]:
        try:
            return list(await self._admin(f"/decisions?request_id={request_id}"))
        except aiohttp.ClientError:
            return []

    async def fleet(self) -> dict[str, Any]:
        return dict(await self._admin("/fleet"))

    async def replica(self, name: str) -> dict[str, Any]:
        replicas = (await self.fleet())["replicas"]
        return next(one for one in replicas if one["name"] == name)

    async def in_flight(self) -> int:
        return int((await self.fleet())["in_flight"])

    async def has_in_flight(self, count: int) -> None:
        await until_read(self.in_flight, lambda now: now == count)

    async def busy(self) -> str:
        names: list[str] = []

        async def found() -> bool:
            replicas = (await self.fleet())["replicas"]
            names[:] = [one["name"] for one in replicas if one["in_flight"]]
            return bool(names)

        await until(found)
        return names[0]

    async def metric(self, name: str) -> float:
        return await self.metric_of(self._stack.router_admin, name)

    async def metric_of(self, admin: str, name: str) -> float:
        async with self._session.get(f"{admin}/metrics") as page:
            found = re.search(rf"^{re.escape(name)} (\S+)$", await page.text(), re.M)
        return float(found[1]) if found else 0.0

    async def routed(self, admin: str) -> float:
        return await self.metric_of(admin, 'extproc_requests_total{result="routed"}')

    async def routed_by_each(self) -> list[float]:
        return [await self.routed(self._stack.admin(router)) for router in self._stack.routers]

    async def simulate(self, name: str, **door: Any) -> None:
        await self.post(f"http://{self._stack.address(name)}/simulate", door)

    async def slow(self, times: float) -> None:
        for one in self._stack.replicas:
            await self.simulate(one.name, slow=times)

    async def envoy_counts(self, pattern: str) -> int:
        async with self._session.get(f"{self._stack.envoy_admin}/stats?filter={pattern}") as page:
            return sum(int(one.rpartition(" ")[2]) for one in (await page.text()).splitlines())

    async def replica_counts(self, name: str, metric: str) -> float:
        """The same of one of a replica's own, over all its labels; one that hangs is given up.

        Raises:
            TimeoutError, aiohttp.ClientError: it does not answer.
        """
        limit = aiohttp.ClientTimeout(total=5)
        url = f"http://{self._stack.address(name)}/metrics"
        async with self._session.get(url, timeout=limit) as page:
            counts = re.findall(rf"^{metric}\{{.*\}} (\S+)$", await page.text(), re.M)
        assert counts, f"{name} tells no {metric}"
        return sum(map(float, counts))

    async def load(self, name: str) -> int:
        """How many requests a simulated replica has."""
        url = f"http://{self._stack.address(name)}/simulate/requests"
        async with self._session.get(url) as response:
            return len(await response.json())

    async def post(self, url: str, body: dict[str, Any]) -> None:
        async with self._session.post(url, json=body) as response:
            assert response.status == 200, await response.text()

    async def ledger_empty(self) -> None:
        await self.has_in_flight(0)

    async def _admin(self, path: str) -> Any:
        url, limit = self._stack.router_admin + path, aiohttp.ClientTimeout(total=PATIENCE_S)
        async with self._session.get(url, timeout=limit) as response:
            return await response.json()
