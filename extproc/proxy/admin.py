"""What a router's admin address shows of its decisions and its fleet."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web
from msgspec import json, structs

from extproc.observe.admin import Check, decision_number
from extproc.observe.dashboard.routes import dashboard_routes
from extproc.proxy.services import Services

_PAGE = 50  # decisions in one reply
_BEST = 20  # candidates shown of each of several decisions: those of a thousand take 20 MB a page


def admin_routes(*pools: Services) -> list[web.RouteDef]:
    """What the admin address serves beside metrics and health."""
    log = pools[0].log  # decisions of all pools are in one log

    async def decisions(request: web.Request) -> web.StreamResponse:
        most: int | None = _BEST
        if "request_id" in request.query:
            records, most = log.of_request(request.query["request_id"]), None
        elif "after" in request.query:
            records = log.after(decision_number(request, "after"), _PAGE)
        else:
            records = log.last(_PAGE)
        return await _answer(request, _array(record.record(most) for record in records))

    async def fleet(request: web.Request) -> web.StreamResponse:
        return await _answer(request, _fleet(pools))

    return [
        web.get("/decisions", decisions, allow_head=False),
        web.get("/fleet", fleet, allow_head=False),
        *dashboard_routes(pools),
    ]


def readiness(pools: Sequence[Services], stopping: asyncio.Event) -> Check:
    """Whether a router can choose replicas: it knows some, and is not about to end.

    One that has lost Redis still can. So can one that knows only those of one pool: an empty pool
    is to take no router from the others.
    """

    def why_not() -> str:
        if stopping.is_set():
            return "stopping"
        return "" if any(one.fleet.members for one in pools) else "no replica is known yet"

    return why_not


def _fleet(pools: Iterable[Services]) -> Iterator[bytes]:
    yield b'{"in_flight":%d,"replicas":' % sum(one.fleet.in_flight for one in pools)
    yield from _array(
        structs.asdict(state)
        | {
            "in_flight": one.fleet.in_flight_on(state.id),
            "pool": one.config.pool,
            "known_blocks": one.fleet.blocks.count(state.id),
        }
        for one in pools
        for state in [*one.fleet.members]  # some may leave meanwhile
    )
    yield b"}"


def _array(items: Iterable[object]) -> Iterator[bytes]:
    yield b"["
    for number, item in enumerate(items):
        yield (b"," if number else b"") + json.encode(item)
    yield b"]"


async def _answer(request: web.Request, pieces: Iterable[bytes]) -> web.StreamResponse:
    """JSON, sent as it is made: a large fleet's takes long, and requests come first."""
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    await response.write_eof()
    return response
