"""Departed models: a sorted set in Redis of the models that no replica serves any more.

A router that starts reads the set, to tell an unknown model from a model without a replica.
"""

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.utils import str_if_bytes

from extproc.fleet.members import MODELS_REMEMBERED, REMEMBERED_S
from extproc.share.connection import Keys, in_time


async def read_departed(redis: Redis, pool: str) -> dict[str, float]:
    """Returns the times when models were last served, in seconds since the epoch."""
    found: Any = await in_time(redis.zrange(Keys(pool).departed_models, 0, -1, withscores=True))
    return {str_if_bytes(model): at for model, at in found}


async def write_departed(redis: Redis, pool: str, departed: Mapping[str, float]) -> None:
    """Writes times when models were last served, in seconds since the epoch; a later time of a
    model in Redis stays. Redis drops all but the models served most recently."""
    key = Keys(pool).departed_models
    async with redis.pipeline(transaction=False) as pipe:
        pipe.zadd(key, dict(departed), gt=True)
        pipe.zremrangebyrank(key, 0, -MODELS_REMEMBERED - 1)
        pipe.expire(key, round(REMEMBERED_S))
        await in_time(pipe.execute())
