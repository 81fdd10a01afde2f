"""``extproc replicas``: shows the replicas of a pool, and has pollers drain them."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from extproc.cli.arguments import CommandError, Parser, UsageError, number
from extproc.cli.configuration import add_file, add_flag, configured
from extproc.config import Config
from extproc.ground.address import with_name
from extproc.ground.clock import Clock, monotonic, wall
from extproc.ground.text import Cells, Column, count, figure, printable, share, suggest, table_of
from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState
from extproc.share.connection import address, connect
from extproc.share.drains import DrainStore
from extproc.share.replicas import StateReader

_LOOK_EVERY_S = 0.1  # between two looks at a draining replica; scrapes come every `poll.interval_s`
_IN_A_ROW = 2  # scrapes that must find it empty: a request may have been on its way at the first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions and their options."""
    parser.usage = "%(prog)s ACTION [OPTION]..."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog=parser.prog, parser_class=Parser
    )

    def action(name: str, does: str, about: str = "") -> Parser:
        usage = f"%(prog)s [OPTION]... {about}".rstrip()
        one = actions.add_parser(name, help=does, description=does, usage=usage)
        if about:
            one.add_argument("replica", metavar=about, help="address or name")
        add_file(one)
        one.add_argument(
            "--pool", dest="about", metavar="NAME", help="the pool it is about (default: key pool)"
        )
        add_flag(one, "redis.url")
        return one

    one = action("drain", "Sends nothing new to a replica; what it has goes on.", "REPLICA")
    one.add_argument(
        "--wait",
        type=number,
        metavar="SECONDS",
        help="return when it is empty; fail where it is not after so long",
    )
    action("undrain", "Sends requests to a drained replica again.", "REPLICA")
    one = action("list", "Shows the pool's replicas.")
    one.add_argument("--json", action="store_true", help="print everything that is known of them")


def run(args: argparse.Namespace) -> int:
    """Carries out the action and prints its result."""
    config = configured(args)
    if config.state == "memory":
        raise UsageError("state is 'memory': the router's own configuration says which there are")
    pool = args.about or config.pool
    known = [one.pool for one in config.each_pool]
    if config.pools and pool not in known:
        raise UsageError(f"no pool is configured as {pool!r}{suggest(pool, known)}")
    try:
        print(asyncio.run(_run(args, config, pool)))
    except ValueError as error:
        raise UsageError(error) from None
    return 0


async def _run(args: argparse.Namespace, config: Config, name: str) -> str:
    async with connect(config.redis, name) as redis:
        try:
            return await _do(args, Pool(redis, name))
        except (RedisError, OSError) as error:  # refuses: no right to, no memory left
            refuses = "refuses" if isinstance(error, ResponseError) else "does not answer"
            raise CommandError(
                f"Redis at {address(redis)} (redis.url) {refuses}: {error}"
            ) from None


async def _do(args: argparse.Namespace, pool: "Pool") -> str:
    replicas = await pool.replicas()
    if args.action == "list":
        if args.json:
            return json.dumps(
                [as_json(replica, wall()) for replica in replicas], indent=2, default=asdict
            )
        if not replicas:
            return f"nothing is known of a replica in the pool {pool.name!r}: does a poller run?"
        return as_table(replicas, wall())
    replica = pool.find(replicas, args.replica)
    if args.action == "undrain":
        await pool.drains.write({replica.id: False})
        return f"{replica.title} {'takes requests again' if replica.drained else 'was not drained'}"
    await pool.drains.write({replica.id: True})
    told = f"{replica.title} is draining" + (f": {_load(replica.state)}" if replica.state else "")
    if not _served_without(replica, replicas):
        told += (
            "\nno other replica could serve its requests: until one does, it goes on getting them"
        )
    if args.wait is None:
        return told
    print(told, flush=True)
    return await until_empty(pool, replica, args.wait, monotonic)


# -- the pool -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replica:
    """The state of one replica in Redis."""

    id: str  # ip:port
    state: ReplicaState | None  # None: no poller has seen it yet, or not for long
    drained: bool  # by command

    @property
    def name(self) -> str:
        return (self.state.name if self.state else "") or self.id

    @property
    def title(self) -> str:
        return with_name(self.id, self.name)


