"""The running system under load: answers of its admin addresses, and Envoy's access log."""

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from math import inf
from typing import Any

import aiohttp

from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.stack import SimulatedReplica, Stack
from tests.chaos.load import SteadyLoad
from tests.waiting import until

_LOOK_AT_AGES_S = 0.2

PROGRAM = ("tests.chaos.replica",)
REPLICAS = tuple(
    SimulatedReplica(f"r{number}", "llama-8b-h100", program=PROGRAM) for number in range(1, 5)
)


class LoadedSystem:
    def __init__(self, stack: Stack, load: SteadyLoad, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.load = load
        self._session = session
        self._log = AccessLog(stack.access_log)
        self._accesses: dict[str, Access] = {}
        self._ages: list[tuple[float, str, str, float]] = []

    @property
    def accesses(self) -> dict[str, Access]:
        """Ended requests in Envoy's access log, by request id."""
        self._accesses |= {access.request_id: access for access in self._log.new()}
        return self._accesses

    async def settled(self) -> None:
        """Wait until Envoy, whose log lags a little, has logged the end of every request."""
        await until(lambda: self.load.answers.keys() <= self.accesses.keys(), seconds=10)

    def served_by(self, replica: str, since: float) -> bool:
        """Return True once the replica has answered a request that was sent after ``since``."""
        address, sent = self.stack.address(replica), self.load.answers
        return any(
            access.upstream == address and access.status == 200 and sent[name].sent_at > since
            for name, access in self.accesses.items()
        )

    async def routed_by(self, router: str, since: float) -> bool:
        """Return True once the router has routed a request that was sent after ``since``."""
        decisions = await self._get(router, "/decisions")
        return any(
            self.load.answers[decision["request_id"]].sent_at > since for decision in decisions
        )

    async def scraped(self, since: float) -> bool:
        """Return True once every router has states of all replicas scraped after ``since``."""
        began = time.time() - (time.monotonic() - since)
        states = [
            state
            for router in self.stack.routers
            for state in (await self._get(router, "/fleet"))["replicas"]
        ]
        return all(state["scraped_at"] > began for state in states)

    async def watch_ages(self) -> None:
        """Record the age of each router's states of replicas, without end."""
        while True:
            for router in self.stack.routers:
                with suppress(aiohttp.ClientError, TimeoutError):  # the router is dead or stopped
                    states = (await self._get(router, "/fleet"))["replicas"]
                    now, wall = time.monotonic(), time.time()
                    self._ages += [
                        (now, router, state["name"], wall - state["scraped_at"]) for state in states
                    ]
            await asyncio.sleep(_LOOK_AT_AGES_S)

    def oldest(self, began: float, ended: float, excluded: Collection[str]) -> float:
        """Greatest age, in seconds, of a state that a router had between the two times.

        ``excluded``: names of replicas and routers that do not count.
        """
        ages = (
            age
            for at, router, replica, age in self._ages
            if began <= at < ended and router not in excluded and replica not in excluded
        )
        return max(ages, default=inf)

    async def ledgers(self) -> dict[str, int]:
        """Number of requests in flight in the ledger of each router."""
        return {
            router: (await self._get(router, "/fleet"))["in_flight"]
            for router in self.stack.routers
        }

    async def account(self, replica: str) -> list[str]:
        """Describe a replica as the last decision of each router saw it."""
        accounts = []
        for router in self.stack.routers:
            decisions = await self._get(router, "/decisions")
            for decision in decisions[-1:]:
                states = [*decision["excluded"], *decision["candidates"]]
                accounts += [f"{router}: {one}" for one in states if one["name"] == replica]
        return accounts

    async def post(self, replica: str, path: str, **content: Any) -> None:
        """Send a POST to a replica directly, not through Envoy."""
        url = f"http://{self.stack.address(replica)}{path}"
        async with self._session.post(url, **content) as response:
            response.raise_for_status()

    async def _get(self, name: str, path: str) -> Any:
        async with self._session.get(self.stack.admin(name) + path) as response:
            return await response.json()
