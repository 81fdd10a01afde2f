"""The running system under load, and what its parts say of it."""

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from math import inf
from typing import Any

import aiohttp

from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.stack import SimulatedReplica, Stack
from tests.chaos.load import Load
from tests.waiting import until

_LOOK_AT_AGES_S = 0.2

PROGRAM = ("tests.chaos.replica",)
REPLICAS = tuple(
    SimulatedReplica(f"r{number}", "llama-8b-h100", program=PROGRAM) for number in range(1, 5)
)


class System:
    """Asks admin addresses and reads Envoy's access log."""

    def __init__(self, stack: Stack, load: Load, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.load = load
        self._session = session
        self._log = AccessLog(stack.access_log)
        self._accesses: dict[str, Access] = {}
        self._ages: list[tuple[float, str, str, float]] = []

    @property
    def accesses(self) -> dict[str, Access]:
        """The requests that ended, by their ids, as Envoy saw them."""
        self._accesses |= {access.request_id: access for access in self._log.new()}
        return self._accesses

    async def settled(self) -> None:
        """Returns when Envoy has written the end of every request; its log lags a little."""
        await until(lambda: self.load.answers.keys() <= self.accesses.keys(), seconds=10)

    def served_by(self, replica: str, since: float) -> bool:
        """Whether a request sent since then was answered by that replica."""
        address, sent = self.stack.address(replica), self.load.answers
        return any(
            access.upstream == address and access.status == 200 and sent[name].sent_at > since
            for name, access in self.accesses.items()
        )

    async def routed_by(self, router: str, since: float) -> bool:
        """Whether a request sent since then was routed by that router."""
        decisions = await self._get(router, "/decisions")
        return any(self.load.answers[one["request_id"]].sent_at > since for one in decisions)

    async def scraped(self, since: float) -> bool:
        """Whether every router has figures of every replica taken since then."""
        began = time.time() - (time.monotonic() - since)
        states = [
            state
            for router in self.stack.routers
            for state in (await self._get(router, "/fleet"))["replicas"]
        ]
        return all(state["scraped_at"] > began for state in states)

    async def watch_ages(self) -> None:
        """Notes how old each router's figures of replicas are, for ever."""
        while True:
            for router in self.stack.routers:
                with suppress(aiohttp.ClientError, TimeoutError):  # it is dead or stopped
                    states = (await self._get(router, "/fleet"))["replicas"]
                    now, seen = time.monotonic(), time.time()
                    self._ages += [
                        (now, router, state["name"], seen - state["scraped_at"]) for state in states
                    ]
            await asyncio.sleep(_LOOK_AT_AGES_S)

    def oldest(self, began: float, ended: float, but_for: Collection[str]) -> float:
        """Seconds: age of the oldest figures that a router had of a replica in that time.

        Left out are those replicas, and those routers.
        """
        ages = (
            age
            for at, router, replica, age in self._ages
            if began <= at < ended and router not in but_for and replica not in but_for
        )
        return max(ages, default=inf)

    async def ledgers(self) -> dict[str, int]:
        """Requests in flight in the ledger of each router."""
        return {
            router: (await self._get(router, "/fleet"))["in_flight"]
            for router in self.stack.routers
        }

    async def account(self, replica: str) -> list[str]:
        """What each router makes of a replica in its last decision."""
        accounts = []
        for router in self.stack.routers:
            decisions = await self._get(router, "/decisions")
            seen = [*decisions[-1]["excluded"], *decisions[-1]["candidates"]] if decisions else []
            accounts += [f"{router}: {one}" for one in seen if one["name"] == replica]
        return accounts

    async def post(self, replica: str, path: str, **content: Any) -> None:
        """Asks a replica itself, not through Envoy."""
        url = f"http://{self.stack.address(replica)}{path}"
        async with self._session.post(url, **content) as response:
            response.raise_for_status()

    async def _get(self, name: str, path: str) -> Any:
        async with self._session.get(self.stack.admin(name) + path) as response:
            return await response.json()
