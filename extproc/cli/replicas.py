"""``extproc replicas``: shows the replicas of a pool, and has pollers drain them."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from msgspec import structs
from redis.exceptions import RedisError, ResponseError

from extproc.cli.arguments import CommandError, Parser, UsageError, number
from extproc.cli.configuration import add_file, add_flag, configured
from extproc.config import RedisSettings
from extproc.ground.address import with_name
from extproc.ground.clock import monotonic, wall
from extproc.ground.text import Cells, Column, count, figure, printable, share, suggest, table_of
from extproc.replica_state import ReplicaState
from extproc.share.connection import address, connect
from extproc.share.drains import DrainStore
from extproc.share.replicas import StateReader

_LOOK_EVERY_S = 0.1  # between two looks at a draining replica; scrapes come every `poll.interval_s`
_IN_A_ROW = 2  # scrapes that must find it empty: a request may have been on its way at the first


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        pool = "the pool it is about (default: key pool)"
        one.add_argument("--pool", dest="about", metavar="NAME", help=pool)
        add_flag(one, "redis.url")
        return one

    drain = action("drain", "Sends nothing new to a replica; what it has goes on.", "REPLICA")
    wait = "return when it is empty; fail where it is not after so long"
    drain.add_argument("--wait", type=number, metavar="SECONDS", help=wait)
    action("undrain", "Sends requests to a drained replica again.", "REPLICA")
    listing = action("list", "Shows the pool's replicas.")
    everything = "print everything that is known of them"
    listing.add_argument("--json", action="store_true", help=everything)


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    if config.state == "memory":
        raise UsageError("state is 'memory': the router's own configuration says which there are")
    pool = args.about or config.pool
    known = [one.pool for one in config.each_pool]
    if config.pools and pool not in known:
        raise UsageError(f"no pool is configured as {pool!r}{suggest(pool, known)}")
    try:
        print(asyncio.run(_run(args, config.redis, pool)))
    except ValueError as error:
        raise UsageError(error) from None
    return 0


async def _run(args: argparse.Namespace, settings: RedisSettings, pool: str) -> str:
    async with connect(settings, pool) as redis:
        try:
            drains, states = DrainStore(redis, pool), StateReader(redis, pool, Random())
            replicas = await _replicas(drains, states)
            if args.action == "list":
                return _listed(replicas, pool, args.json)
            replica = _find(replicas, args.replica, pool)
            await drains.write({replica.id: args.action == "drain"})
            if args.action == "undrain":
                was = "takes requests again" if replica.drained else "was not drained"
                return f"{replica.title} {was}"
            answer = f"{replica.title} is draining"
            answer += f": {_load(replica.state)}" if replica.state else ""
            if not _served_without(replica, replicas):
                answer += "\nno other replica could serve its requests: "
                answer += "until one does, it goes on getting them"
            if args.wait is None:
                return answer
            print(answer, flush=True)
            return await _until_empty(states, replica, args.wait)
        except (RedisError, OSError) as error:  # refuses: no right to, no memory left
            does = "refuses" if isinstance(error, ResponseError) else "does not answer"
            where = f"Redis at {address(redis)} (redis.url)"
            raise CommandError(f"{where} {does}: {error}") from None


@dataclass(frozen=True, slots=True)
class PoolReplica:
    """A replica as Redis knows it."""

    id: str  # ip:port
    state: ReplicaState | None  # None: no poller has seen it yet, or not for long
    drained: bool  # by command

    @property
    def name(self) -> str:
        return (self.state.name if self.state else "") or self.id

    @property
    def title(self) -> str:
        return with_name(self.id, self.name)

    @property
    def condition(self) -> str:
        """Health in a word, or the problem that keeps requests away."""
        if (state := self.state) is None:
            return "drained, not polled"
        health = "" if state.healthy else state.problem or "not healthy"
        return ", ".join(filter(None, ("draining" * state.draining, health))) or "healthy"

    @property
    def speed(self) -> tuple[float | None, float | None]:
        """Step time in ms and prefilled tokens a second, where work of the replica taught them."""
        step = self.state.learned if self.state and self.state.measured else None
        if step is None:
            return None, None
        return (step.c0 + step.c_batch) * 1e3, 1 / step.c_prefill if step.c_prefill else None

    def age(self, now: float) -> float | None:
        """Seconds since the last good scrape."""
        scraped_at = self.state.scraped_at if self.state else 0.0
        return max(now - scraped_at, 0.0) if scraped_at else None

    def to_json(self, now: float) -> dict[str, Any]:
        seen = structs.asdict(self.state) if self.state else {"name": self.name}
        more = {"id": self.id, "state": self.condition, "drained": self.drained}
        return more | {"age_s": self.age(now)} | seen


async def _replicas(drains: DrainStore, states: StateReader) -> list[PoolReplica]:
    """Read the replicas that pollers see or commands drain, by name."""
    drained = {id_ for id_, drains in (await drains.read()).items() if drains}
    seen = {state.id: state for state in (await states.read()).states}
    known = [PoolReplica(id_, seen.get(id_), id_ in drained) for id_ in drained | seen.keys()]
    return sorted(known, key=lambda replica: (replica.name, replica.id))


def _find(replicas: Sequence[PoolReplica], word: str, pool: str) -> PoolReplica:
    """Find the replica by address or name."""
    found = [one for one in replicas if word in (one.id, one.name)]
    if len(found) > 1:
        ids = ", ".join(one.id for one in found)
        raise CommandError(f"{len(found)} replicas are called {word!r}: say which of {ids}")
    if not found:
        known = [part for one in replicas for part in (one.id, one.name)]
        hint = suggest(word, known) if known else ": no replica is; does a poller run?"
        raise CommandError(f"{word!r} is not in the pool {pool!r}{hint}")
    return found[0]


def _served_without(replica: PoolReplica, replicas: Sequence[PoolReplica]) -> bool:
    """Tell whether every model of the replica has another one, healthy and not draining."""
    others = [
        set(one.state.models)
        for one in replicas
        if one.state and one.id != replica.id and not one.drained and one.condition == "healthy"
    ]
    models = set(replica.state.models if replica.state else ())
    return bool(others) and models <= set.union(*others)


async def _until_empty(states: StateReader, replica: PoolReplica, seconds: float) -> str:
    """Wait until nothing runs or waits on a draining replica, by its own metrics."""
    started = monotonic()
    empty: set[float] = set()  # times of scrapes
    while True:
        state = next(iter((await states.read([replica.id])).states), None)
        if state and state.draining and state.healthy and not state.running + state.waiting:
            empty.add(state.scraped_at)
        else:
            empty.clear()
        waited = monotonic() - started
        if len(empty) == _IN_A_ROW:
            return f"{replica.title} is empty after {waited:.1f} s"
        if waited >= seconds:
            what = f"{replica.title} {_left(state)} after {seconds:g} s"
            raise CommandError(f"{what}; it goes on draining")
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


def _listed(replicas: Sequence[PoolReplica], pool: str, as_json: bool) -> str:
    now = wall()
    if as_json:
        return json.dumps([one.to_json(now) for one in replicas], indent=2, default=asdict)
    if not replicas:
        return f"nothing is known of a replica in the pool {pool!r}: does a poller run?"
    cells: Cells[PoolReplica] = (
        (Column("name", left=True, most=24), lambda one: printable(one.name)),
        (Column("address", left=True), lambda one: one.id),
        (Column("state", left=True, most=40), lambda one: printable(one.condition)),
        (Column("running"), lambda one: count(one.state.running if one.state else None)),
        (Column("waiting"), lambda one: count(one.state.waiting if one.state else None)),
        (Column("KV"), lambda one: share(one.state.kv_usage if one.state else None)),
        (Column("step ms"), lambda one: figure(one.speed[0])),
        (Column("prefill tok/s"), lambda one: count(one.speed[1])),
        (Column("age s"), lambda one: figure(one.age(now))),
    )
    return "\n".join(table_of(cells, replicas))
