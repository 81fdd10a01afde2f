"""``extproc top`` and ``extproc explain``: print fleet and decisions of the running routers.

``top`` shows all routers and the dashboard of one router in the terminal, updated every second.
"""

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NoReturn

from msgspec import to_builtins

from extproc.cli.arguments import CommandError, whole
from extproc.cli.configuration import add_file, configured
from extproc.cli.routers import AskedRouter, routers_to_ask
from extproc.cli.screen import draw, screen
from extproc.config import AdminSettings, Config
from extproc.ground.runtime import started
from extproc.ground.text import WIDTH, printable
from extproc.observe.client import RouterUnavailableError, fetch_decisions, follow, url_of
from extproc.observe.decision import DecisionRecord, other_format
from extproc.observe.explain import comparison, decisions

_RETRY_S = 1.0
_LOOK_AGAIN_S = 2.0  # between two looks of ``top`` for the routers that Redis names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    router = "admin address of one router (default: all routers in Redis, or serve.admin)"
    if parser.prog.endswith("top"):
        parser.epilog = "Ctrl-C ends the command."
        parser.add_argument("--router", metavar="URL", help=router)
        once = "print once and exit, which is the default if the output is not a terminal"
        parser.add_argument("--once", action="store_true", help=once)
    else:
        parser.usage = "%(prog)s [OPTION]... [REQUEST_ID]"
        add = parser.add_mutually_exclusive_group().add_argument
        request = "compare all replicas for the request with this x-request-id"
        add("request_id", nargs="?", type=_request_id, metavar="REQUEST_ID", help=request)
        last = "number of decisions to show (default: %(default)s)"
        add("--last", type=whole(1), default=20, metavar="N", help=last)
        parser.add_argument("--router", metavar="URL", help=router)
        parser.add_argument("--json", action="store_true", help="print the decisions as JSON")
    add_file(parser)


def _request_id(text: str) -> str:
    if text.strip():
        return text
    raise argparse.ArgumentTypeError("the request id is empty; omit it to see the last decisions")


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    show = _top if args.command == "top" else _explain
    try:
        text = asyncio.run(show(args, config))
    except (RouterUnavailableError, OSError, ValueError) as error:
        raise CommandError(error) from None
    except KeyboardInterrupt:
        if args.command != "top":
            raise
        text = ""
    print(text)
    return 0


async def _explain(args: argparse.Namespace, config: Config) -> str:
    routers, notes = await routers_to_ask(args.router, config)
    found = list[tuple[DecisionRecord, str]]()

    async def ask(router: AskedRouter) -> None:
        try:
            asked = fetch_decisions(router.admin, args.request_id, args.last, config.admin)
            found.extend((record, router.name) for record in await asked)
        except RouterUnavailableError as error:
            router.failed(error)

    await asyncio.gather(*map(ask, routers))
    answered = [router for router in routers if not router.error]
    failures = (router.error for router in routers if router.error)
    problems = [*map(printable, (*notes, *failures))]
    if not answered:
        raise CommandError(*problems)
    if remark := other_format(record.version for record, _ in found):
        problems.append(remark)
    for problem in problems:
        print(f"extproc explain: {problem}", file=sys.stderr)
    found.sort(key=lambda pair: pair[0].decided_at)
    if args.request_id is None:
        found = found[-args.last :]
    elif not found:
        urls = printable(", ".join(url_of(router.admin, config.admin) for router in answered))
        raise CommandError(
            f"no decision about request {args.request_id!r} at {urls}: Envoy did not ask there, no "
            "replica was available, or the decision is no longer kept (serve.decisions_kept)"
        )
    if args.json:
        shown = [to_builtins(each) | ({"router": name} if name else {}) for each, name in found]
        return json.dumps(shown, indent=2)
    records, names = [record for record, _ in found], [name for _, name in found]
    if args.request_id is None:
        return decisions(records, names if any(names) else ())
    return "\n\n\n".join(map(comparison, records, names))


@dataclass(slots=True)
class _Shown:
    """Routers that ``top`` shows, and notes on missing ones; ``changed`` is set after a change."""

    routers: Sequence[AskedRouter] = ()
    notes: Sequence[str] = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)


async def _top(args: argparse.Namespace, config: Config) -> str:
    shown, terminal = _Shown(), sys.stdout.isatty()
    once, lines = args.once or not terminal, list[str]()
    async with started(_watch(shown, args, config)) as (watching,):
        watching.add_done_callback(lambda _: shown.changed.set())
        while not watching.done():
            routers = shown.routers
            complete = all(router.snapshot or router.error for router in routers)
            if any(router.snapshot for router in routers):
                if complete or not once:
                    width = shutil.get_terminal_size().columns if terminal else WIDTH
                    lines = screen(routers, shown.notes, width)
                    if once:
                        return "\n".join(lines)
                    draw(lines)
            elif routers and complete:
                errors = (router.error for router in routers)
                problems = [*map(printable, (*shown.notes, *errors))]
                if not lines:
                    raise CommandError(*problems)
                draw([*problems, "", *lines])
            await shown.changed.wait()
            shown.changed.clear()
    return watching.result()  # raises the error that ended it


async def _watch(shown: _Shown, args: argparse.Namespace, config: Config) -> NoReturn:
    """Follow the routers to ask, as Redis names them from time to time, until cancelled."""
    followers = dict[AskedRouter, asyncio.Task[NoReturn]]()
    try:
        while True:
            routers, notes = await routers_to_ask(args.router, config)
            if routers[0].name or not followers:  # else Redis names no router: keep the last ones
                shown.notes = notes
                followed = {router: router for router in followers}
                shown.routers = [followed.get(router, router) for router in routers]
                for router in followed.keys() - set(routers):
                    followers.pop(router).cancel()
                for router in set(routers) - followed.keys():
                    follower = _follow(router, config.admin, shown.changed)
                    followers[router] = asyncio.create_task(follower)
                shown.changed.set()
            await asyncio.sleep(_LOOK_AGAIN_S)
    finally:
        for task in followers.values():
            task.cancel()
        await asyncio.gather(*followers.values(), return_exceptions=True)


async def _follow(router: AskedRouter, access: AdminSettings, changed: asyncio.Event) -> NoReturn:
    """Read the router's snapshots until cancelled; set ``changed`` after each snapshot and after
    each failure."""
    while True:
        try:
            async with aclosing(follow(router.admin, access)) as snapshots:
                async for snapshot in snapshots:
                    router.snapshot, router.error = snapshot, ""
                    changed.set()
        except (RouterUnavailableError, OSError, ValueError) as error:
            router.failed(error)
            changed.set()
        await asyncio.sleep(_RETRY_S)
