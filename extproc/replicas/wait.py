"""Waits until a replica that drains has nothing left."""

import asyncio

from extproc.ground.clock import Clock
from extproc.replica_state import ReplicaState
from extproc.replicas.pool import Pool, Replica, ReplicaError

_LOOK_EVERY = 0.1
"""Seconds; scrapes come every ``poll.interval_s``."""
_IN_A_ROW = 2
"""Scrapes that must find it empty: a request may have been on its way at the first."""


async def until_empty(pool: Pool, replica: Replica, seconds: float, clock: Clock) -> str:
    """Returns what to tell once nothing runs or waits on the replica, by its own metrics."""
    started = clock()
    empty: set[float] = set()
    while True:
        state = next(iter((await pool.states.read([replica.id])).states), None)
        if state is None and await _removed(pool, replica):
            return f"{replica.title} has left the pool"
        if state and state.draining and state.healthy and not state.running + state.waiting:
            empty.add(state.scraped_at)
        else:
            empty.clear()
        if len(empty) == _IN_A_ROW:
            return f"{replica.title} is empty after {clock() - started:.1f} s"
        if clock() - started >= seconds:
            raise ReplicaError(
                f"{replica.title} {_left(state)} after {seconds:g} s; it goes on draining"
            )
        await asyncio.sleep(_LOOK_EVERY)


async def _removed(pool: Pool, replica: Replica) -> bool:
    """Whether a command had it removed: else pollers or Redis are gone, and it may be busy."""
    desired = (await pool.desired.read()).get(replica.id)
    return desired is not None and desired.wish == "remove"


def left(state: ReplicaState) -> str:
    """What is still there."""
    return f"{state.running} running and {state.waiting} waiting"


def _left(state: ReplicaState | None) -> str:
    if state is None:
        return "is not polled, so that nobody knows what it has (does a poller run?),"
    if not state.healthy:
        return f"does not answer ({state.problem}); it was last seen with {left(state)}"
    if not state.draining:
        return "was not taken up by a poller (does one run?)"
    return f"has {left(state)}"
