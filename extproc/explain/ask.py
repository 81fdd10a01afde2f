"""Asks a router's admin address for its decisions."""

from collections.abc import Mapping
from typing import Any

import aiohttp

_PATIENCE_S = 10.0


class AskError(Exception):
    """The router did not answer, or not as a router does; the message says what to do."""


class Asker:
    """Asks one router."""

    def __init__(self, router: str) -> None:
        """Takes the admin address: ``host:port`` or ``http://host:port``."""
        address = router if "://" in router else f"http://{router}"
        self.url = address.rstrip("/")

    async def of_request(self, request_id: str) -> list[Any]:
        """The decisions about one request, oldest first, as JSON.

        Raises:
            AskError: no router answered, or it keeps no decision of that request.
        """
        found = await self._get({"request_id": request_id})
        if not found:
            raise AskError(
                f"the router at {self.url} keeps no decision about request {request_id!r}: it was "
                "not asked, had no replica to choose, or has dropped it since "
                "(serve.decisions_kept)"
            )
        return found

    async def last(self, most: int) -> list[Any]:
        """The newest decisions, oldest first, as JSON; a router shows them page by page.

        Raises:
            AskError: no router answered.
        """
        newest = await self._get({})
        if len(newest) >= most or not newest:
            return newest[-most:]
        end = newest[-1]["number"]
        found: list[Any] = []
        after = max(end - most, 0)
        while after < end and (page := await self._get({"after": str(after)})):
            found += page
            after = page[-1]["number"]
        return found[:most]

    async def _get(self, query: Mapping[str, str]) -> list[Any]:
        patience = aiohttp.ClientTimeout(total=_PATIENCE_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=patience) as session,
                session.get(f"{self.url}/decisions", params=query) as response,
            ):
                if response.status != 200:
                    raise AskError(self._no_router(f"it answered with status {response.status}"))
                answer = await response.json()
        except aiohttp.ContentTypeError:
            raise AskError(self._no_router("it answered with something else than JSON")) from None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            raise AskError(
                f"no router answers at {self.url}: is it running, and is that its serve.admin? "
                "Name another with --router"
            ) from None
        if not isinstance(answer, list) or not all(map(_is_record, answer)):
            raise AskError(self._no_router("it answered with something else than decisions"))
        return answer

    def _no_router(self, seen: str) -> str:
        return f"{self.url} is not the admin address (serve.admin) of a router: {seen}"


def _is_record(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("number"), int)
