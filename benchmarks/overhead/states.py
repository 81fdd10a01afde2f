"""Writes replica states into Redis as a poller would, as a process of its own."""

import asyncio
import sys
from random import Random
from time import monotonic, time

import uvloop

from extproc.replica_state import ReplicaState
from extproc.store.connection import connect
from extproc.store.replicas import StateWriter

POOL = "overhead"
_INTERVAL_S = 0.2
"""Between two states of a replica, as pollers are configured by default."""
_AT_A_TIME = 20
"""Replicas whose states are written together."""
_STEP_S = 0.01
_KV_TOKENS = 400_000


def addresses(replicas: int, port: int) -> list[str]:
    """Loopback addresses, all of which the one upstream listens on."""
    return [f"127.0.{1 + number // 250}.{1 + number % 250}:{port}" for number in range(replicas)]


def state(address: str, random: Random) -> ReplicaState:
    """A replica that is at work for others, too."""
    now = monotonic()
    return ReplicaState(
        id=address,
        profile="llama-8b-h100",
        models=("model",),
        max_model_len=16_384,
        running=random.randrange(20),
        waiting=random.randrange(2),
        kv_usage=random.uniform(0.1, 0.6),
        kv_tokens=_KV_TOKENS,
        steps=now / _STEP_S,
        prompt_tokens=now * 1000,
        generated_tokens=now * 500,
        first_tokens=now * 3,
        scraped_at=time(),
        scrape_seconds=0.005,
    )


async def write(redis_url: str, replicas: int, port: int) -> None:
    """Each replica's state five times a second, one after another."""
    names = addresses(replicas, port)
    groups = [names[at : at + _AT_A_TIME] for at in range(0, replicas, _AT_A_TIME)]
    random = Random(0)
    redis = connect(redis_url, POOL)
    writer = StateWriter(redis, POOL, ttl_s=10.0)
    due = monotonic()
    while True:
        for group in groups:
            await writer.put([state(name, random) for name in group])
            due = max(due + _INTERVAL_S / len(groups), monotonic())
            await asyncio.sleep(due - monotonic())


if __name__ == "__main__":
    url, replicas, port = sys.argv[1:]
    uvloop.run(write(url, int(replicas), int(port)))
