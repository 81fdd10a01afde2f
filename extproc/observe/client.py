"""Asks admin addresses, with the token and the trust that the configuration names."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from extproc.config import AdminSettings
from extproc.ground.tls import trusting
from extproc.observe.token import read_token

_PATIENCE_S = 10.0
_MOST_BYTES = 2**24
"""Of one event: a thousand replicas take a quarter of a megabyte."""


class AskError(Exception):
    """No router answered, or not as a router does; a line for each says what to do."""


def url_of(router: str, access: AdminSettings) -> str:
    """The URL of an admin address: ``host:port``, of which ``access`` tells the scheme, or one."""
    scheme = "http" if access.tls_cert is None else "https"
    return (router if "://" in router else f"{scheme}://{router}").rstrip("/")


def open_session(access: AdminSettings) -> aiohttp.ClientSession:
    """A session for admin addresses; close it after use.

    Raises:
        ValueError: a file of ``access`` cannot be used.
    """
    headers = {}
    if access.token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(access.token_file)}"
    trusted = True if access.tls_cert is None else trusting(access.tls_cert)
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_PATIENCE_S),
        headers=headers,
        connector=aiohttp.TCPConnector(ssl=trusted),
        read_bufsize=_MOST_BYTES,
    )


@asynccontextmanager
async def answer(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    kind: str,
    query: Mapping[str, str] | None = None,
    endless: bool = False,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """What a router answers, of that content type; ``endless``: it need only go on.

    Raises:
        AskError: nothing, or something else; or it stopped within the block.
    """
    total = None if endless else _PATIENCE_S
    timeout = aiohttp.ClientTimeout(total=total, connect=_PATIENCE_S, sock_read=_PATIENCE_S)
    try:
        async with session.get(f"{url}{path}", params=query, timeout=timeout) as response:
            if response.status == 401:
                raise AskError(f"the router at {url} asks for another token (admin.token_file)")
            if response.status != 200:
                raise no_router(url, f"status {response.status}")
            if response.content_type != kind:
                raise no_router(url, f"something else than {kind}")
            yield response
    except (aiohttp.ClientError, TimeoutError, ValueError):
        raise AskError(
            f"no router answers at {url}: is it running, and is that its serve.admin? "
            "Name another with --router"
        ) from None


def no_router(url: str, seen: str) -> AskError:
    """Something else is there."""
    return AskError(f"{url} is not the admin address (serve.admin) of a router: it answers {seen}")
