"""HTTP routes of the dashboard: its files, snapshots as server-sent events, and decisions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from aiohttp import web
from msgspec.json import encode

from extproc.observe.admin import AUTHORIZED, whole_number
from extproc.observe.dashboard.page_table import text_table
from extproc.observe.dashboard.snapshot import snapshot
from extproc.observe.decision import DecisionRecord
from extproc.observe.decision_log import ObservedPool
from extproc.observe.explain import compare

_FILES = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {  # the page loads nothing from other sites, is framed by none, runs no inline script
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PATIENCE_S = 5.0  # timeout of a write to a viewer that stopped reading
_MOST_VIEWERS = 100
EVERY_S = 1.0  # seconds between two snapshots
_EARLY_S = 0.01  # seconds by which a timer may fire too early


class Live:
    """Snapshots of a router's pools, made only while viewers are connected, and shared by all
    viewers."""

    def __init__(self, pools: Sequence[ObservedPool]) -> None:
        self._pools = pools
        self._clock = pools[0].clock
        self._making = asyncio.Lock()
        self._last = b""
        self._next_at = self._clock()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield each snapshot as JSON, without end; slow viewers miss some."""
        while True:
            async with self._making:
                if self._clock() >= self._next_at - _EARLY_S:
                    self._last = encode(await snapshot(self._pools))
                    self._next_at = self._clock() + EVERY_S
            yield self._last
            await asyncio.sleep(max(self._next_at - self._clock(), 0.0))


def page_routes() -> list[web.RouteDef]:
    """Return routes for the files of the page, which need no token because they hold no data."""
    assets = (*_FILES.glob("*.js"), *_FILES.glob("*.css"))
    files = {"/": _FILES / "index.html"} | {f"/dashboard/{file.name}": file for file in assets}
    texts = {path: file.read_text(encoding="utf-8") for path, file in files.items()}

    async def page(request: web.Request) -> web.Response:
        kind = _KINDS[files[request.path].suffix]
        return web.Response(text=texts[request.path], content_type=kind, headers=_HEADERS)

    return [web.get(path, page) for path in files]


def dashboard_routes(pools: Sequence[ObservedPool]) -> list[web.RouteDef]:
    """Return routes for the data of the page: snapshots of the pools, and single decisions."""
    live, log, viewers = Live(pools), pools[0].log, asyncio.Semaphore(_MOST_VIEWERS)

    async def events(request: web.Request) -> web.StreamResponse:
        if viewers.locked():
            text = f"{_MOST_VIEWERS} viewers are connected, the most that a router serves\n"
            raise web.HTTPServiceUnavailable(text=text)
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        async with viewers:
            await response.prepare(request)
            try:
                async for frame in live.frames():
                    if not request.app[AUTHORIZED](request):
                        break
                    async with asyncio.timeout(_PATIENCE_S):
                        await response.write(b"data: %s\n\n" % frame)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def decision(request: web.Request) -> web.Response:
        number = whole_number(request, "number")
        record = next(iter(log.after(number - 1, 1)), None)
        if record is None or record.number != number:
            raise web.HTTPNotFound(text="that decision is no longer kept (serve.decisions_kept)\n")
        # In a thread: a thousand candidates take long, and requests come first.
        body = await asyncio.to_thread(_compared, record.record())
        return web.Response(body=body, content_type="application/json", headers=_HEADERS)

    return [
        web.get("/dashboard/events", events, allow_head=False),
        web.get("/dashboard/decision", decision),
    ]


def _compared(record: DecisionRecord) -> bytes:
    compared = compare(record)
    units, keys = {"": "mark", "replica": "name"}, list(range(len(compared.candidates)))
    shown = {
        "facts": [*compared.facts.items()],
        "candidates": text_table("Candidates", keys, compared.cells, compared.candidates, units),
        "legend": compared.legend,
        "excluded": compared.excluded,
    }
    return encode(shown)
