"""``extproc replicas``: lists the replicas of a pool and drains them."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import structs
from redis.exceptions import RedisError

from extproc.cli.arguments import CommandError, Parser, UsageError, number
from extproc.cli.configuration import add_file, add_flag, configured
from extproc.config import RedisSettings
from extproc.ground.address import with_name
from extproc.ground.clock import monotonic, wall
from extproc.ground.text import Cells, Column, count, figure, printable, share, suggest, table_of
from extproc.replica_state import ReplicaState
from extproc.share.assignment import known_pollers
from extproc.share.connection import address, connect
from extproc.share.drains import DrainStore
from extproc.share.envelope import Skips
from extproc.share.replicas import StateReader

_CHECK_EVERY_S = 0.1  # between reads of a draining replica's state
_EMPTY_SCRAPES = 3
"""Scrapes in a row without requests that show an empty replica. The first may be older than the
drain; at the second, a request may be in transit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s ACTION [OPTION]..."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog=parser.prog, parser_class=Parser
    )

    def action(name: str, help: str, argument: str = "") -> Parser:
        usage = f"%(prog)s [OPTION]... {argument}".rstrip()
        command = actions.add_parser(name, help=help, description=help, usage=usage)
        if argument:
            command.add_argument("replica", metavar=argument, help="address or name")
        add_file(command)
        pool = "pool of the replicas (default: the configuration's pool)"
        command.add_argument("--pool", dest="about", metavar="NAME", help=pool)
        add_flag(command, "redis.url")
        return command

    drain = action("drain", "Sends no new requests to a replica; its requests go on.", "REPLICA")
    wait = "wait until the replica has no requests; fail after this time"
    drain.add_argument("--wait", type=number, metavar="SECONDS", help=wait)
    action("undrain", "Sends requests to a drained replica again.", "REPLICA")
    listing = action("list", "Lists the replicas of a pool.")
    listing.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    if config.state == "memory":
        raise UsageError(
            "this command needs Redis, but state is 'memory'; "
            "use 'extproc top' to see the router's replicas"
        )
    pool = args.about or config.pool
    known = [each.pool for each in config.each_pool]
    if config.pools and pool not in known:
        raise UsageError(f"no pool {pool!r} is configured{suggest(pool, known)}")
    asyncio.run(_print(_results(args, config.redis, pool)))
    return 0


async def _print(results: AsyncIterator[str]) -> None:
    async for result in results:
        print(result, flush=True)


async def _results(
    args: argparse.Namespace, settings: RedisSettings, pool: str
) -> AsyncIterator[str]:
    """Carry out the action; yield the texts to print, each as soon as it is known. The caller
    prints: an OSError of the output is no error of Redis."""
    async with connect(settings, pool) as redis:
        try:
            drains, states = DrainStore(redis, pool), StateReader(redis, pool)
            replicas = await _replicas(drains, states)
            if args.action == "list":
                if not replicas and not (await known_pollers(redis, pool, Skips()))[0]:
                    raise CommandError(f"nothing is known of pool {pool!r}: no poller of it runs")
                yield _listed(replicas, pool, args.json)
                return
            replica = _find(replicas, args.replica, pool)
            await drains.write({replica.id: args.action == "drain"})
            if args.action == "undrain":
                result = "gets requests again" if replica.drained else "was not drained"
                yield f"{replica.title} {result}"
                return
            text = f"{replica.title} is draining"
            text += f": {_load(replica.state)}" if replica.state else ""
            if not _is_replaceable(replica, replicas):
                text += "\nno other replica can serve its models: this replica still gets requests"
            yield text
            if args.wait is not None:
                yield await _until_empty(states, replica, args.wait)
        except (RedisError, OSError) as error:
            raise CommandError(f"Redis at {address(redis)} (redis.url): {error}") from None


@dataclass(frozen=True, slots=True)
class PoolReplica:
    """Replica of a pool, with its state in Redis."""

    id: str  # ip:port
    state: ReplicaState | None  # None: no poller has written it yet, or it has expired
    drained: bool  # by ``extproc replicas drain``

    @property
    def name(self) -> str:
        return (self.state.name if self.state else "") or self.id

    @property
    def title(self) -> str:
        return printable(with_name(self.id, self.name))

    @property
    def condition(self) -> str:
        """Health in one word, or the reason why the replica gets no requests."""
        if (state := self.state) is None:
            return "drained, not polled"
        health = state.problem or "asleep" * state.asleep
        return ", ".join(filter(None, ("draining" * state.draining, health))) or "healthy"

    @property
    def speed(self) -> tuple[float | None, float | None]:
        """Step time in ms and prefilled tokens per second, if measured."""
        step = self.state.learned if self.state and self.state.measured else None
        if step is None:
            return None, None
        return (step.c0 + step.c_batch) * 1e3, 1 / step.c_prefill if step.c_prefill else None

    def age(self, now: float) -> float | None:
        """Seconds since the last good scrape."""
        scraped_at = self.state.scraped_at if self.state else 0.0
        return max(now - scraped_at, 0.0) if scraped_at else None

    def to_json(self, now: float) -> dict[str, Any]:
        state = structs.asdict(self.state) if self.state else {"name": self.name}
        return {
            "id": self.id,
            "state": self.condition,
            "drained": self.drained,
            "age_s": self.age(now),
            **state,
        }


