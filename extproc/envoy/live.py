"""Checks a running system: files that list replicas, Redis, replicas and their models, Envoy."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

import aiohttp
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from extproc.config import Config, ModelTargets
from extproc.envoy.finding import Finding, Level, worst_first
from extproc.envoy.live_envoy import check_live_envoy
from extproc.fleet.members import ModelNames
from extproc.ground.address import with_name
from extproc.ground.clock import monotonic
from extproc.observe.client import RouterUnavailableError, fetch_page
from extproc.poll.discovery import RESOLVE_S, Discovery, read_replicas
from extproc.poll.metrics_text import PageFigures, ScrapeError
from extproc.poll.models import read_models
from extproc.poll.scrape import open_session, scrape
from extproc.replica_state import STALE_AFTER_S
from extproc.share.assignment import Heartbeat, known_pollers
from extproc.share.connection import Keys, address, connect, in_time
from extproc.share.envelope import Skips, sealed_list
from extproc.share.reader import keys_after
from extproc.share.replicas import Snapshot, StateReader

_UNREACHABLE = (
    "{}: routers and pollers cannot share state. Start it, or correct redis.url; a single router "
    "needs no Redis (state: memory)"
)
_REFUSES = (
    "refuses a command of routers and pollers: {}. Grant their user the rights that "
    "docs/operations/secure.md lists under Redis"
)
_STORES_NOTHING = "stores nothing: {}. Read its log, or give it more memory (maxmemory)"
_UNROUTED = "Envoy's fallback policy serves all requests"
_THERE = "run this command on the machine of a poller"
_DELETE = "return redis.call('DEL', KEYS[1])"
_AT_ONCE = 50  # replicas of a pool; more would make the command itself too slow to time a scrape

Problem = tuple[Level, str]


def check_replicas(config: Config) -> Iterator[Finding]:
    """Yield errors for pools without replicas, replicas listed twice, and files of replicas that
    cannot be used now. Pollers wait until such a file can be used."""
    finding = partial(Finding, "replicas", Level.ERROR)
    for pool in config.each_pool:
        sources, path = [*pool.replicas], pool.replicas_file
        if path is not None:
            try:
                sources += read_replicas(path)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                yield finding(
                    f"replicas_file {path}",
                    f"unusable: {reason}: its replicas are not polled. Correct the file or path",
                )
        elif not sources and config.state == "memory":
            yield finding(
                f"pool {pool.pool}",
                f"no replica is configured, and state is 'memory': {_UNROUTED}. Set replicas or "
                "replicas_file",
            )
        for where, count in Counter(source.where for source in sources).items():
            if count > 1:
                yield finding(
                    f"replica {where}",
                    f"listed {count} times: only the first entry counts. Remove the rest",
                )


async def check_live(config: Config, envoy_admin: str | None) -> list[Finding]:
    """Check running parts without changing anything; the worst findings first.

    ``envoy_admin``: URL of Envoy's admin address.
    """
    # Failures are findings here: do not also log the failures of parts that the checks use.
    logging.getLogger("extproc").addHandler(logging.NullHandler())
    replicas: dict[str, str] = {}
    served: set[str] = set()
    checks = (_check_pool(pool, replicas, served) for pool in config.each_pool)
    found = [finding for findings in await asyncio.gather(*checks) for finding in findings]
    found += _check_models(config.route.models, served)
    if envoy_admin is not None:
        found += await check_live_envoy(envoy_admin, config, replicas)
    return worst_first(found)


async def _check_pool(config: Config, replicas: dict[str, str], served: set[str]) -> list[Finding]:
    """Check a pool; add its replicas (``ip:port`` → name) to ``replicas``, models to ``served``."""
    found, snapshot, pollers = (
        await _check_redis(config)
        if config.state == "redis"
        else (await _check_lone_router(config), None, [])
    )
    names = {state.id: state.name for state in snapshot.states} if snapshot else {}
    discovery = Discovery(config.replicas, config.replicas_file, RESOLVE_S)
    names |= {target.id: target.name for target in await discovery.targets()}
    unread = discovery.problems()
    discovery.stop()
    unread.pop(str(config.replicas_file), "")  # which ``check_replicas`` reports
    reported = [text for poller in pollers for text in poller.problems]
    for source, problem in unread.items():
        level = Level.ERROR
        fate = ": none of its replicas is polled. Correct its name, or what resolves it"
        if pollers and not any(text.startswith(f"{source}: ") for text in reported):
            level, fate = Level.WARNING, f", but pollers report no problem with it: {_THERE}"
        text = f"has no address ({problem}){fate}"
        found.append(Finding("replicas", level, f"replica {source}", text))
    if not names:
        text = (
            "no replica is known: requests wait for one, or Envoy's fallback policy serves them. "
            "Set replicas"
        )
        found.append(Finding("replica", Level.ERROR, f"pool {config.pool}", text))
    replicas |= names
    async with open_session(config.poll.give_up_s) as session:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def check(id_: str) -> list[Problem]:
            async with turn:
                return await _check_replica(config, session, snapshot, served, id_)

        for id_, problems in zip(names, await asyncio.gather(*map(check, names)), strict=True):
            where = f"replica {with_name(id_, names[id_])}"
            found += [Finding("replica", level, where, text) for level, text in problems]
    return found


def _check_models(models: Mapping[str, ModelTargets], served: set[str]) -> Iterator[Finding]:
    """Yield an error for each model that ``route.models`` leads to and no replica serves."""
    names = ModelNames(models)
    for name, targets in models.items():
        weights = targets if isinstance(targets, dict) else {name: 1.0}
        wanted = {
            each for model, weight in weights.items() if weight for each in names.served(model)
        }
        missing = wanted - served
        fate = "wait or get 404" if missing == wanted else "go to replicas of its other models"
        text = (
            f"no reachable replica lists this model: requests for {name} {fate}. Start a replica "
            "with this model, or correct route.models"
        )
        for model in sorted(missing):
            yield Finding("model", Level.ERROR, f"model {model}", text)


async def _check_lone_router(config: Config) -> list[Finding]:
    """Check a router that runs without Redis."""
    level, text = Level.OK, "alive"
    try:
        await fetch_page(config.serve.admin, "/livez", config.admin)
    except (RouterUnavailableError, ValueError):
        level = Level.ERROR
        text = f"no router answers there: {_UNROUTED}. Run 'extproc serve', or correct serve.admin"
    return [Finding("router", level, f"router {config.serve.admin}", text)]


async def _check_redis(config: Config) -> tuple[list[Finding], Snapshot | None, list[Heartbeat]]:
    """Check a pool's Redis, and read the states of its replicas and the heartbeats of its pollers.

    The snapshot is None if Redis fails, or if no poller is alive and all states have expired.
    """
    async with connect(config.redis, config.pool) as redis:
        finding = partial(Finding, "redis", where=f"redis {address(redis)}")
        try:
            began = monotonic()
            await in_time(redis.ping())
            took_s = monotonic() - began
            await _use_rights(redis, Keys(config.pool))
            pollers, _ = await known_pollers(redis, config.pool, Skips())
            routers = await keys_after(redis, Keys(config.pool).router)
            snapshot = await StateReader(redis, config.pool).read()
        except (RedisError, OSError) as error:
            text = _REFUSES if isinstance(error, ResponseError) else _UNREACHABLE
            if isinstance(error, OutOfMemoryError) or "MISCONF" in str(error):
                text = _STORES_NOTHING
            text = text.format(str(error).rstrip("."))
            return [finding(level=Level.ERROR, text=text)], None, []
    text = (
        f"answers in {took_s * 1e3:.1f} ms; pool {config.pool}: {len(routers)} routers and "
        f"{len(pollers)} pollers alive, {len(snapshot.states)} replicas"
    )
    found = [finding(level=Level.OK, text=text)]
    if not routers:
        text = f"no router of the pool {config.pool!r} is alive: {_UNROUTED}. Run 'extproc serve'"
        found.append(finding(level=Level.ERROR, text=text))
    if not pollers:
        text = (
            f"no poller of the pool {config.pool!r} is alive: the states of its replicas go stale. "
            "Run 'extproc poll'"
        )
        found.append(finding(level=Level.ERROR, text=text))
    # Without pollers, states expire, and running routers go on with the last ones.
    return found, snapshot if pollers or snapshot.states else None, [*pollers.values()]


async def _use_rights(redis: Redis, keys: Keys) -> None:
    """Use each right that routers and pollers need in Redis, without changing anything."""
    await in_time(redis.eval(_DELETE, 1, keys.slot))  # this key never exists
    await in_time(redis.set(keys.slot, "", xx=True))  # a full Redis refuses this, too
    await in_time(redis.publish(keys.changes, sealed_list()))
    async with redis.pubsub() as pubsub:
        await in_time(pubsub.subscribe(keys.changes))
        await in_time(pubsub.get_message(timeout=None))


async def _check_replica(
    config: Config,
    session: aiohttp.ClientSession,
    snapshot: Snapshot | None,
    served: set[str],
    id_: str,
) -> list[Problem]:
    """Check a replica's answers and its state in Redis; add its models to ``served``."""
    reported = [*_check_state(id_, snapshot)]
    began = monotonic()
    try:
        figures = await scrape(session, id_)
    except ScrapeError as error:
        if snapshot is None or reported:
            text = f"{error}: it gets no requests. Start it, or correct its address (replicas)"
            return [(Level.ERROR, text)]
        served.update(*(state.models for state in snapshot.states if state.id == id_))
        text = f"{error}. Pollers reach it: {_THERE}"
        return [(Level.WARNING, text)]
    took_s = monotonic() - began
    problems = [*_check_figures(figures), *reported]
    if took_s > config.poll.timeout_s:
        text = (
            f"a scrape took {took_s:.2f} s, longer than poll.timeout_s "
            f"({config.poll.timeout_s:g} s): pollers learn nothing from it. Find out why its API "
            "server is slow, or raise poll.timeout_s"
        )
        problems.append((Level.WARNING, text))
    models: tuple[str, ...] = figures.models
    try:
        models = (await read_models(session, id_)).get("models", ())
    except ScrapeError as error:
        text = f"{error}: it may get requests for any model. Let the replica answer /v1/models"
        problems.append((Level.WARNING, text))
    served.update(models)
    text = f"scraped in {took_s * 1e3:.0f} ms; serves {', '.join(models) or 'no model'}"
    return [*problems, (Level.OK, text)]


