"""``extproc explain``: asks a running router, and prints."""

import argparse
import asyncio
import json

from extproc.cli.arguments import CommandError, whole
from extproc.cli.configuration import add_file, configured
from extproc.observe.client import AskError, ask_decisions
from extproc.observe.decision import read_decisions
from extproc.observe.explain import comparison, decisions

_LAST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [OPTION]... [REQUEST_ID]"
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "request_id",
        nargs="?",
        type=_request_id,
        metavar="REQUEST_ID",
        help="show the whole comparison for this request (its x-request-id)",
    )
    which.add_argument(
        "--last",
        type=whole(1),
        default=_LAST,
        metavar="N",
        help=f"show so many of the last decisions (default: {_LAST})",
    )
    parser.add_argument(
        "--router",
        metavar="URL",
        help="admin address of the router (default: serve.admin)",
    )
    parser.add_argument("--json", action="store_true", help="print what the router answers")
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Print the decisions."""
    config = configured(args)
    router = args.router or config.serve.admin
    try:
        answer = asyncio.run(ask_decisions(router, args.request_id, args.last, config.admin))
        if args.json:
            text = json.dumps(answer, indent=2)
        elif args.request_id is None:
            text = decisions(read_decisions(answer))
        else:
            text = "\n\n\n".join(map(comparison, read_decisions(answer)))
    except (AskError, OSError, ValueError) as error:
        raise CommandError(*str(error).splitlines()) from None
    print(text)
    return 0


def _request_id(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the request id is empty; without one, the last decisions are shown"
        )
    return text
