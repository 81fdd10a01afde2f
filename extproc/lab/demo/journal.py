"""Every request through Envoy: the router's decision about it, and how Envoy saw it end."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from msgspec import convert

from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.stack import Stack
from extproc.observe.decision import DecisionRecord, read_decisions
from extproc.replica_state import ReplicaState

_KEPT = 100_000
_PATIENCE_S = 5.0


class ReplicaNow(ReplicaState, frozen=True, kw_only=True):
    """Replica in the router's ``/fleet``."""

    in_flight: int


@dataclass(slots=True)
class Entry:
    """Progress of a request."""

    request_id: str
    seen_at: float = field(default_factory=time.monotonic)
    decision: DecisionRecord | None = None
    access: Access | None = None

    @property
    def routed(self) -> bool:
        """True if a replica that the router named served the request."""
        decision, access = self.decision, self.access
        return bool(decision and access and access.upstream in (decision.replica, decision.second))

    @property
    def fallback(self) -> bool:
        """Envoy chose the replica, without the router."""
        return not self.decision and bool(self.access and self.access.upstream)


class Journal:
    """Follows a stack's router and access log; :meth:`refresh` brings it up to date."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self.entries: dict[str, Entry] = {}  # by request id, in the order they were seen
        self.served: Counter[str] = Counter()  # requests per replica, by `ip:port`
        self.fleet: dict[str, ReplicaNow] = {}  # by name; empty while the router is down
        self._admin = stack.router_admin
        self._log = AccessLog(stack.access_log)
        self._session = session
        self._last_decision = 0
        self._ended: list[Access] = []  # read from the log and not yet entered

    @property
    def router_up(self) -> bool:
        return bool(self.fleet)

    async def refresh(self) -> list[Entry]:
        """Read what is new; returns the requests that ended."""
        self._ended += self._log.new()  # before the decisions, which are made before the end
        try:
            while page := await self._get("/decisions", after=self._last_decision):
                for decision in read_decisions(page):
                    self._last_decision = decision.number
                    self._entry(decision.request_id).decision = decision
            fleet = (await self._get("/fleet"))["replicas"]
        except (aiohttp.ClientError, TimeoutError):
            self.fleet = {}
            self._last_decision = 0  # a router that starts again counts from 1
        else:
            self.fleet = {one.name: one for one in convert(fleet, list[ReplicaNow])}
        ended, self._ended = self._ended, []
        return [self._end(access) for access in ended]

    async def settle(self, request_ids: set[str]) -> None:
        """Refresh until Envoy has logged the end of all of these, or a few seconds passed."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            await self.refresh()
            ended = {name for name, entry in self.entries.items() if entry.access}
            if request_ids <= ended:
                return
            await asyncio.sleep(0.05)

    def _end(self, access: Access) -> Entry:
        entry = self._entry(access.request_id)
        entry.access = access
        self.served[access.upstream] += 1
        return entry

    def _entry(self, request_id: str) -> Entry:
        entry = self.entries.get(request_id)
        if entry is None:
            entry = self.entries[request_id] = Entry(request_id)
            if len(self.entries) > _KEPT:
                del self.entries[next(iter(self.entries))]
        return entry

    async def _get(self, path: str, **query: int) -> Any:
        async with self._session.get(f"{self._admin}{path}", params=query) as response:
            return await response.json()
