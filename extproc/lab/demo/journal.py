"""Journal of the demo: for each request the router's decision and Envoy's access log entry."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from msgspec import convert

from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.pages import get_json
from extproc.lab.harness.stack import Stack
from extproc.observe.decision import DecisionRecord

_LONGEST_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """Ended request: Envoy's access log entry, and the router's decision, if there was one."""

    access: Access
    decision: DecisionRecord | None

    @property
    def routed(self) -> bool:
        """True if the router's first or second choice served the request."""
        decision = self.decision
        return bool(decision and self.access.upstream in (decision.replica, decision.second))

    @property
    def fallback(self) -> bool:
        """True if Envoy chose the replica without a decision of the router."""
        return self.decision is None and bool(self.access.upstream)

    @property
    def why(self) -> str:
        """Clause that says why the request failed, or why it took its route."""
        if self.access.status != 200:
            return f"status {self.access.status}" if self.access.status else "the client left"
        if self.decision is None:
            return "no decision: Envoy's fallback"
        return self.decision.why.partition(";")[0]


class Journal:
    """Ended requests of a running stack, from its router's decisions and Envoy's access log."""

    def __init__(self, stack: Stack) -> None:
        self.entries: dict[str, Entry] = {}  # by request id, in the order of their ends
        self._admin = stack.router_admin
        self._log = AccessLog(stack.access_log)
        self._last_decision = 0
        self._decisions: dict[str, DecisionRecord] = {}  # of requests that have not ended
        self._logged: list[Access] = []  # log entries not yet in `entries`

    async def refresh(self) -> list[Entry]:
        """Read new decisions and log entries; return the requests whose end is newly logged."""
        self._logged += self._log.new()  # log before decisions: a logged request has been decided
        while page := await get_json(f"{self._admin}/decisions?after={self._last_decision}"):
            for decision in convert(page, list[DecisionRecord]):
                self._last_decision = decision.number
                self._decisions[decision.request_id] = decision
        if page is None and self._last_decision:
            self._last_decision = 0  # once restarted, the router counts from 1 again
            return []  # unless the next read fails too, decisions of the logged requests follow
        logged, self._logged = self._logged, []
        ended = [Entry(access, self._decisions.pop(access.request_id, None)) for access in logged]
        self.entries |= {entry.access.request_id: entry for entry in ended}
        return ended

    async def settle(self, request_ids: Collection[str]) -> list[Entry]:
        """Refresh until Envoy has logged the end of all these requests, but at most for 5 s; return
        those whose end is logged."""
        deadline = time.monotonic() + _LONGEST_SETTLE_S
        while True:
            await self.refresh()
            ended = [self.entries[name] for name in request_ids if name in self.entries]
            if len(ended) == len(request_ids) or time.monotonic() > deadline:
                return ended
            await asyncio.sleep(0.05)
