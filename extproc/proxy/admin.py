"""Decisions and fleet of a router, as its admin address shows them."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web
from msgspec import json, structs

from extproc.observe.admin import Check, whole_number
from extproc.observe.dashboard.routes import dashboard_routes
from extproc.proxy.services import Services

_PAGE = 50  # decisions in a reply
_BEST = 20  # candidates of each decision in a list: a thousand would make it 20 MB


def admin_routes(*pools: Services) -> list[web.RouteDef]:
    """Routes of the admin address in addition to metrics and health."""
    log = pools[0].log  # all pools share it

    async def decisions(request: web.Request) -> web.StreamResponse:
        most: int | None = _BEST
        if "request_id" in request.query:
            records, most = log.of_request(request.query["request_id"]), None
        elif "after" in request.query:
            records = log.after(whole_number(request, "after"), _PAGE)
        else:
            records = log.last(whole_number(request, "last", _PAGE))
        return await _answer(request, _array(record.record(most) for record in records))

    async def fleet(request: web.Request) -> web.StreamResponse:
        return await _answer(request, _fleet(pools))

    return [
        web.get("/decisions", decisions, allow_head=False),
        web.get("/fleet", fleet, allow_head=False),
        *dashboard_routes(pools),
    ]


def readiness(pools: Sequence[Services], stopping: asyncio.Event) -> Check:
    """Check of the router's readiness: the router knows a replica of any pool, and is not stopping.

    A router that loses Redis stays ready.
    """

    def why_not() -> str:
        if stopping.is_set():
            return "stopping"
        return "" if any(pool.fleet.members for pool in pools) else "no replica is known yet"

    return why_not


def _fleet(pools: Iterable[Services]) -> Iterator[bytes]:
    yield b'{"in_flight":%d,"replicas":' % sum(pool.fleet.in_flight for pool in pools)
    yield from _array(
        structs.asdict(state)
        | {
            "in_flight": pool.fleet.in_flight_on(state.id),
            "pool": pool.config.pool,
            "known_blocks": pool.fleet.blocks.count(state.id),
        }
        for pool in pools
        for state in [*pool.fleet.members]  # a copy: replicas may leave meanwhile
    )
    yield b"}"


def _array(items: Iterable[object]) -> Iterator[bytes]:
    yield b"["
    for number, item in enumerate(items):
        yield (b"," if number else b"") + json.encode(item)
    yield b"]"


async def _answer(request: web.Request, pieces: Iterable[bytes]) -> web.StreamResponse:
    """Sends JSON piece by piece. A large fleet takes long to encode, and the event loop serves
    requests between two pieces."""
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    await response.write_eof()
    return response
