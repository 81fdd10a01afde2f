"""HTTP requests to one replica: bounded in time and in bytes, whatever it answers."""

import asyncio
import os

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from extproc.poll.metrics_text import EngineFigures, MetricsError, read_metrics

MAX_BYTES = 4 * 2**20
"""Largest answer that is read; a vLLM's ``/metrics`` page has 60 kB per engine or two."""

_LONGEST_REASON = 200


class ScrapeError(Exception):
    """A replica that is dead, hung, or answers what no healthy vLLM would; the text says which."""


class Model(BaseModel):
    """One entry of ``/v1/models``: the model itself, or a LoRA adapter."""

    model_config = ConfigDict(extra="ignore")

    id: str
    max_model_len: int | None = None


class ModelList(BaseModel):
    """What ``/v1/models`` answers."""

    model_config = ConfigDict(extra="ignore")

    data: tuple[Model, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names a request may ask for."""
        return tuple(model.id for model in self.data)

    @property
    def max_model_len(self) -> int | None:
        """Context length in tokens; adapters have their model's."""
        return next((model.max_model_len for model in self.data if model.max_model_len), None)


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """Return a session that keeps connections to replicas open; close it after use."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        # A replica's processor has better things to do than to compress for a neighbour.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


async def scrape(session: aiohttp.ClientSession, replica: str) -> EngineFigures:
    """Ask the replica at ``ip:port`` for its health and its metrics, at the same time.

    Raises:
        ScrapeError: either failed.
    """
    requests = [asyncio.create_task(_get(session, replica, path)) for path in _SCRAPED]
    try:
        _, page = await asyncio.gather(*requests)
        return read_metrics(page)
    except MetricsError as error:
        raise ScrapeError(str(error)) from None
    finally:
        for request in requests:
            request.cancel()


async def read_models(session: aiohttp.ClientSession, replica: str) -> ModelList:
    """Ask the replica at ``ip:port`` which models it serves.

    Raises:
        ScrapeError: it does not say.
    """
    body = await _get(session, replica, "/v1/models")
    try:
        return ModelList.model_validate_json(body)
    except ValidationError:
        raise ScrapeError("/v1/models is not a list of models") from None


_SCRAPED = ("/health", "/metrics")


async def _get(session: aiohttp.ClientSession, replica: str, path: str) -> bytes:
    try:
        async with session.get(f"http://{replica}{path}", allow_redirects=False) as response:
            if response.status != 200:
                raise ScrapeError(f"{path} answered {response.status}")
            return await _read(response, path)
    except TimeoutError:
        raise ScrapeError(f"{path} did not answer in {session.timeout.total:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise ScrapeError(f"cannot connect: {_reason(error.os_error)}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeError(f"{path} failed: {_reason(error)}") from None


async def _read(response: aiohttp.ClientResponse, path: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ScrapeError(f"{path} is larger than {MAX_BYTES // 2**20} MiB")
    return bytes(body)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
