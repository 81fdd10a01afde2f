"""``list``: a pool's replicas as a table or as JSON."""

from collections.abc import Sequence
from typing import Any

from extproc.ground.text import Cells, Column, count, figure, printable, share, table_of
from extproc.predict.step import StepModel
from extproc.replicas.pool import Replica


def as_table(replicas: Sequence[Replica], now: float) -> str:
    """A line for each; step time and prefill speed only where they were learned from its work."""
    cells: Cells[Replica] = (
        (Column("name", left=True, most=24), lambda one: printable(one.name)),
        (Column("address", left=True), lambda one: one.id),
        (Column("state", left=True, most=40), lambda one: printable(condition(one))),
        (Column("running"), lambda one: count(getattr(one.state, "running", None))),
        (Column("waiting"), lambda one: count(getattr(one.state, "waiting", None))),
        (Column("KV"), lambda one: share(getattr(one.state, "kv_usage", None))),
        (Column("step ms"), lambda one: figure(_step_ms(one))),
        (Column("prefill tok/s"), lambda one: count(_prefill_per_s(one))),
        (Column("age s"), lambda one: figure(_age(one, now))),
    )
    return "\n".join(table_of(cells, replicas))


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


def _speed(replica: Replica) -> StepModel | None:
    return replica.state.learned if replica.state and replica.state.measured else None


def _step_ms(replica: Replica) -> float | None:
    return (speed.c0 + speed.c_batch) * 1e3 if (speed := _speed(replica)) else None


def _prefill_per_s(replica: Replica) -> float | None:
    return 1 / speed.c_prefill if (speed := _speed(replica)) and speed.c_prefill else None


def _age(replica: Replica, now: float) -> float | None:
    """Seconds since the last good scrape."""
    scraped_at = replica.state.scraped_at if replica.state else 0.0
    return max(now - scraped_at, 0.0) if scraped_at else None
