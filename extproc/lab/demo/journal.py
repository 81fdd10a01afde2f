"""Journal of the demo: for each request the router's decision and Envoy's access log entry."""

import asyncio
import time
from dataclasses import dataclass

from msgspec import convert

from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.pages import get_json
from extproc.lab.harness.stack import Stack
from extproc.observe.decision import DecisionRecord

_MOST_ENTRIES = 100_000
_LONGEST_SETTLE_S = 5.0


@dataclass(slots=True)
class Entry:
    """A request, with its decision and its outcome as far as they are known."""

    request_id: str
    decision: DecisionRecord | None = None
    access: Access | None = None

    @property
    def routed(self) -> bool:
        """True if the router's first or second choice served the request."""
        decision, access = self.decision, self.access
        return bool(decision and access and access.upstream in (decision.replica, decision.second))

    @property
    def fallback(self) -> bool:
        """True if Envoy chose the replica without a decision of the router."""
        return not self.decision and bool(self.access and self.access.upstream)

    @property
    def why(self) -> str:
        """Clause that says why the request failed, or why it took its route."""
        if self.access is not None and self.access.status != 200:
            return f"status {self.access.status}" if self.access.status else "the client left"
        if self.decision is None:
            return "no decision: Envoy's fallback"
        return self.decision.why.partition(";")[0]


class Journal:
    """Requests of a running stack, from its router's decisions and Envoy's access log."""

    def __init__(self, stack: Stack) -> None:
        self.entries: dict[str, Entry] = {}  # by request id, in the order of discovery
        self._admin = stack.router_admin
        self._log = AccessLog(stack.access_log)
        self._last_decision = 0
        self._ended: list[Access] = []  # log entries not yet in `entries`

    async def refresh(self) -> list[Entry]:
        """Read new decisions and log entries; return the requests whose end is newly logged."""
        self._ended += self._log.new()  # log before decisions: a logged request has been decided
        while page := await get_json(f"{self._admin}/decisions?after={self._last_decision}"):
            for decision in convert(page, list[DecisionRecord]):
                self._last_decision = decision.number
                self._entry(decision.request_id).decision = decision
        if page is None:
            self._last_decision = 0  # router down: once restarted, it counts from 1 again
        ended, self._ended = self._ended, []
        return [self._end(access) for access in ended]

    async def settle(self, request_ids: set[str]) -> None:
        """Refresh until Envoy has logged the end of all these requests, but at most for 5 s."""
        deadline = time.monotonic() + _LONGEST_SETTLE_S
        while time.monotonic() < deadline:
            await self.refresh()
            ended = {name for name, entry in self.entries.items() if entry.access}
            if request_ids <= ended:
                return
            await asyncio.sleep(0.05)

    def _end(self, access: Access) -> Entry:
        entry = self._entry(access.request_id)
        entry.access = access
        return entry

    def _entry(self, request_id: str) -> Entry:
        entry = self.entries.setdefault(request_id, Entry(request_id))
        if len(self.entries) > _MOST_ENTRIES:
            del self.entries[next(iter(self.entries))]
        return entry
