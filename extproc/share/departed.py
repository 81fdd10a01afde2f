"""Departed models: a sorted set in Redis of the models that no replica serves any more.

A router that starts reads the set, to tell an unknown model from a model without a replica.
"""

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.utils import str_if_bytes

from extproc.share.connection import Keys, in_time


class DepartedModels:
    """Reads and writes the times when models were last served, in seconds since the epoch.

    Both methods raise RedisError if Redis failed or gave no answer within ``connection.TIMEOUT_S``.
    """

    def __init__(self, redis: Redis, pool: str, most: int, life_s: float) -> None:
        """``most``: departed models to keep, those served most recently; ``life_s``: seconds for
        which Redis keeps them after a write."""
        self._redis = redis
        self.key = Keys(pool).departed_models
        self._most = most
        self._life_s = round(life_s)

    async def read(self) -> dict[str, float]:
        found: Any = await in_time(self._redis.zrange(self.key, 0, -1, withscores=True))
        return {str_if_bytes(model): at for model, at in found}

    async def write(self, departed: Mapping[str, float]) -> None:
        """Writes times; if Redis already has a later time of a model, the later time stays."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(self.key, dict(departed), gt=True)
            pipe.zremrangebyrank(self.key, 0, -self._most - 1)
            pipe.expire(self.key, self._life_s)
            await in_time(pipe.execute())
