"""What commands asked of a pool's membership, in Redis: beside what the configuration names."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis
from redis.utils import str_if_bytes

from extproc.config import ReplicaSource
from extproc.store.connection import in_time
from extproc.store.keys import members_key
from extproc.store.read import Garbage, what_is_wrong

log = logging.getLogger(__name__)

_TTL_S = 7 * 86_400
"""Life of what commands asked for while no poller runs."""


Wish = Literal["serve", "drain", "remove"]
"""What is asked of a replica."""


class Member(BaseModel):
    """What was asked of one replica; the last command wins."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    wish: Wish
    source: ReplicaSource | None = None
    """Where it is, if it was added by command; None: configuration, file or DNS name it."""


Members = Mapping[str, Member]
"""By ``ip:port``."""


class MemberStore:
    """Reads and writes the members of a pool; each may take ``connection.TIMEOUT_S``."""

    def __init__(self, redis: Redis, pool: str) -> None:
        self._redis = redis
        self.key = members_key(pool)
        self._garbage = Garbage()

    async def read(self) -> dict[str, Member]:
        """Everything asked for; what cannot be read is left out, with one line in the log.

        Raises:
            RedisError: Redis did not tell.
        """
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self.key)
            pipe.expire(self.key, _TTL_S)
            values, _ = await pipe.execute()
        read = ((str_if_bytes(key), self._member(key, value)) for key, value in values.items())
        return {key: member for key, member in read if member is not None}

    async def write(self, members: Members) -> None:
        """Write what was asked for.

        Raises:
            RedisError: Redis did not take it.
        """
        values: dict[Any, Any] = {key: _json(member) for key, member in members.items()}
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(self.key, mapping=values)
            pipe.expire(self.key, _TTL_S)
            await pipe.execute()

    async def restore(self, members: Members) -> None:
        """Write again what Redis lost; what was asked for since then stays.

        Raises:
            RedisError: Redis did not take it.
        """
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            for key, member in members.items():
                pipe.hsetnx(self.key, key, _json(member))
            pipe.expire(self.key, _TTL_S)
            await pipe.execute()

    async def forget(self, keys: Iterable[str]) -> None:
        """Delete what no longer matters.

        Raises:
            RedisError: Redis did not do it.
        """
        async with in_time():
            await self._redis.hdel(self.key, *keys)

    def _member(self, key: bytes | str, value: bytes | str) -> Member | None:
        try:
            return Member.model_validate_json(value)
        except ValidationError as error:
            self._garbage.skipped(str_if_bytes(key), what_is_wrong(error))
            return None


def _json(member: Member) -> str:
    return member.model_dump_json(exclude_defaults=True)
