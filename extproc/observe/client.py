"""HTTP client of a router's admin address: fetches decisions and live snapshots.

``router`` is ``host:port`` or a URL. ``access`` has the token to send, and the certificate to
trust; with a certificate, addresses without a scheme are https.

Functions here raise :class:`RouterUnavailableError` if the router does not answer or has
stopped, and ValueError if the token or certificate of ``access`` cannot be read.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from json import loads
from typing import Any
from urllib.parse import urlencode

import aiohttp
from msgspec.json import decode

from extproc.config import AdminSettings
from extproc.ground.files import read_certificates
from extproc.ground.tls import trusting
from extproc.observe.admin import read_token
from extproc.observe.decision import DecisionRecord

_TIMEOUT_S = 10.0  # to connect, and between two parts of a response
_WHOLE_S = 30.0  # for a whole response; longer, so that a hung router counts as silent
_EVENTS = "text/event-stream"
_MOST_BYTES = 2**24  # limit of an event; the snapshot of 1,000 replicas takes 0.25 MB


class RouterUnavailableError(Exception):
    """The router gives no answer; the message names the remedy."""


def url_of(router: str, access: AdminSettings) -> str:
    """Return the URL of an admin address; a URL stays as it is."""
    scheme = "http" if access.tls_cert is None else "https"
    return (router if "://" in router else f"{scheme}://{router}").rstrip("/")


async def fetch_decisions(
    router: str, request_id: str | None, most: int, access: AdminSettings
) -> list[DecisionRecord]:
    """Get the newest ``most`` decisions or, if ``request_id`` is given, all decisions about that
    request; oldest first. The list may be empty."""
    query = urlencode({"last": most} if request_id is None else {"request_id": request_id})
    page = await fetch_page(router, f"/decisions?{query}", access)
    try:
        return decode(page, type=list[DecisionRecord])
    except ValueError as error:
        raise RouterUnavailableError(
            f"{url_of(router, access)} answers no list of decisions ({error}): check that this is "
            "the serve.admin of a router; if the router has another version, run the 'extproc "
            "explain' of that version"
        ) from None


async def fetch_page(router: str, path: str, access: AdminSettings) -> bytes:
    """Get a page of a router's admin address; ``path``: with the query."""
    async with _get(url_of(router, access), path, access) as response:
        return await response.read()


async def follow(router: str, access: AdminSettings) -> AsyncGenerator[dict[str, Any]]:
    """Yield live snapshots, as :mod:`extproc.observe.dashboard.snapshot` describes them."""
    url = url_of(router, access)
    async with _get(url, "/dashboard/events", access, endless=True) as events:
        try:
            while event := await events.content.readuntil(b"\n\n"):
                yield loads(event.removeprefix(b"data: "))
        finally:  # abort: the response never ends, and a TLS shutdown would wait for the router
            if events.connection and events.connection.transport:
                events.connection.transport.abort()
    raise RouterUnavailableError(f"the router at {url} has stopped")


@asynccontextmanager
async def _get(
    url: str, path: str, access: AdminSettings, endless: bool = False
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Open a response; ``endless``: a response of events, which never ends."""
    token = access.token_file and read_token(access.token_file)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    cert = access.tls_cert
    trusted = trusting(read_certificates("admin.tls_cert", cert)) if cert else True
    whole_s = None if endless else _WHOLE_S
    timeout = aiohttp.ClientTimeout(whole_s, connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(read_bufsize=_MOST_BYTES, timeout=timeout) as session,
            session.get(f"{url}{path}", headers=headers, ssl=trusted) as response,
        ):
            if response.status == 401:
                raise RouterUnavailableError(
                    f"the router at {url} needs another token (admin.token_file)"
                )
            if response.status != 200:
                raise _no_router(url, f"status {response.status}")
            if endless and response.content_type != _EVENTS:
                raise _no_router(url, f"{response.content_type} instead of {_EVENTS}")
            yield response
    except aiohttp.SocketTimeoutError:
        raise RouterUnavailableError(
            f"the router at {url} accepts connections, but does not answer; if its /livez does not "
            "answer, either, restart the router: it hangs"
        ) from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        if isinstance(error, aiohttp.ClientResponseError) and error.status == 400:  # not parsed
            raise _no_router(url, "no HTTP/1.1, like the gRPC of serve.listen") from None
        raise RouterUnavailableError(
            f"no router answers at {url}: {_reason(error)}: check that a router runs and that this "
            "is its serve.admin, or name another address with --router"
        ) from None


def _no_router(url: str, answer: str) -> RouterUnavailableError:
    return RouterUnavailableError(
        f"{url} is not the admin address (serve.admin) of a router: it answers {answer}"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ServerTimeoutError):
        return f"no answer within {_TIMEOUT_S:g} s"
    if isinstance(error, TimeoutError):
        return f"no whole answer within {_WHOLE_S:g} s"
    # Subclasses, for errors of DNS and TLS, have error numbers of other kinds.
    if type(error) is aiohttp.ClientConnectorError and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    if isinstance(error, aiohttp.TooManyRedirects):
        return "too many redirects"
    if isinstance(error, aiohttp.InvalidURL):
        return "this is no URL"
    return str(error) or type(error).__name__
