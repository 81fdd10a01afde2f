"""Findings on what runs: the files of replicas, Redis, the replicas and their models, Envoy."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import aiohttp
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from redis.utils import str_if_bytes

from extproc.config import Config, ModelTargets, ReplicaSource
from extproc.envoy.finding import Finding, Level, worst_first
from extproc.envoy.live_envoy import check_live_envoy
from extproc.fleet.members import ModelNames
from extproc.ground.address import with_name
from extproc.ground.clock import monotonic
from extproc.poll.discovery import RESOLVE_S, Discovery, read_replicas
from extproc.poll.metrics_text import EngineFigures
from extproc.poll.scrape import ScrapeError, open_session, read_models, scrape
from extproc.replica_state import SILENT_AFTER_S
from extproc.share.connection import Keys, address, connect, in_time
from extproc.share.envelope import sealed_list
from extproc.share.owners import living
from extproc.share.replicas import Snapshot, StateReader

_UNSERVED = (
    "no replica that answers lists it: requests for {} {}. Start one with it, or put right "
    "route.models"
)
_AWAY = (
    "{}: routers and pollers go on by themselves. Start it, or put right redis.url; a router that "
    "is alone needs none (state: memory)"
)
_REFUSES = (
    "refuses what routers and pollers do: {}. Give their user the rights that docs/operations.md "
    "lists (Redis)"
)
_NO_POLLER = "no poller of the pool {!r} is alive: what routers know gets old. Run 'extproc poll'"
_WRITES = "return redis.call('DEL', KEYS[1])"  # of a key that is never there
_NONE = "no replica is known: Envoy's own load balancing serves. Name them (replicas)"
_NO_SIZE = (
    "tells no size of its KV cache (vllm:cache_config_info): how full it will be is not predicted. "
    "Let nothing between it and the poller drop that line"
)
_NO_STEPS = (
    "counts no steps (vllm:iteration_tokens_total): its speed stays that of its profile. Let "
    "nothing between it and the poller drop that line"
)
_UNPOLLED = (
    "routers do not know it: no poller scrapes it. Run 'extproc poll' with this configuration"
)
_DISAGREE = "it answers here, and pollers say: {}. Let the pollers' machines reach it"
_OLD = "what pollers saw of it is {:.0f} s old: is a poller that scrapes it alive?"

Said = tuple[Level, str]


def check_replicas_files(config: Config) -> list[Finding]:
    """An error for each file that cannot be used now; pollers and routers wait until it can."""
    found = []
    for path in filter(None, (pool.replicas_file for pool in config.each_pool)):
        try:
            read_replicas(path)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            text = (
                f"cannot be used: {reason}: none of its replicas is polled. Put it right, or "
                "replicas_file"
            )
            found.append(Finding("replicas", Level.ERROR, f"replicas_file {path}", text))
    return found


async def check_live(config: Config, envoy_admin: str | None) -> list[Finding]:
    """Findings, worst first; nothing is changed. ``envoy_admin``: URL of Envoy's admin address."""
    replicas: dict[str, str] = {}
    served: set[str] = set()
    pools = (_check_pool(pool, replicas, served) for pool in config.each_pool)
    found = [finding for pool in await asyncio.gather(*pools) for finding in pool]
    found += _check_models(config.route.models, served)
    if envoy_admin is not None:
        found += await check_live_envoy(envoy_admin, config, replicas)
    return worst_first(found)


async def _check_pool(config: Config, replicas: dict[str, str], served: set[str]) -> list[Finding]:
    """Findings on a pool; adds its replicas (``ip:port`` → name), and the models they list."""
    found, snapshot = await _check_redis(config) if config.state == "redis" else ([], None)
    named = {state.id: state.name for state in snapshot.states} if snapshot else {}
    sources = [*config.replicas]
    if config.replicas_file is not None:
        with suppress(OSError, ValueError):  # check_replicas_files tells
            sources += read_replicas(config.replicas_file)
    for source, (targets, reason) in zip(
        sources, await asyncio.gather(*map(_resolve, sources)), strict=True
    ):
        named |= targets
        if not targets:
            text = (
                f"names no address now{reason}: none of its replicas is polled. Put right its "
                "name, or what resolves it"
            )
            found.append(Finding("replicas", Level.ERROR, f"replica {source.where}", text))
    if not named:
        found.append(Finding("replica", Level.ERROR, f"pool {config.pool}", _NONE))
    replicas |= named
    async with open_session(config.poll.give_up_s) as session:
        ask = partial(_check_replica, config, session, snapshot, served)
        for id_, said in zip(named, await asyncio.gather(*map(ask, named)), strict=True):
            where = f"replica {with_name(id_, named[id_])}"
            found += [Finding("replica", level, where, text) for level, text in said]
    return found


