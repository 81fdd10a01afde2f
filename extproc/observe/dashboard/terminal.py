"""The page as plain text that fits a terminal: trouble first."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from extproc.ground.text import (
    Cells,
    Column,
    bar,
    count,
    figure,
    paragraph,
    printable,
    share,
    table_of,
)

_HELD: Cells[Mapping[str, Any]] = (
    (Column("priority"), lambda one: str(one["priority"])),
    (Column("tenant", left=True, most=24), lambda one: one["tenant"]),
    (Column("model", left=True, most=32), lambda one: one["model"]),
    (Column("requests"), lambda one: str(one["requests"])),
    (Column("longest s"), lambda one: figure(one["longest_s"])),
)
T = TypeVar("T")

_WORST_FIRST = ("down", "left out", "draining", "ok")
_INDENT = 2


def screen(news: Mapping[str, Any], width: int) -> list[str]:
    """Lines of at most ``width`` characters that show a snapshot of the dashboard."""
    return [printable(line)[:width] for line in _lines(news, width)]


def _lines(news: Mapping[str, Any], width: int) -> Iterator[str]:
    router, pools = news["router"], news["pools"]
    decided = sum(sum(pool["replicas"]["sent"]) for pool in pools)
    yield from paragraph(_figures(news, decided), 0, width=width)
    for text in dict.fromkeys(
        [*news["warnings"], *(one for pool in pools for one in pool["warnings"])]
    ):
        yield from paragraph(text, _INDENT, "!", width)
    for pool in pools:
        yield ""
        yield from paragraph(_of_pool(pool, router["polls"]), 0, width=width)
        yield from _replicas(pool["replicas"], decided, width)
        if pool["held"]:
            yield ""
            yield from _fitting(_HELD, pool["held"], width)
    if rows := news["decisions"]["rows"]:
        columns = enumerate(news["decisions"]["columns"])
        cells = [(Column(**one), partial(_figure, at)) for at, one in columns]
        yield ""
        yield from _fitting(cells, rows, width)


def _figures(news: Mapping[str, Any], decided: int) -> str:
    router, pools = news["router"], news["pools"]
    against = [why for pool in pools for why in pool["replicas"]["why_not"]]
    in_flight = sum(pool["in_flight"] for pool in pools)
    waiting = sum(pool["waiting"] for pool in pools)
    return (
        f"router {router['host']} {router['admin']}, policy {router['policy']}: "
        f"{against.count('')} of {len(against)} replicas in use, {in_flight} in flight, "
        f"{waiting} waiting here, {decided / news['decisions_s']:.1f} decisions/s"
    )


def _of_pool(pool: Mapping[str, Any], polls: bool) -> str:
    parts = [f"pool {pool['name']}"]
    if not polls:
        alive = "unknown" if pool["pollers"] is None else len(pool["pollers"])
        parts += [f"{pool['other_routers']} other routers", f"pollers: {alive}"]
    if pool["ended"]:
        p10, p50, p90 = (f"{pool['actual_to_predicted'][at]:.2f}" for at in ("p10", "p50", "p90"))
        parts.append(
            f"actual / predicted of the last {pool['ended']}: {p50}, eight of ten {p10} to {p90}"
        )
    return ", ".join(parts)


def _replicas(columns: Mapping[str, Sequence[Any]], decided: int, width: int) -> list[str]:
    """OutageLog on top: those that get nothing, then those with the longest backlog."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows.sort(
        key=lambda one: (_WORST_FIRST.index(_health(one)), -(one["backlog_s"] or 0.0), one["name"])
    )
    # The more important first: those that do not fit the width are left out.
    cells: Cells[Mapping[str, Any]] = (
        (Column("replica", left=True, most=24), lambda one: one["name"]),
        (Column("health", left=True), _health),
        (Column("running"), lambda one: count(one["running"])),
        (Column("waiting"), lambda one: count(one["waiting"])),
        (Column("KV"), lambda one: bar(one["kv_usage"])),
        (Column("backlog s"), lambda one: figure(one["backlog_s"])),
        (Column("x"), lambda one: figure(one["stretch"])),
        (Column("share"), lambda one: share(one["sent"] / decided if decided else 0.0)),
        (Column("news s"), lambda one: f"{one['news_age_s']:.1f}"),
        (Column("in tok/s"), lambda one: count(one["prefill_per_s"])),
        (Column("out tok/s"), lambda one: count(one["decode_per_s"])),
    )
    return _fitting(cells, rows, width)


def _figure(at: int, row: Mapping[str, Any]) -> str:
    return str(row["figures"][at])


def _health(one: Mapping[str, Any]) -> str:
    why = one["why_not"]
    if not why:
        return "ok"
    return "draining" if why == "draining" else "left out" if one["healthy"] else "down"


def _fitting(cells: Cells[T], items: Sequence[T], width: int) -> list[str]:
    """As many of the columns as fit, whole."""
    for many in range(len(cells), 1, -1):
        lines = table_of(cells[:many], items)
        if max(map(len, lines)) <= width:
            return lines
    return table_of(cells[:1], items)
