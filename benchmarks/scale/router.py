"""Process of a router without Envoy: decides on requests of its own, and prints figures as JSON."""

import asyncio
import json
import resource
import sys
import time
from random import Random

import numpy as np
import uvloop
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from benchmarks.states import MODEL
from extproc.config import Config, RedisSettings
from extproc.proxy.app import build
from extproc.proxy.services import Services
from extproc.proxy.sharing import share
from extproc.request.endpoint import Endpoint
from extproc.request.profile import RequestProfile

_READY_S = 60.0
_LOOK_EVERY_S = 0.05
_ANSWER_S = 2.0


async def route(
    url: str, pool: str, replicas: int, rate: float, seconds: float
) -> dict[str, float]:
    """Follows the state of the pool and decides ``rate`` requests a second; returns figures.

    ``cpu``: cores; ``age``: age of replicas' states; ``late``: lateness of timers; ``digests``:
    digests received per second; ``digest_age``: mean age of digests on arrival.
    """
    config = Config(pool=pool, redis=RedisSettings(url=url))
    registry = CollectorRegistry()
    services = build(config, registry)
    tasks = [
        asyncio.create_task(share(config, services.fleet, services.metrics, services.delays)),
    ]
    async with asyncio.timeout(_READY_S):
        while True:  # another process writes the states
            if len(services.fleet.members) >= replicas:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
    made: list[float] = []
    if rate:
        tasks.append(asyncio.create_task(_decide(services, rate, made)))
    await asyncio.sleep(_ANSWER_S)
    cpu, began, ages, late = _cpu(), time.monotonic(), [], []
    before, received = len(made), _digests_received(registry)
    while (now := time.monotonic()) - began < seconds:
        ages += [time.time() - state.scraped_at for state in services.fleet.members]
        await asyncio.sleep(_LOOK_EVERY_S)
        late.append(time.monotonic() - now - _LOOK_EVERY_S)
    took = time.monotonic() - began
    received -= _digests_received(registry)
    for task in tasks:
        task.cancel()
    return {
        "replicas": len(services.fleet.members),
        "cpu": (_cpu() - cpu) / took,
        "decisions": round((len(made) - before) / took),
        "age_p50_s": float(np.quantile(ages, 0.5)),
        "age_p99_s": float(np.quantile(ages, 0.99)),
        "late_p50_ms": 1e3 * float(np.quantile(late, 0.5)),
        "late_p99_ms": 1e3 * float(np.quantile(late, 0.99)),
        "digests": -received[0] / took,
        "digest_age_ms": 1e3 * received[1] / min(received[0], -1.0),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _decide(services: Services, rate: float, made: list[float]) -> None:
    random, loop = Random(), asyncio.get_running_loop()
    at = loop.time()
    while True:
        at += random.expovariate(rate)
        await asyncio.sleep(at - loop.time())
        profile = RequestProfile(
            endpoint=Endpoint.CHAT,
            model=MODEL,
            prompt_tokens=round(random.lognormvariate(6.0, 0.8)),
            prompt_bytes=0,
            output_bound=None,
            stream=True,
        )
        decision = services.router.decide(profile)
        if decision is None:
            continue
        ticket = services.fleet.dispatch(decision.replica, profile)
        loop.call_later(random.uniform(0.0, 2 * _ANSWER_S), services.fleet.release, ticket)
        made.append(loop.time())


def _digests_received(registry: CollectorRegistry) -> NDArray[np.float64]:
    """Number of digests received from other routers, and the sum of their ages in seconds."""
    names = [f"extproc_digest_age_seconds_{part}" for part in ("count", "sum")]
    return np.array([registry.get_sample_value(name) for name in names])


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    _, url, pool, replicas, rate, seconds = sys.argv
    figures = uvloop.run(route(url, pool, int(replicas), float(rate), float(seconds)))
    print(json.dumps(figures))
