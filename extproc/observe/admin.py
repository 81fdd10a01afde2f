"""The HTTP server that people and Prometheus look at."""

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from extproc.config import AdminSettings
from extproc.ground.address import join_address, split_address
from extproc.ground.tls import server_context
from extproc.observe.token import Token

_STOP_S = 0.1
"""For answers that last when it stops; the page's has no end."""
_OPEN = AdminSettings()
"""To everybody who reaches the port."""
_DIGITS = 15
MAY_LOOK: web.AppKey[Callable[[web.Request], bool]] = web.AppKey("may_look")
"""Whether a request shows the token, where there is one; it may change while an answer lasts."""
Check = Callable[[], str]
"""Why something is not as it should be, in a few words; empty: it is."""


def _well() -> str:
    return ""


@asynccontextmanager
async def serve_admin(
    address: str,
    registry: CollectorRegistry,
    routes: Sequence[web.RouteDef] = (),
    public: Sequence[web.RouteDef] = (),
    access: AdminSettings = _OPEN,
    live: Check = _well,
    ready: Check = _well,
) -> AsyncIterator[str]:
    """Serve metrics, health and ``routes``; yields the address, for a port of 0 too.

    Args:
        address: ``host:port``.
        registry: what ``/metrics`` shows.
        routes: what is served beside.
        public: what is served to those without the token, too, as health is.
        access: TLS, and the token.
        live: what ``/livez`` and ``/healthz`` say: whoever is not is to be started again.
        ready: what ``/readyz`` says: whoever is not should get no work for now.

    Raises:
        OSError: the address is taken, or is not one of this machine.
        ValueError: it is not ``host:port``, or a file of ``access`` cannot be used.
    """

    async def metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    host, port = split_address(address)
    health = [web.get(path, _answering(live)) for path in ("/livez", "/healthz")]
    health.append(web.get("/readyz", _answering(ready)))
    context = server_context(access, "admin")
    app = web.Application()
    app[MAY_LOOK] = _showing_token(access)
    app.middlewares.append(_asking({route.path for route in (*health, *public)}))
    app.add_routes([web.get("/metrics", metrics), *health, *public, *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        bound_host, bound_port, *_ = runner.addresses[0]
        yield join_address(bound_host, bound_port)
    finally:
        await runner.cleanup()


def decision_number(request: web.Request, name: str) -> int:
    """The number of a decision, as a request's query has it under ``name``.

    Raises:
        HTTPBadRequest: it is none.
    """
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > _DIGITS:
        raise web.HTTPBadRequest(text=f"{name}={text[:_DIGITS]!r} is not a decision's number\n")
    return int(text)


def _showing_token(access: AdminSettings) -> Callable[[web.Request], bool]:
    if access.token_file is None:
        return lambda _: True
    token = Token(access.token_file)
    return lambda request: token.is_in(request.headers.get("Authorization", ""))


def _asking(open_to_all: Container[str]) -> Middleware:
    @web.middleware
    async def asking(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_to_all or request.app[MAY_LOOK](request):
            return await handler(request)
        raise web.HTTPUnauthorized(
            text="show the token (admin.token_file): Authorization: Bearer ...\n",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return asking


def _answering(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        why = check()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    return answer
