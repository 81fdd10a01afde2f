"""Asks the admin addresses of a router's workers for their decisions."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from extproc.config import AdminSettings
from extproc.observe.token import authorization, read_token
from extproc.tls.certificates import trusting

_OPEN = AdminSettings()
_PATIENCE = aiohttp.ClientTimeout(total=10.0)


class AskError(Exception):
    """No router answered, or not as a router does; a line for each says what to do."""


async def ask(
    routers: Sequence[str],
    request_id: str | None,
    most: int,
    access: AdminSettings = _OPEN,
) -> list[Any]:
    """The newest decisions, or all about one request, as JSON, oldest first.

    Args:
        routers: admin address of each worker: ``host:port`` or ``http://host:port``.
        request_id: whose decisions; None: those of all.
        most: of all, at most so many.
        access: TLS of those whose address names no scheme, and the token to show.

    Raises:
        ValueError: a file of ``access`` cannot be used.
        AskError: none of them answered, or none keeps a decision of that request.
    """
    scheme = "http" if access.tls_cert is None else "https"
    urls = [(one if "://" in one else f"{scheme}://{one}").rstrip("/") for one in routers]
    headers = {}
    if access.token_file is not None:
        headers["Authorization"] = authorization(read_token(access.token_file))
    trusted = True if access.tls_cert is None else trusting(access.tls_cert)
    connector = aiohttp.TCPConnector(ssl=trusted)
    async with aiohttp.ClientSession(
        timeout=_PATIENCE, headers=headers, connector=connector
    ) as session:
        asking = (
            _last(session, url, most) if request_id is None else _about(session, url, request_id)
            for url in urls
        )
        answers = await asyncio.gather(*asking, return_exceptions=True)
    errors = [one for one in answers if isinstance(one, BaseException)]
    for error in errors:
        if not isinstance(error, AskError):
            raise error
    if len(errors) == len(answers):
        raise AskError("\n".join(map(str, errors)))
    found = [record for one in answers if isinstance(one, list) for record in one]
    if len(urls) > 1:  # the numbers of one worker say nothing of another's
        found.sort(key=lambda record: record.get("decided_at", 0.0))
    return found if request_id is not None else found[-most:]


async def _about(session: aiohttp.ClientSession, url: str, request_id: str) -> list[Any]:
    if found := await _get(session, url, request_id=request_id):
        return found
    raise AskError(
        f"the router at {url} keeps no decision about request {request_id!r}: it was not asked, "
        "had no replica to choose, or has dropped it since (serve.decisions_kept)"
    )


async def _last(session: aiohttp.ClientSession, url: str, most: int) -> list[Any]:
    """The newest decisions; a router shows them page by page."""
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
    try:
        async with session.get(f"{url}/decisions", params=query) as response:
            if response.status == 401:
                raise AskError(f"the router at {url} asks for another token (admin.token_file)")
            if response.status != 200:
                raise _no_router(url, f"status {response.status}")
            answer = await response.json()
    except aiohttp.ContentTypeError:
        raise _no_router(url, "something else than JSON") from None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        raise AskError(
            f"no router answers at {url}: is it running, and is that its serve.admin? "
            "Name another with --router"
        ) from None
    if not isinstance(answer, list) or not all(map(_is_record, answer)):
        raise _no_router(url, "something else than decisions")
    return answer


def _no_router(url: str, seen: str) -> AskError:
    return AskError(f"{url} is not the admin address (serve.admin) of a router: it answers {seen}")


def _is_record(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("number"), int)