class Pool:
    """A pool as Redis holds it: what pollers saw, and what commands drain."""

    def __init__(self, redis: Redis, name: str) -> None:
        self.name = name
        self.drains = DrainStore(redis, name)
        self._states = StateReader(redis, name, Random())

    async def replicas(self) -> list[Replica]:
        """Returns the replicas that pollers see or commands drain, by name."""
        drained = {id_ for id_, drains in (await self.drains.read()).items() if drains}
        states = {state.id: state for state in (await self._states.read()).states}
        known = [Replica(id_, states.get(id_), id_ in drained) for id_ in drained | states.keys()]
        return sorted(known, key=lambda replica: (replica.name, replica.id))

    async def state(self, replica: str) -> ReplicaState | None:
        """Returns the state of one replica now."""
        return next(iter((await self._states.read([replica])).states), None)

    def find(self, replicas: Sequence[Replica], word: str) -> Replica:
        """Returns the replica with an address or a name."""
        found = [one for one in replicas if word in (one.id, one.name)]
        if len(found) > 1:
            ids = ", ".join(one.id for one in found)
            raise CommandError(f"{len(found)} replicas are called {word!r}: say which of {ids}")
        if not found:
            known = [part for one in replicas for part in (one.id, one.name)]
            hint = suggest(word, known) if known else ": no replica is; does a poller run?"
            raise CommandError(f"{word!r} is not in the pool {self.name!r}{hint}")
        return found[0]


def _served_without(replica: Replica, replicas: Sequence[Replica]) -> bool:
    """Tells whether every model it serves has another replica, healthy and not draining."""
    others = [
        one.state
        for one in replicas
        if one.state
        and one.id != replica.id
        and one.state.healthy
        and not one.drained
        and not one.state.draining  # Kubernetes may be draining it
    ]
    models = replica.state.models if replica.state else ()
    return bool(others) and all(any(model in state.models for state in others) for model in models)


async def until_empty(pool: Pool, replica: Replica, seconds: float, clock: Clock) -> str:
    """Waits until nothing runs or waits on a draining replica, by its own metrics."""
    started = clock()
    empty: set[float] = set()  # times of scrapes
    while True:
        state = await pool.state(replica.id)
        if state and state.draining and state.healthy and not state.running + state.waiting:
            empty.add(state.scraped_at)
        else:
            empty.clear()
        if len(empty) == _IN_A_ROW:
            return f"{replica.title} is empty after {clock() - started:.1f} s"
        if clock() - started >= seconds:
            raise CommandError(
                f"{replica.title} {_left(state)} after {seconds:g} s; it goes on draining"
            )
        await asyncio.sleep(_LOOK_EVERY_S)


def _load(state: ReplicaState) -> str:
    return f"{state.running} running and {state.waiting} waiting"


def _left(state: ReplicaState | None) -> str:
    if state is None:
        return "is not polled, so that nobody knows what it has (does a poller run?),"
    if not state.healthy:
        return f"does not answer ({state.problem}); it was last seen with {_load(state)}"
    if not state.draining:
        return "was not taken up by a poller (does one run?)"
    return f"has {_load(state)}"


# -- list -----------------------------------------------------------------------------------


def as_table(replicas: Sequence[Replica], now: float) -> str:
    """Makes a row for each; step time and prefill speed only where its work taught them."""
    cells: Cells[Replica] = (
        (Column("name", left=True, most=24), lambda one: printable(one.name)),
        (Column("address", left=True), lambda one: one.id),
        (Column("state", left=True, most=40), lambda one: printable(_condition(one))),
        (Column("running"), lambda one: count(getattr(one.state, "running", None))),
        (Column("waiting"), lambda one: count(getattr(one.state, "waiting", None))),
        (Column("KV"), lambda one: share(getattr(one.state, "kv_usage", None))),
        (Column("step ms"), lambda one: figure(_step_ms(one))),
        (Column("prefill tok/s"), lambda one: count(_prefill_per_s(one))),
        (Column("age s"), lambda one: figure(_age(one, now))),
    )
    return "\n".join(table_of(cells, replicas))


def as_json(replica: Replica, now: float) -> dict[str, Any]:
    """Returns everything that is known of one replica."""
    seen = structs.asdict(replica.state) if replica.state else {"name": replica.name}
    more = {"id": replica.id, "state": _condition(replica), "drained": replica.drained}
    return more | {"age_s": _age(replica, now)} | seen


def _condition(replica: Replica) -> str:
    """Tells in a word, or by the problem, whether the replica gets requests."""
    state = replica.state
    if state is None:
        return "drained, not polled"
    health = "" if state.healthy else state.problem or "not healthy"
    draining = "draining" if state.draining else ""
    return ", ".join(filter(None, (draining, health))) or "healthy"


def _speed(replica: Replica) -> StepModel | None:
    return replica.state.learned if replica.state and replica.state.measured else None


def _step_ms(replica: Replica) -> float | None:
    return (speed.c0 + speed.c_batch) * 1e3 if (speed := _speed(replica)) else None


def _prefill_per_s(replica: Replica) -> float | None:
    return 1 / speed.c_prefill if (speed := _speed(replica)) and speed.c_prefill else None


def _age(replica: Replica, now: float) -> float | None:
    """Seconds since the last good scrape."""
    scraped_at = replica.state.scraped_at if replica.state else 0.0
    return max(now - scraped_at, 0.0) if scraped_at else None
