"""Process that takes the place of pollers: writes new states of many busy replicas to Redis."""

import asyncio
import sys
import time
from random import Random

from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter

MODEL = "model"
PROFILE = "llama-8b-h100"
_TTL_S = 10.0
_TICK_S = 0.02  # states are written in batches, as pollers write them
_STEPS_A_SECOND = 100.0


def addresses(replicas: int, port: int) -> list[str]:
    """Loopback address for each replica; a single server on 0.0.0.0 answers at all of them."""
    return [f"127.0.{1 + number // 250}.{1 + number % 250}:{port}" for number in range(replicas)]


def state(address: str, at: float, random: Random) -> ReplicaState:
    """State of a busy replica, scraped ``at`` seconds after the replica started."""
    running = random.randint(4, 20)
    steps = _STEPS_A_SECOND * at
    return ReplicaState(
        id=address,
        profile=PROFILE,
        learned=StepModel(0.0065, 38e-6, 20e-6, 0.047e-6),
        measured=True,
        models=(MODEL,),
        max_model_len=131072,
        running=running,
        kv_usage=running * 400 / 400_000,
        kv_tokens=400_000,
        steps=steps,
        prompt_tokens=steps * 15,
        cached_tokens=steps * 5,
        generated_tokens=steps * 10,
        scraped_at=time.time(),
        scrape_seconds=0.005,
    )


async def write(url: str, pool: str, replicas: int, port: int, interval_s: float) -> None:
    """Writes a state of each replica per interval, evenly spread over time, until cancelled."""
    random, names = Random(1), addresses(replicas, port)
    started = time.monotonic()
    written = 0
    async with connect(url, pool) as redis:
        writer = StateWriter(redis, pool, _TTL_S)
        while True:
            at = time.monotonic() - started
            due = int(at / interval_s * replicas) - written
            for first in range(0, due, replicas):
                batch = range(written + first, written + min(first + replicas, due))
                states = [state(names[n % replicas], at + 1.0, random) for n in batch]
                await writer.put(states)
            written += due
            await asyncio.sleep(_TICK_S)


if __name__ == "__main__":
    _, url, pool, replicas, port, interval_s = sys.argv
    asyncio.run(write(url, pool, int(replicas), int(port), float(interval_s)))
