"""Digests in Redis: each router writes its own, and reads the digests of all routers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.fleet.digest import Digest, DigestKind, pack, unpack
from extproc.share.connection import Keys, in_time
from extproc.share.envelope import EnvelopeKind, Skips
from extproc.share.reader import ChannelReader, keys_after, stored_values

_LIFE_MS = 2000  # life of a whole digest in Redis; a router sends four in this time
DIGEST = EnvelopeKind("load", Digest, pack, unpack)


@dataclass(frozen=True, slots=True)
class DigestReceived:
    """Digest that Redis pushed, or that was stored in Redis."""

    digest: Digest
    age: float = 0.0  # seconds since Redis stored the digest; 0: pushed


@dataclass(frozen=True, slots=True)
class Connected:
    """Event: the reader has connected to Redis; the stored digests follow."""


DigestEvent = DigestReceived | Connected


async def send_digest(redis: Redis, keys: Keys, digest: Digest) -> str:
    """Pushes a digest; a whole digest is also stored, for routers that start later.

    Returns why Redis did not store the digest; empty: it was stored, or need not be. A full Redis
    stores no digest, but still pushes.
    """
    data, key = DIGEST.seal(digest), keys.router + digest.router
    async with redis.pipeline(transaction=False) as pipe:
        if digest.kind is DigestKind.WHOLE:
            pipe.set(key, data, px=_LIFE_MS)
        elif digest.kind is DigestKind.FAREWELL:
            pipe.delete(key)
        pipe.publish(keys.digests, data)
        *stored, pushed = await in_time(pipe.execute(raise_on_error=False))
    if isinstance(pushed, RedisError):
        raise pushed
    return "".join(str(each) for each in stored if isinstance(each, RedisError))


class DigestReader(ChannelReader[DigestEvent]):
    """Yields ``Connected``, the digests stored in Redis, and then every digest of any router."""

    def __init__(self, redis: Redis, pool: str, skips: Skips | None = None) -> None:
        super().__init__(redis, pool, Keys(pool).digests, skips)

    async def _pushed(self, data: bytes) -> AsyncIterator[DigestEvent]:
        if digest := self._skips.open(self._channel, data, DIGEST):
            yield DigestReceived(digest)

    async def _found(self) -> AsyncIterator[DigestEvent]:
        keys = await keys_after(self._redis, self._keys.router)
        yield Connected()
        async for page in stored_values(self._redis, keys, self._skips, DIGEST):
            for digest, left_s in page:
                yield DigestReceived(digest, max(_LIFE_MS / 1000 - left_s, 0.0))


async def living_routers(redis: Redis, pool: str) -> dict[str, str]:
    """Returns the admin address of each router of a pool that has published one, by router."""
    keys = await keys_after(redis, Keys(pool).router)
    pages = stored_values(redis, keys, Skips(), DIGEST)
    digests = [digest async for page in pages for digest, _ in page]
    return {digest.router: digest.admin for digest in digests if digest.admin}
