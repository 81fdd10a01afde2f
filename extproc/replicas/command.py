"""``extproc replicas``: asks Redis, or has pollers do something through it."""

import argparse
import asyncio
import json
import os
import sys

from redis.exceptions import RedisError, ResponseError

from extproc import settings
from extproc.clock import monotonic, wall
from extproc.config import Config
from extproc.predict.hardware import DEFAULT_PROFILE
from extproc.replicas.change import add, drain, remove
from extproc.replicas.pool import Pool, Replica, ReplicaError
from extproc.replicas.show import as_json, as_table
from extproc.replicas.wait import left, until_empty
from extproc.store.connection import address, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the four commands and their flags."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def command(name: str, does: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        settings.add_arguments(one, "redis.")
        one.add_argument("--pool", metavar="NAME", help="the pool it is about (default: key pool)")
        return one

    one = command("add", "Adds a replica, or takes back that it drains or was removed.")
    one.add_argument("replica", metavar="HOST:PORT", help="as Envoy knows it")
    one.add_argument("--profile", help=f"hardware profile (default: {DEFAULT_PROFILE})")
    one.add_argument("--name", help="what people call it (default: its address)")
    one = command("drain", "Sends nothing new to a replica; what it has goes on.")
    one.add_argument("replica", metavar="REPLICA", help="address or name")
    one.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help="return when it is empty; fail where it is not after so long",
    )
    one = command("remove", "Takes a replica out of the pool, even one that the file or DNS names.")
    one.add_argument("replica", metavar="REPLICA", help="address or name")
    one = command("list", "Shows the pool's replicas.")
    one.add_argument("--json", action="store_true", help="print everything that is known of them")


def run(args: argparse.Namespace) -> int:
    """Does it and prints what was done; 1 where that was not possible, else 0."""
    try:
        flags = {key: text for key, text in settings.flags_of(args).items() if key != "pool"}
        config = settings.load(flags, os.environ, args.config)
        print(asyncio.run(_run(args, config)))
    except settings.ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except ReplicaError as error:
        print(f"extproc replicas: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(args: argparse.Namespace, config: Config) -> str:
    if config.state == "memory":
        raise ReplicaError("state is 'memory': the router's own configuration says which there are")
    pool = _pool(args.pool, config)
    async with connect(config.redis.url, pool) as redis:
        try:
            return await _do(args, Pool(redis, pool))
        except ResponseError as error:  # no right to, no memory left
            raise ReplicaError(f"Redis at {address(redis)} (redis.url) refuses: {error}") from None
        except (RedisError, OSError) as error:
            raise ReplicaError(
                f"Redis at {address(redis)} (redis.url) does not answer: {error}"
            ) from None


def _pool(name: str | None, config: Config) -> str:
    known = [one.pool for one in config.each_pool]
    if name and config.pools and name not in known:
        raise ReplicaError(f"no pool is configured as {name!r}{settings.nearest(name, known)}")
    return name or config.pool


async def _do(args: argparse.Namespace, pool: Pool) -> str:
    match args.action:
        case "add":
            return await add(pool, args.replica, args.profile, args.name)
        case "remove":
            return await remove(pool, args.replica)
        case "drain":
            return await _drain(args, pool)
    replicas, now = await pool.replicas(), wall()
    if args.json:
        return json.dumps([as_json(replica, now) for replica in replicas], indent=2)
    if not replicas:
        return f"nothing is known of a replica in the pool {pool.name!r}: does a poller run?"
    return as_table(replicas, now)


async def _drain(args: argparse.Namespace, pool: Pool) -> str:
    replica = await drain(pool, args.replica)
    state = replica.state
    text = f"{replica.title} is draining" + (f": {left(state)}" if state else "")
    if not _served_without(replica, await pool.replicas()):
        text += (
            "\nno other replica could serve its requests: until one does, it goes on getting them"
        )
    if args.wait is None:
        return text
    print(text, flush=True)
    return await until_empty(pool, replica, args.wait, monotonic)


def _served_without(replica: Replica, replicas: list[Replica]) -> bool:
    """Whether every model it serves has another replica that is healthy and does not drain."""
    others = [
        one.state
        for one in replicas
        if one.state and one.id != replica.id and one.state.healthy and one.wish == "serve"
    ]
    models = replica.state.models if replica.state else ()
    return bool(others) and all(any(model in state.models for state in others) for model in models)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