async def _replicas(drains: DrainStore, states: StateReader) -> list[PoolReplica]:
    """Read all replicas that pollers scrape or that a command drained, sorted by name."""
    drained = {id_ for id_, is_drained in (await drains.read()).items() if is_drained}
    polled = {state.id: state for state in (await states.read()).states}
    known = [PoolReplica(id_, polled.get(id_), id_ in drained) for id_ in drained | polled.keys()]
    return sorted(known, key=lambda replica: (replica.name, replica.id))


def _find(replicas: Sequence[PoolReplica], word: str, pool: str) -> PoolReplica:
    found = [replica for replica in replicas if word in (replica.id, replica.name)]
    if len(found) > 1:
        ids = ", ".join(replica.id for replica in found)
        raise CommandError(f"{len(found)} replicas have the name {word!r}: use an address: {ids}")
    if not found:
        known = [part for replica in replicas for part in (replica.id, replica.name)]
        hint = suggest(word, known) if known else ", which has no replicas: does a poller run?"
        raise CommandError(f"{word!r} is not a replica of the pool {pool!r}{hint}")
    return found[0]


def _is_replaceable(replica: PoolReplica, replicas: Sequence[PoolReplica]) -> bool:
    """Return true if other healthy replicas serve every model of the replica."""
    others = [
        set(other.state.models)
        for other in replicas
        if other.state
        and other.id != replica.id
        and not other.drained
        and other.condition == "healthy"
    ]
    models = set(replica.state.models if replica.state else ())
    return bool(others) and models <= set.union(*others)


async def _until_empty(states: StateReader, replica: PoolReplica, seconds: float) -> str:
    """Wait up to ``seconds`` until the replica shows no requests; return the line to print."""
    started = monotonic()
    empty: set[float] = set()  # times of scrapes; a failed scrape leaves the last time
    while True:
        state = next(iter((await states.read([replica.id])).states), None)
        if state and state.draining and state.scraped_at and not state.running + state.waiting:
            empty.add(state.scraped_at)
        else:
            empty.clear()
        waited = monotonic() - started
        if len(empty) == _EMPTY_SCRAPES:
            return f"{replica.title} is empty after {waited:.1f} s"
        if waited >= seconds:
            raise CommandError(
                f"after {seconds:g} s, {replica.title} {_still_busy(state)}; "
                "the drain stays in effect"
            )
        await asyncio.sleep(_CHECK_EVERY_S)


def _load(state: ReplicaState) -> str:
    return f"{state.running} running and {state.waiting} waiting"


def _still_busy(state: ReplicaState | None) -> str:
    if state is None:
        return "is not polled, so its requests are unknown (does a poller run?)"
    if not state.draining:
        return "is not draining yet, because no poller applied the drain (does a poller run?)"
    if not state.healthy:
        return f"is unhealthy ({printable(state.problem)}) and last had {_load(state)}"
    return f"has {_load(state)}"


def _listed(replicas: Sequence[PoolReplica], pool: str, as_json: bool) -> str:
    now = wall()
    if as_json:
        return json.dumps([replica.to_json(now) for replica in replicas], indent=2, default=asdict)
    if not replicas:
        return f"the pool {pool!r} has no replicas: its pollers know none"
    cells: Cells[PoolReplica] = (
        (Column("name", left=True, most=24), lambda replica: printable(replica.name)),
        (Column("address", left=True), lambda replica: replica.id),
        (Column("running"), lambda replica: count(replica.state and replica.state.running)),
        (Column("waiting"), lambda replica: count(replica.state and replica.state.waiting)),
        (Column("KV"), lambda replica: share(replica.state and replica.state.kv_usage)),
        (Column("step ms"), lambda replica: figure(replica.speed[0])),
        (Column("prefill tok/s"), lambda replica: count(replica.speed[1])),
        (Column("age s"), lambda replica: figure(replica.age(now))),
        (Column("state", left=True), lambda replica: printable(replica.condition)),
    )
    return "\n".join(table_of(cells, replicas))
