"""``list``: a pool's replicas as a table or as JSON."""

from collections.abc import Sequence
from typing import Any

from extproc.layout import Column, count, figure, printable, share, table
from extproc.replicas.pool import Replica

_COLUMNS = (
    Column("name", left=True, most=24),
    Column("address", left=True),
    Column("state", left=True, most=40),
    Column("running"),
    Column("waiting"),
    Column("KV"),
    Column("step ms"),
    Column("prefill tok/s"),
    Column("age s"),
)


def as_table(replicas: Sequence[Replica], now: float) -> str:
    """A line for each; step time and prefill speed only where they were learned from its work."""
    return "\n".join(table(_COLUMNS, [_row(replica, now) for replica in replicas]))


def as_json(replica: Replica, now: float) -> dict[str, Any]:
    """Everything that is known of one."""
    seen = replica.state.model_dump() if replica.state else {"name": replica.name}
    more = {"id": replica.id, "state": condition(replica), "wish": replica.wish}
    added = replica.desired is not None and replica.desired.source is not None
    return more | {"added_by_command": added, "age_s": _age(replica, now)} | seen


def condition(replica: Replica) -> str:
    """One word or the problem: whether it gets requests, and why not."""
    state = replica.state
    if state is None:
        return "removed" if replica.wish == "remove" else "not polled yet"
    if replica.wish == "remove":
        return "leaving"
    health = "" if state.healthy else state.problem or "not healthy"
    draining = "draining" if state.draining else ""
    return ", ".join(filter(None, (draining, health))) or "healthy"


def _row(replica: Replica, now: float) -> list[str]:
    state = replica.state
    what = [printable(replica.name), replica.id, printable(condition(replica))]
    if state is None:
        return [*what, *["-"] * 6]
    speed = state.learned if state.measured else None
    return [
        *what,
        count(state.running),
        count(state.waiting),
        share(state.kv_usage),
        figure((speed.c0 + speed.c_batch) * 1e3 if speed else None),
        count(1 / speed.c_prefill if speed and speed.c_prefill else None),
        figure(_age(replica, now)),
    ]


def _age(replica: Replica, now: float) -> float | None:
    """Seconds since the last good scrape."""
    scraped_at = replica.state.scraped_at if replica.state else 0.0
    return max(now - scraped_at, 0.0) if scraped_at else None
