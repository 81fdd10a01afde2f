"""HTTP server for people and Prometheus: metrics, health, and what a process adds."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hmac import compare_digest
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from extproc.config import AdminSettings
from extproc.ground.address import join_address, split_address
from extproc.ground.files import Watched, read_file
from extproc.ground.tls import server_context

_STOP_S = 0.1  # for answers that are not over at the stop: the dashboard's events never are
_OPEN = AdminSettings()  # no TLS, no token
_DIGITS = 15
MAY_LOOK: web.AppKey[Callable[[web.Request], bool]] = web.AppKey("may_look")
"""Checks a request's token, if one is configured; the token may change while an answer lasts."""
Check = Callable[[], str]  # returns a problem in a few words, or nothing


@asynccontextmanager
async def serve_admin(
    address: str,
    registry: CollectorRegistry,
    routes: Sequence[web.RouteDef] = (),
    public: Sequence[web.RouteDef] = (),
    access: AdminSettings = _OPEN,
    live: Check = str,  # no problem: "" is what str() returns
    ready: Check = str,
    setting: str = "serve.admin",
) -> AsyncIterator[str]:
    """Serve metrics, health and ``routes``; yields the address, which matters for port 0.

    Args:
        address: ``host:port``.
        registry: shown by ``/metrics``.
        routes: further routes behind the token.
        public: further routes without the token, like health.
        access: TLS, and the token.
        live: for ``/livez`` and ``/healthz``: a process with a problem should be restarted.
        ready: for ``/readyz``: a process with a problem should get no work for now.
        setting: key of the address in the configuration.

    Raises:
        OSError: the address is taken, or is not one of this machine; names the setting.
        ValueError: not ``host:port``, or a file of ``access`` cannot be used.
    """
    health = {"/livez": live, "/healthz": live, "/readyz": ready}
    open_to_all = {*health, *(route.path for route in public)}

    async def metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def answer(request: web.Request) -> web.Response:
        why = health[request.path]()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_to_all or app[MAY_LOOK](request):
            return await handler(request)
        raise web.HTTPUnauthorized(
            text="show the token (admin.token_file): Authorization: Bearer ...\n",
            headers={"WWW-Authenticate": "Bearer"},
        )

    host, port = split_address(address)
    context = server_context(access, "admin")
    app = web.Application(middlewares=[guard])
    app[MAY_LOOK] = _token_check(access)
    app.add_routes([web.get(path, answer) for path in health])
    app.add_routes([web.get("/metrics", metrics), *public, *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError as error:
            raise OSError(f"cannot listen on {address} ({setting}): {error.strerror}") from None
        bound_host, bound_port, *_ = runner.addresses[0]
        yield join_address(bound_host, bound_port)
    finally:
        await runner.cleanup()


def decision_number(request: web.Request, name: str) -> int:
    """Read a decision's number from the query parameter ``name``.

    Raises:
        HTTPBadRequest: not a number.
    """
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > _DIGITS:
        raise web.HTTPBadRequest(text=f"{name}={text[:_DIGITS]!r} is not a decision's number\n")
    return int(text)


def read_token(path: Path) -> str:
    """Read the token that clients have to show.

    Raises:
        ValueError: the file holds none, or cannot be read.
    """
    token = read_file("admin.token_file", path).decode().strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"admin.token_file: {path} holds no token: one line of ASCII")
    return token


def _token_check(access: AdminSettings) -> Callable[[web.Request], bool]:
    if access.token_file is None:
        return lambda _: True
    file = Watched("admin token", partial(read_token, access.token_file), access.token_file)
    token = file.read()

    def shows_token(request: web.Request) -> bool:
        nonlocal token
        token = file.news() or token
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        right = compare_digest(shown.encode(errors="surrogateescape"), token.encode())
        return right and scheme.lower() == "bearer"

    return shows_token