async def _resolve(source: ReplicaSource) -> tuple[dict[str, str], str]:
    """The replicas of a source (``ip:port`` → name), or why there is none."""
    discovery = Discovery([source], None, RESOLVE_S)
    try:
        targets = {target.id: target.name for target in await discovery.targets()}
        return targets, "".join(f" ({problem})" for problem in discovery.problems())
    finally:
        discovery.stop()


def _check_models(models: Mapping[str, ModelTargets], served: set[str]) -> Iterator[Finding]:
    """Errors for models that names of clients lead to, and no replica serves."""
    names = ModelNames(models)
    for name, targets in models.items():
        weighed = targets.items() if isinstance(targets, dict) else [(name, 1.0)]
        known = {one for model, weight in weighed if weight for one in names.served(model)}
        missing = known - served
        fate = "go to those that list another of its names"
        if missing == known:
            fate = "get 404, or wait for a replica that does"
        for model in sorted(missing):
            text = _UNSERVED.format(name, fate)
            yield Finding("model", Level.ERROR, f"model {model}", text)


async def _check_redis(config: Config) -> tuple[list[Finding], Snapshot | None]:
    """Checks the Redis of one pool, and reads its replicas' states; None where that failed."""
    async with connect(config.redis, config.pool) as redis:
        finding = partial(Finding, "redis", where=f"redis {address(redis)}")
        try:
            began = monotonic()
            version = await _version(redis)
            took_s = monotonic() - began
            await _rights(redis, Keys(config.pool))
            pollers = await living(redis, config.pool)
            snapshot = await StateReader(redis, config.pool, Random()).read()
        except (RedisError, OSError) as error:
            wrong = _REFUSES if isinstance(error, ResponseError) else _AWAY
            return [finding(level=Level.ERROR, text=wrong.format(str(error).rstrip(".")))], None
    text = (
        f"version {version} answers in {took_s * 1e3:.1f} ms; pool {config.pool}: {len(pollers)} "
        f"pollers alive, {len(snapshot.states)} replicas"
    )
    found = [finding(level=Level.OK, text=text)]
    if not pollers:
        found.append(finding(level=Level.ERROR, text=_NO_POLLER.format(config.pool)))
    return found, snapshot


async def _version(redis: Redis) -> str:
    """Returns the version of the server, from what needs no right to administer."""
    ask: Any = redis.execute_command  # redis-py leaves it untyped
    try:
        async with in_time():
            told = await ask("HELLO")
    except ResponseError:  # before 6.2
        return "not told"
    fields = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
    return str_if_bytes(fields[b"version"])


async def _rights(redis: Redis, keys: Keys) -> None:
    """Writes and publishes, in ways that change nothing."""
    async with in_time():
        await redis.eval(_WRITES, 1, keys.slot)
        await redis.publish(keys.changes, sealed_list())
    async with redis.pubsub() as pubsub, in_time():
        await pubsub.subscribe(keys.changes)
        await pubsub.get_message(timeout=None)


async def _check_replica(
    config: Config,
    session: aiohttp.ClientSession,
    snapshot: Snapshot | None,
    served: set[str],
    id_: str,
) -> list[Said]:
    """Judges a replica's answers and what pollers say of it; adds the models that it serves."""
    began = monotonic()
    try:
        figures = await scrape(session, id_)
    except ScrapeError as error:
        text = f"{error}: it gets no requests. Start it, or put right its address (replicas)"
        return [(Level.ERROR, text)]
    took_s = monotonic() - began
    said = [*_judged(id_, figures, snapshot)]
    if took_s > config.poll.timeout_s:
        text = (
            f"a scrape took {took_s:.2f} s, longer than poll.timeout_s "
            f"({config.poll.timeout_s:g} s): nothing is learned from it. Look what keeps its API "
            "server busy, or raise poll.timeout_s"
        )
        said.append((Level.WARNING, text))
    models: tuple[str, ...] = figures.models
    try:
        models = (await read_models(session, id_)).get("models", ())
    except ScrapeError as error:
        text = f"{error}: any model's requests may go there. Let it answer /v1/models"
        said.append((Level.WARNING, text))
    served.update(models)
    text = f"scraped in {took_s * 1e3:.0f} ms; serves {', '.join(models) or 'no model'}"
    return [*said, (Level.OK, text)]


def _judged(id_: str, figures: EngineFigures, snapshot: Snapshot | None) -> Iterator[Said]:
    """Names what a replica's figures lack, and where pollers see them otherwise."""
    if figures.generated_tokens and not figures.kv_tokens:  # an engine that only embeds has none
        yield Level.WARNING, _NO_SIZE
    if figures.finished and not figures.steps:
        yield Level.WARNING, _NO_STEPS
    if snapshot is None:
        return
    state = next((one for one in snapshot.states if one.id == id_), None)
    if state is None:
        yield Level.ERROR, _UNPOLLED
    elif not state.healthy:
        yield Level.ERROR, _DISAGREE.format(state.problem)
    elif (age_s := snapshot.ages[id_]) > SILENT_AFTER_S:
        yield Level.WARNING, _OLD.format(age_s)
