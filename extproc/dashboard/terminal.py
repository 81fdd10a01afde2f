"""The page as plain text that fits a terminal: trouble first."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from extproc.layout import Column, bar, count, figure, paragraph, printable, share, table

_REPLICAS = (
    Column("replica", left=True, most=24),
    Column("health", left=True),
    Column("running"),
    Column("waiting"),
    Column("KV"),
    Column("backlog s"),
    Column("x"),
    Column("share"),
    Column("news s"),
    Column("in tok/s"),
    Column("out tok/s"),
)
"""The more important first: those that do not fit the width are left out."""
_HELD = (
    Column("priority"),
    Column("tenant", left=True, most=24),
    Column("model", left=True, most=32),
    Column("requests"),
    Column("longest s"),
)
_WORST_FIRST = ("down", "left out", "draining", "ok")
_INDENT = 2


def screen(news: Mapping[str, Any], width: int) -> list[str]:
    """A :func:`~extproc.dashboard.snapshot.snapshot` in lines of at most ``width`` characters."""
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
        yield from _fitting(_REPLICAS, _replicas(pool["replicas"], decided), width)
        if pool["held"]:
            yield ""
            yield from _fitting(_HELD, [_held(one) for one in pool["held"]], width)
    if rows := news["decisions"]["rows"]:
        columns = [Column(**one) for one in news["decisions"]["columns"]]
        yield ""
        yield from _fitting(columns, [row["figures"] for row in rows], width)


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


def _replicas(columns: Mapping[str, Sequence[Any]], decided: int) -> list[list[str]]:
    """Trouble on top: those that get nothing, then those with the longest backlog."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows.sort(
        key=lambda one: (_WORST_FIRST.index(_health(one)), -(one["backlog_s"] or 0.0), one["name"])
    )
    return [
        [
            one["name"],
            _health(one),
            count(one["running"]),
            count(one["waiting"]),
            bar(one["kv_usage"]),
            figure(one["backlog_s"]),
            figure(one["stretch"]),
            share(one["sent"] / decided if decided else 0.0),
            f"{one['news_age_s']:.1f}",
            count(one["prefill_per_s"]),
            count(one["decode_per_s"]),
        ]
        for one in rows
    ]  # fmt: skip


def _health(one: Mapping[str, Any]) -> str:
    why = one["why_not"]
    if not why:
        return "ok"
    return "draining" if why == "draining" else "left out" if one["healthy"] else "down"


def _held(one: Mapping[str, Any]) -> list[str]:
    longest = figure(one["longest_s"])
    return [str(one["priority"]), one["tenant"], one["model"], str(one["requests"]), longest]


def _fitting(columns: Sequence[Column], rows: list[list[str]], width: int) -> list[str]:
    """As many of the columns as fit, whole."""
    for many in range(len(columns), 1, -1):
        lines = table(columns[:many], [row[:many] for row in rows])
        if max(map(len, lines)) <= width:
            return lines
    return table(columns[:1], [row[:1] for row in rows])
