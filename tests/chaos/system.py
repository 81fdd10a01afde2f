"""The running system under load: answers of its admin addresses, and Envoy's access log."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from math import inf
from random import Random
from typing import Any, Self

import aiohttp

from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.samples import SampleKind
from extproc.lab.harness.stack import Stack
from tests.chaos.load import SHORT, SteadyLoad
from tests.chaos.stack import ChaosStack
from tests.waiting import until

_LOOK_AT_AGES_S = 0.2


class LoadedSystem:
    @classmethod
    @asynccontextmanager
    async def started(
        cls, stack: Stack, rate: float, kind: SampleKind = SHORT, answer_s: float = 5.0
    ) -> AsyncIterator[Self]:
        """Start the stack, and prepare the load; pages have ``answer_s`` seconds to answer."""
        timeout = aiohttp.ClientTimeout(total=answer_s)
        async with stack, aiohttp.ClientSession(timeout=timeout) as session:
            yield cls(stack, SteadyLoad(stack.url, rate, Random(1), kind), session)

    def __init__(self, stack: Stack, load: SteadyLoad, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.load = load
        self.session = session
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

    def followed(self, since: float) -> bool:
        """Return True once Envoy sent ten requests in a row, all begun after ``since``, to the
        routers' choice."""
        sent = self.load.answers
        later = [each for name, each in self.accesses.items() if sent[name].sent_at > since][-10:]
        return len(later) == 10 and all(each.upstream in each.destination for each in later)

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
                accounts += [f"{router}: {state}" for state in states if state["name"] == replica]
        return accounts

    async def post(self, replica: str, path: str, **content: Any) -> None:
        """Send a POST to a replica directly, not through Envoy."""
        url = f"http://{self.stack.address(replica)}{path}"
        async with self.session.post(url, **content) as response:
            response.raise_for_status()

    async def _get(self, name: str, path: str) -> Any:
        async with self.session.get(self.stack.admin(name) + path) as response:
            return await response.json()


class FaultySystem(LoadedSystem):
    """The system of the scenes."""

    stack: ChaosStack
    _slowing: asyncio.Task[None]

    def slow_down(self, name: str, run_s: float, stop_s: float) -> None:
        """Let a process run only for ``run_s`` at a time, and stop it for ``stop_s``, as on a
        machine without CPU."""

        async def slow() -> None:
            while True:
                self.stack.process(name).signal(signal.SIGSTOP)
                await asyncio.sleep(stop_s)
                self.stack.process(name).signal(signal.SIGCONT)
                await asyncio.sleep(run_s)

        self._slowing = asyncio.create_task(slow())

    async def speed_up(self, name: str) -> None:
        self._slowing.cancel()
        await asyncio.wait([self._slowing])
        self.stack.process(name).signal(signal.SIGCONT)
