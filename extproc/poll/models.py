"""Models, LoRA adapters and version of one replica, from ``/v1/models`` and ``/version``."""

import asyncio
import logging
import re
from collections.abc import Callable
from math import inf
from typing import Any

import aiohttp
from pydantic import BaseModel, Field, ValidationError

from extproc.ground.outage_log import OutageLog
from extproc.poll.discovery import Target
from extproc.poll.metrics_text import ScrapeError
from extproc.poll.scrape import get

log = logging.getLogger(__name__)

MODELS_EVERY_S = 10.0  # between two requests for `/v1/models`: LoRA adapters may be loaded
_LONGEST_CONTEXT = 2**40  # tokens, far above real contexts
_VERSION = re.compile(rb'"version"\s*:\s*"(\d{1,9})\.(\d{1,9})')
_TAKES_PRIORITY = 0, 11  # first version of vLLM that accepts ``priority``


class Models:
    """Reads the models of one replica in a separate task, so that a slow answer delays no scrape.

    ``listed`` is called with fields of a ``ReplicaState`` after each read.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        listed: Callable[[dict[str, Any]], None],
    ) -> None:
        self._session = session
        self._replica = target.id
        self._listed = listed
        self._outage = OutageLog(
            log,
            "replica does not list its models: using the model names in its metrics",
            "replica lists its models again",
            replica=target.title,
        )
        self._reading: asyncio.Task[None] | None = None
        self._read_at = -inf

    def refresh(self, now: float) -> None:
        """Starts to read the models, at most once in ``MODELS_EVERY_S``."""
        if now - self._read_at >= MODELS_EVERY_S:
            self._read_at = now
            self._reading = asyncio.create_task(self._refresh())

    def restart(self) -> None:
        """Cancels a request, which may concern an ended process; the next refresh reads at once."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading, self._read_at = None, -inf

    async def _refresh(self) -> None:
        # An API key guards only the list of models.
        fields = {"takes_priority": await takes_priority(self._session, self._replica)}
        try:
            fields |= await read_models(self._session, self._replica)
        except ScrapeError as error:
            self._outage.failed(error)
        else:
            self._outage.recovered()
        self._listed(fields)


class _Model(BaseModel):
    """An entry of ``/v1/models``: the model itself, or a LoRA adapter."""

    id: str
    parent: str | None = None  # the model of an adapter
    max_model_len: int | None = Field(default=None, gt=0, le=_LONGEST_CONTEXT)


class _ModelList(BaseModel):
    data: tuple[_Model, ...]


async def read_models(session: aiohttp.ClientSession, replica: str) -> dict[str, Any]:
    """Requests the models of the replica at ``ip:port``; returns fields of its state, none if the
    replica lists no model. Raises ScrapeError if the replica does not list its models."""
    body = await get(session, replica, "/v1/models")
    try:
        models = _ModelList.model_validate_json(body).data
    except ValidationError:
        raise ScrapeError("/v1/models is not a list of models") from None
    if not models:
        return {}
    return {
        "models": tuple(model.id for model in models),
        "listed": True,
        "adapters": tuple(model.id for model in models if model.parent),
        # An adapter's entry has null: the length of the adapter's model applies.
        "max_model_len": next(filter(None, (model.max_model_len for model in models)), None),
    }


async def takes_priority(session: aiohttp.ClientSession, replica: str) -> bool:
    """Requests the version of the replica at ``ip:port``; returns True from vLLM 0.11 on. Older
    versions answer 400 to ``priority`` in a body, unless they schedule by priority."""
    try:  # a server other than vLLM, or a proxy in front of vLLM, may have no /version
        number = _VERSION.search(await get(session, replica, "/version"))
    except ScrapeError:
        return False
    return number is not None and (int(number[1]), int(number[2])) >= _TAKES_PRIORITY
