"""Client of a whole system: sends requests through Envoy and reads what the parts report."""

import asyncio
import io
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from extproc.config import AdminSettings
from extproc.ground.clock import monotonic
from extproc.lab.harness.stack import MODEL
from extproc.observe.client import follow
from tests.e2e.stack import PatientStack
from tests.waiting import PATIENCE_S, until, until_read

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
CHAT = "/v1/chat/completions"
IN_TURN = {"x-extproc-policy": "round_robin"}
HEALTHY_ROUTERS = "^cluster.router.health_check.healthy$"  # a counter of Envoy
QUEUED = 'extproc_requests_queued{objective="",tenant=""}'  # a metric
_HEALTHY = {"fail": 0, "reset": False, "hang": False, "slow": 1.0}


@dataclass
class RoutedAnswer:
    """A response, and the router's records of its request."""

    sent: float  # on the monotonic clock
    status: int
    body: bytes
    headers: Mapping[str, str]
    decisions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def decision(self) -> dict[str, Any]:
        (record,) = self.decisions
        return record


class EnvoyClient:
    """Sends requests through Envoy, with the header ``host`` if given."""

    def __init__(self, stack: PatientStack, session: aiohttp.ClientSession, host: str = "") -> None:
        self.stack = stack
        self.session = session
        self._headers = {"host": host} if host else {}

    def of(self, pool: str) -> "EnvoyClient":
        """Return a client of the host that Envoy routes to this pool."""
        return EnvoyClient(self.stack, self.session, f"{pool}.example")

    async def chat(
        self,
        tokens: int = 8,
        headers: dict[str, str] | None = None,
        status: int | None = 200,
        **fields: Any,
    ) -> RoutedAnswer:
        body = {"model": MODEL, "messages": MESSAGES} | fields
        length = {"x-simulate-output-tokens": str(tokens)}
        return await self.request("POST", CHAT, body, length | (headers or {}), status)

    async def uncached(
        self, name: str, words: int = 1000, headers: dict[str, str] | None = None
    ) -> int:
        """Send a prompt that no prefix cache holds, for 120 tokens; return the status."""
        message = {"role": "user", "content": name + " sea" * words}
        body = {"model": MODEL, "messages": [message], "max_tokens": 120}
        length = {"x-simulate-output-tokens": "120"}
        return (await self.send("POST", CHAT, body, length | (headers or {}))).status

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        status: int | None = 200,
    ) -> RoutedAnswer:
        """Send a request that must get this status, or any; return when the router's record of it
        is complete."""
        id_ = str(uuid.uuid4())
        answer = await self.send(method, path, body, {"x-request-id": id_} | (headers or {}))
        assert status is None or answer.status == status, answer
        id_ = answer.headers.get("x-request-id", id_)  # Envoy's tracing changes a digit
        await until(lambda: self._settled(id_))
        answer.decisions = await self.decisions(id_)
        return answer

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> RoutedAnswer:
        sent = monotonic()
        headers = self._headers | (headers or {})
        if isinstance(body, dict):
            body = io.BytesIO(json.dumps(body).encode())
            headers = {"content-type": "application/json"} | headers
        url = self.stack.url + path
        async with self.session.request(method, url, headers=headers, data=body) as response:
            content = await response.read()
            return RoutedAnswer(sent, response.status, content, response.headers)

    async def _settled(self, request_id: str) -> bool:
        """Return true if the router knows the outcome, or has nothing in flight.

        A response that the router does not read has no outcome, nor has a request for which Envoy
        did not wait.
        """
        outcomes = [record["outcome"] for record in await self.decisions(request_id)]
        if all(outcome["completion_s"] or (outcome["status"] or 0) >= 400 for outcome in outcomes):
            return True
        try:
            return not (await self.fleet())["in_flight"]
        except aiohttp.ClientError:
            return True

    async def decisions(self, request_id: str) -> list[dict[str, Any]]:
        """Return the records that the routers have of a request."""
        found, path = list[dict[str, Any]](), f"/decisions?request_id={request_id}"
        for router in self.stack.routers:
            with suppress(aiohttp.ClientError):
                found += await self._admin(path, self.stack.admin(router))
        return found

    async def fleet(self) -> dict[str, Any]:
        return dict(await self._admin("/fleet"))

    async def replicas(self) -> list[dict[str, Any]]:
        """Return the router's states of all replicas."""
        return list((await self.fleet())["replicas"])

    async def snapshot(self) -> dict[str, Any]:
        """Return what the router's page shows."""
        async with aclosing(follow(self.stack.router_admin, AdminSettings())) as snapshots:
            return await anext(snapshots)

    async def warnings(self) -> list[str]:
        """Return the warnings of the router's page."""
        return list((await self.snapshot())["warnings"])

    async def replica(self, name: str) -> dict[str, Any]:
        return next(replica for replica in await self.replicas() if replica["name"] == name)

    async def replica_is(self, name: str, state: Callable[[dict[str, Any]], object]) -> None:
        """Wait until the router has a replica in this state."""
        await until_read(lambda: self.replica(name), state)

    async def measured(self, *names: str) -> bool:
        """Return true if polls have measured these replicas; otherwise send requests first."""
        replicas = [await self.replica(name) for name in names]
        if all(replica["healthy"] and replica["measured"] for replica in replicas):
            return True
        await asyncio.gather(*(self.chat(tokens=300) for _ in range(8)))
        return False

    async def in_flight(self) -> int:
        return int((await self.fleet())["in_flight"])

    async def has_in_flight(self, count: int) -> None:
        await until_read(self.in_flight, lambda now: now == count)

    async def nothing_left(self) -> None:
        """Wait until the router has no stream, and no request in its queue or ledger."""
        names = QUEUED, "extproc_open_streams", "extproc_requests_in_flight"

        async def idle() -> bool:
            return not any([await self.metric(name) for name in names])

        await until(idle)
        await self.has_in_flight(0)

    async def busy(self) -> str:
        """Wait until a replica has a request in flight; return the replica's name."""
        replicas = await until_read(
            self.replicas, lambda now: any(each["in_flight"] for each in now)
        )
        return next(str(each["name"]) for each in replicas if each["in_flight"])

    async def metric(self, name: str, admin: str = "") -> float:
        """Return a metric of the first router, or of the router with this admin address."""
        async with self.session.get(f"{admin or self.stack.router_admin}/metrics") as page:
            found = re.search(rf"^{re.escape(name)} (\S+)$", await page.text(), re.M)
        return float(found[1]) if found else 0.0

    async def routed(self, router: str = "") -> float:
        admin = self.stack.admin(router) if router else ""
        return await self.metric('extproc_requests_total{result="routed"}', admin)

    async def simulate(self, name: str, **behaviour: Any) -> None:
        """Change the behaviour of a simulated replica."""
        await self.post(f"http://{self.stack.address(name)}/simulate", behaviour)

    @asynccontextmanager
    async def simulating(self, name: str, **behaviour: Any) -> AsyncIterator[None]:
        """Change the behaviour of a simulated replica within the block."""
        await self.simulate(name, **behaviour)
        try:
            yield
        finally:
            await self.simulate(name, **{key: _HEALTHY[key] for key in behaviour})

    @asynccontextmanager
    async def without_router(self) -> AsyncIterator[None]:
        """Kill the router, and start it at the end of the block."""
        await self.stack.kill("router")
        try:
            yield
        finally:
            await self.start_router()

    async def start_router(self) -> None:
        """Start the router, and wait until it routes."""
        await self.stack.start("router")
        await self.routes_again()

    async def routes_again(self) -> None:
        await self.stack.wait_routing()
        await until_read(lambda: self.chat(tokens=1, status=None), lambda now: now.decisions)

    async def slow(self, times: float) -> None:
        for replica in self.stack.replicas:
            await self.simulate(replica.name, slow=times)

    async def envoy_counts(self, pattern: str) -> int:
        """Return the sum of Envoy's counters whose names match."""
        async with self.session.get(f"{self.stack.envoy_admin}/stats?filter={pattern}") as page:
            return sum(
                int(counter.rpartition(" ")[2]) for counter in (await page.text()).splitlines()
            )

    async def replica_counts(self, name: str, metric: str) -> float:
        """Return a metric of a replica, summed over its labels.

        Raises:
            TimeoutError, aiohttp.ClientError: the replica does not answer.
        """
        limit = aiohttp.ClientTimeout(total=5)
        url = f"http://{self.stack.address(name)}/metrics"
        async with self.session.get(url, timeout=limit) as page:
            counts = re.findall(rf"^{metric}\{{.*\}} (\S+)$", await page.text(), re.M)
        assert counts, f"{name} has no {metric}"
        return sum(map(float, counts))

    async def load(self, *names: str) -> int:
        """Return the number of requests at these simulated replicas."""
        load = 0
        for name in names:
            url = f"http://{self.stack.address(name)}/simulate/requests"
            async with self.session.get(url) as response:
                load += len(await response.json())
        return load

    async def post(self, url: str, body: dict[str, Any]) -> None:
        async with self.session.post(url, json=body) as response:
            assert response.status == 200, await response.text()

    async def _admin(self, path: str, admin: str = "") -> Any:
        url = (admin or self.stack.router_admin) + path
        limit = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with self.session.get(url, timeout=limit) as response:
            return await response.json()
