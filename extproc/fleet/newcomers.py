"""Slow start: replicas that joined others, and whose speed nobody has measured yet."""

import numpy as np

from extproc.fleet.state import ReplicaState
from extproc.fleet.view import FleetView

_AT_FIRST = 4
"""Requests a newcomer may have in flight: enough to be measured by, within seconds, and few enough
to bear it where it is ten times slower than its profile says."""


class Newcomers:
    """How much is sent to a replica of which only the profile is known, which may be far off.

    It looks idle, and maybe fast: so that it is not flooded, it has at most four requests in
    flight, and one more for each that ended there. Maybe it looks slow: so that it is tried at all,
    an idle one is taken to be no slower than the median replica. Its first measured stretch of
    work, a second or two, ends both. Replicas that join before any was measured are no newcomers:
    at the start of a pool all are alike, and somebody has to serve.
    """

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        """Newcomers, and the requests that ended there."""
        self._settled: set[str] = set()
        self._any_measured = False

    def __bool__(self) -> bool:
        return bool(self._ended)

    def heard(self, state: ReplicaState) -> None:
        """News of a replica came; it counts as joined when it is first healthy."""
        if state.measured:
            self._any_measured = True
            self._ended.pop(state.id, None)
            self._settled.add(state.id)
        elif state.healthy and state.id not in self._settled and self._any_measured:
            self._ended.setdefault(state.id, 0)
        elif state.healthy:
            self._settled.add(state.id)

    def ended(self, replica: str) -> None:
        """A request sent there is over."""
        if replica in self._ended:
            self._ended[replica] += 1

    def forget(self, replica: str) -> None:
        """It is no member any more."""
        self._ended.pop(replica, None)
        self._settled.discard(replica)

    def too_much(self, replica: str, requests: float) -> str | None:
        """Why it gets no more, having that many in flight; None where it may."""
        if replica not in self._ended or requests < (limit := _AT_FIRST + self._ended[replica]):
            return None
        return f"new, and its speed not measured yet: at most {limit} requests at a time"

    def favour_idle(self, view: FleetView) -> None:
        """Has those that are idle taken for no slower than the median of the candidates."""
        costs = view.costs
        columns = (view.decode_step, costs.c0, costs.c_prefill, costs.c_batch, costs.c_kv)
        idle = [row for row in (view.requests == 0).nonzero()[0] if view.ids[row] in self._ended]
        if idle:
            for column in (*columns, costs.c_att):
                column[idle] = np.minimum(column[idle], np.median(column))