def _check_figures(figures: PageFigures) -> Iterator[Problem]:
    if figures.asleep:
        yield Level.WARNING, "its engine sleeps: it gets no requests. Send POST /wake_up to it"
    remedy = "Find out what drops this metric between the replica and the poller"
    if figures.generated_tokens and not figures.kv_tokens:  # embedding engines have none
        yield (
            Level.WARNING,
            "lacks the size of its KV cache (vllm:cache_config_info): predictions leave out how "
            f"full it will be. {remedy}",
        )
    if figures.finished and not figures.steps:
        yield (
            Level.WARNING,
            "lacks the number of its steps (vllm:iteration_tokens_total): its speed is never "
            f"measured, and stays that of its profile. {remedy}",
        )


def _check_state(id_: str, snapshot: Snapshot | None) -> Iterator[Problem]:
    """Find reasons in Redis why a replica that answered this command may get no requests."""
    if snapshot is None:
        return
    state = next((state for state in snapshot.states if state.id == id_), None)
    if state is None:
        yield (
            Level.ERROR,
            "no poller scrapes it: it gets no requests. Run 'extproc poll' with this configuration",
        )
        return
    if state.problem:
        yield (
            Level.ERROR,
            f"it answers this command, but pollers report: {state.problem}. See 'What a poller "
            "says of a replica' in docs/operations/troubleshoot.md",
        )
    elif (age_s := snapshot.ages[id_]) > STALE_AFTER_S:
        yield Level.WARNING, f"its state is {age_s:.0f} s old. Is the poller that scrapes it alive?"
    if state.draining:
        yield (
            Level.WARNING,
            "draining: it gets no new requests. To use it again: extproc replicas undrain",
        )
