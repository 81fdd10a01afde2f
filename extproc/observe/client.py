"""A client of admin addresses: the decisions and the live snapshots of routers."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from json import loads
from typing import Any

import aiohttp

from extproc.config import AdminSettings
from extproc.ground.tls import trusting
from extproc.observe.admin import read_token

_OPEN = AdminSettings()
_PATIENCE_S = 10.0
_MOST_BYTES = 2**24  # of one event: a thousand replicas take a quarter of a megabyte


class AskError(Exception):
    """The router did not answer as a router does; the message has the remedy."""


async def ask_decisions(
    router: str, request_id: str | None, most: int, access: AdminSettings = _OPEN
) -> list[Any]:
    """Get the newest decisions, ``most`` of them, or all about one request, the oldest first.

    Args:
        router: admin address: ``host:port``, or a URL.
        request_id: None for the newest.
        most: limits the newest.
        access: TLS of addresses without a scheme, and the token to show.

    Raises:
        AskError: the router does not answer.
        ValueError: a file of ``access`` cannot be used.
    """
    url = _url_of(router, access)
    async with _session(access) as session:
        if request_id is None:
            return await _last(session, url, most)
        return await _about(session, url, request_id)


async def follow(router: str, access: AdminSettings) -> AsyncGenerator[dict[str, Any]]:
    """Yield the snapshots of a router, as :mod:`extproc.observe.dashboard.snapshot` makes them.

    Raises:
        AskError: the router does not answer, or stopped.
        ValueError: a file of ``access`` cannot be used.
    """
    url = _url_of(router, access)
    async with (
        _session(access) as session,
        _answer(session, url, "/dashboard/events", "text/event-stream", endless=True) as events,
    ):
        try:
            while event := await events.content.readuntil(b"\n\n"):
                yield loads(event.removeprefix(b"data: "))
        finally:  # the answer has no end to read up to, and TLS would wait for the router's goodbye
            if events.connection and events.connection.transport:
                events.connection.transport.abort()
    raise AskError(f"the router at {url} has stopped")


async def _about(session: aiohttp.ClientSession, url: str, request_id: str) -> list[Any]:
    if found := await _get(session, url, request_id=request_id):
        return found
    raise AskError(
        f"the router at {url} keeps no decision about request {request_id!r}: it was not asked, "
        "had no replica to choose, or has dropped it since (serve.decisions_kept)"
    )


async def _last(session: aiohttp.ClientSession, url: str, most: int) -> list[Any]:
    newest = await _get(session, url)
    if len(newest) >= most or not newest:
        return newest[-most:]
    end = newest[-1]["number"]
    found: list[Any] = []
    after = max(end - most, 0)
    while after < end and (page := await _get(session, url, after=str(after))):
        found += page
        after = page[-1]["number"]
    return found[:most]


async def _get(session: aiohttp.ClientSession, url: str, **query: str) -> list[Any]:
    async with _answer(session, url, "/decisions", "application/json", query) as response:
        found = await response.json()
    records = found if isinstance(found, list) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("number"), int) for one in records):
        raise _no_router(url, "something else than decisions")
    return records


def _url_of(router: str, access: AdminSettings) -> str:
    scheme = "http" if access.tls_cert is None else "https"
    return (router if "://" in router else f"{scheme}://{router}").rstrip("/")


def _session(access: AdminSettings) -> aiohttp.ClientSession:
    headers = {}
    if access.token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(access.token_file)}"
    trusted = True if access.tls_cert is None else trusting(access.tls_cert)
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(ssl=trusted),
        read_bufsize=_MOST_BYTES,
    )


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    kind: str,
    query: Mapping[str, str] | None = None,
    endless: bool = False,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer, of content type ``kind``; errors within the block are translated, too."""
    total = None if endless else _PATIENCE_S
    timeout = aiohttp.ClientTimeout(total=total, connect=_PATIENCE_S, sock_read=_PATIENCE_S)
    try:
        async with session.get(f"{url}{path}", params=query, timeout=timeout) as response:
            if response.status == 401:
                raise AskError(f"the router at {url} asks for another token (admin.token_file)")
            if response.status != 200:
                raise _no_router(url, f"status {response.status}")
            if response.content_type != kind:
                raise _no_router(url, f"something else than {kind}")
            yield response
    except (aiohttp.ClientError, TimeoutError, ValueError):
        raise AskError(
            f"no router answers at {url}: is it running, and is that its serve.admin? "
            "Name another with --router"
        ) from None


def _no_router(url: str, seen: str) -> AskError:
    return AskError(f"{url} is not the admin address (serve.admin) of a router: it answers {seen}")
