"""HTTP handlers of the admin address that return a router's decisions and fleet as JSON."""

import asyncio
from collections.abc import Iterable, Iterator

from aiohttp import web
from msgspec import json, structs

from extproc.observe.admin import whole_number
from extproc.observe.dashboard.routes import dashboard_routes
from extproc.observe.decision import FORMAT
from extproc.proxy.headers import LONGEST_ID
from extproc.proxy.services import Services

_PAGE = 50  # decisions in a reply
_BEST = 20  # candidates of each decision in a reply: with a thousand, a reply would have 20 MB


def admin_routes(*pools: Services) -> list[web.RouteDef]:
    """Returns the routes that a router adds to its admin server: decisions, fleet, dashboard."""
    log = pools[0].log  # all pools share it

    async def decisions(request: web.Request) -> web.Response:
        most: int | None = _BEST
        if "request_id" in request.query:
            records, most = log.of_request(request.query["request_id"][:LONGEST_ID]), None
        elif "after" in request.query:
            records = log.after(whole_number(request, "after"), _PAGE)
        else:
            records = log.last(whole_number(request, "last", _PAGE))
        return _json(await _array(record.record(most) for record in records))

    async def fleet(_: web.Request) -> web.Response:
        in_flight = sum(pool.fleet.in_flight for pool in pools)
        replicas = await _array(_states(pools))
        return _json(b'{"version":%d,"in_flight":%d,"replicas":%s}' % (FORMAT, in_flight, replicas))

    return [
        web.get("/decisions", decisions, allow_head=False),
        web.get("/fleet", fleet, allow_head=False),
        *dashboard_routes(pools),
    ]


def _states(pools: Iterable[Services]) -> Iterator[dict[str, object]]:
    for pool in pools:
        for state in [*pool.fleet.members]:  # a copy: replicas may leave meanwhile
            yield structs.asdict(state) | {
                "in_flight": pool.fleet.in_flight_on(state.id),
                "pool": pool.config.pool,
                "known_blocks": pool.fleet.blocks.count(state.id),
            }


async def _array(items: Iterable[object]) -> bytes:
    """Encodes the items as a JSON array. Lets other tasks run after each item, because a large
    fleet takes long to encode."""
    encoded = []
    for item in items:
        encoded.append(json.encode(item))
        await asyncio.sleep(0)
    return b"[%s]" % b",".join(encoded)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")
