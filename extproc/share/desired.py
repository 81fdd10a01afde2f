"""What commands asked of a pool's replicas, in Redis: beside what the configuration names."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis
from redis.utils import str_if_bytes

from extproc.config import ReplicaSource
from extproc.ground.outage_log import OutageLog
from extproc.share.connection import in_time
from extproc.share.keys import Keys
from extproc.share.read import Garbage

log = logging.getLogger(__name__)

_TTL_S = 7 * 86_400
"""Life of what commands asked for while no poller runs."""

Wish = Literal["serve", "drain", "remove"]


class Desired(BaseModel):
    """The state that was asked of one replica; the last command wins."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    wish: Wish
    source: ReplicaSource | None = None
    """Where it is, if it was added by command; None: configuration, file or DNS name it."""


class DesiredStore:
    """Reads and writes what was asked of a pool's replicas, by ``ip:port``.

    Each method raises RedisError where Redis did not do it; it may take ``connection.TIMEOUT_S``.
    """

    def __init__(self, redis: Redis, pool: str) -> None:
        self._redis = redis
        self.key = Keys(pool).members
        self.refused = OutageLog(
            log,
            "redis refuses a key: 'extproc replicas' has no effect",
            "redis refuses the key no longer",
            logging.ERROR,
            key=self.key,
            allow=f"~{self.key} +@read +@write",
        )
        self._garbage = Garbage()

    async def read(self) -> dict[str, Desired]:
        """Everything asked for; what cannot be read is left out, with one line in the log."""
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self.key)
            pipe.expire(self.key, _TTL_S)
            values, _ = await pipe.execute()
        parse = Desired.model_validate_json
        named = {str_if_bytes(key): value for key, value in values.items()}
        read = {key: self._garbage.read(key, parse, value) for key, value in named.items()}
        return {key: desired for key, desired in read.items() if desired}

    async def write(self, asked: Mapping[str, Desired], only_new: bool = False) -> None:
        """Write what was asked for; ``only_new``: of replicas of which nothing is there."""
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            put: Any = pipe.hsetnx if only_new else pipe.hset
            for key, desired in asked.items():
                put(self.key, key, desired.model_dump_json(exclude_defaults=True))
            pipe.expire(self.key, _TTL_S)
            await pipe.execute()

    async def forget(self, keys: Iterable[str]) -> None:
        """Delete what no longer matters."""
        async with in_time():
            await self._redis.hdel(self.key, *keys)
