"""``extproc replicas``: asks Redis, or has pollers do something through it."""

import argparse
import asyncio
import json

from redis.exceptions import RedisError, ResponseError

from extproc.cli.arguments import CommandError, Parser, UsageError, number
from extproc.cli.configuration import add_file, add_flag, configured
from extproc.config import Config
from extproc.ground.clock import monotonic, wall
from extproc.ground.text import suggest
from extproc.predict.hardware import DEFAULT_PROFILE
from extproc.replicas.change import add, drain, remove
from extproc.replicas.pool import Pool, ReplicaError
from extproc.replicas.show import as_json, as_table
from extproc.replicas.wait import until_empty
from extproc.share.connection import address, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the four actions and their options."""
    parser.usage = "%(prog)s ACTION [OPTION]..."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog=parser.prog, parser_class=Parser
    )

    def action(name: str, does: str, about: str = "", which: str = "") -> Parser:
        usage = f"%(prog)s [OPTION]... {about}".rstrip()
        one = actions.add_parser(name, help=does, description=does, usage=usage)
        if about:
            one.add_argument("replica", metavar=about, help=which)
        add_file(one)
        one.add_argument(
            "--pool", dest="about", metavar="NAME", help="the pool it is about (default: key pool)"
        )
        add_flag(one, "redis.url")
        return one

    does = "Adds a replica, or takes back that it drains or was removed."
    one = action("add", does, "HOST:PORT", "as Envoy knows it")
    one.add_argument("--profile", help=f"hardware profile (default: {DEFAULT_PROFILE})")
    one.add_argument("--name", help="what people call it (default: its address)")
    does = "Sends nothing new to a replica; what it has goes on."
    one = action("drain", does, "REPLICA", "address or name")
    one.add_argument(
        "--wait",
        type=number,
        metavar="SECONDS",
        help="return when it is empty; fail where it is not after so long",
    )
    does = "Takes a replica out of the pool, even one that the file or DNS names."
    action("remove", does, "REPLICA", "address or name")
    one = action("list", "Shows the pool's replicas.")
    one.add_argument("--json", action="store_true", help="print everything that is known of them")


def run(args: argparse.Namespace) -> int:
    """Does it and prints what was done."""
    config = configured(args)
    try:
        print(asyncio.run(_run(args, config)))
    except ReplicaError as error:
        raise CommandError(error) from None
    except ValueError as error:
        raise UsageError(error) from None
    return 0


async def _run(args: argparse.Namespace, config: Config) -> str:
    if config.state == "memory":
        raise UsageError("state is 'memory': the router's own configuration says which there are")
    pool = args.about or config.pool
    known = [one.pool for one in config.each_pool]
    if config.pools and pool not in known:
        raise UsageError(f"no pool is configured as {pool!r}{suggest(pool, known)}")
    async with connect(config.redis, pool) as redis:
        try:
            return await _do(args, Pool(redis, pool))
        except (RedisError, OSError) as error:  # refuses: no right to, no memory left
            refuses = "refuses" if isinstance(error, ResponseError) else "does not answer"
            raise ReplicaError(
                f"Redis at {address(redis)} (redis.url) {refuses}: {error}"
            ) from None


async def _do(args: argparse.Namespace, pool: Pool) -> str:
    match args.action:
        case "add":
            return await add(pool, args.replica, args.profile, args.name)
        case "remove":
            return await remove(pool, args.replica)
        case "drain":
            replica, told = await drain(pool, args.replica)
            if args.wait is None:
                return told
            print(told, flush=True)
            return await until_empty(pool, replica, args.wait, monotonic)
    replicas, now = await pool.replicas(), wall()
    if args.json:
        return json.dumps([as_json(replica, now) for replica in replicas], indent=2)
    if not replicas:
        return f"nothing is known of a replica in the pool {pool.name!r}: does a poller run?"
    return as_table(replicas, now)
