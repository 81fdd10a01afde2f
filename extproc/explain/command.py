"""``extproc explain``: asks a running router, and prints."""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from extproc import settings
from extproc.explain.ask import Asker, AskError
from extproc.explain.records import RECORDS
from extproc.explain.show import comparison, decisions

_LAST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
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
        type=_positive,
        default=_LAST,
        metavar="N",
        help=f"show so many of the last decisions (default: {_LAST})",
    )
    parser.add_argument(
        "--router", metavar="URL", help="admin address of the router (default: serve.admin)"
    )
    parser.add_argument("--json", action="store_true", help="print what the router answers")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"YAML file (or the variable {settings.ENV_FILE})",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the decisions; 1 where there is no router, or no such request, else 0."""
    try:
        asker = Asker(args.router or _configured(args.config))
        answer = asyncio.run(_ask(asker, args))
        text = json.dumps(answer, indent=2) if args.json else _text(asker, args, answer)
    except (settings.ConfigError, AskError) as error:
        print(f"extproc explain: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


async def _ask(asker: Asker, args: argparse.Namespace) -> list[Any]:
    if args.request_id is not None:
        return await asker.of_request(args.request_id)
    return await asker.last(args.last)


def _text(asker: Asker, args: argparse.Namespace, answer: list[Any]) -> str:
    try:
        records = RECORDS.validate_python(answer)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise AskError(
            f"the decisions of {asker.url} cannot be read ({where}): is the router of another "
            "version? Try --json"
        ) from None
    if args.request_id is None:
        return decisions(records)
    return "\n\n\n".join(map(comparison, records))


def _configured(file: Path | None) -> str:
    return settings.load({}, os.environ, file).serve.admin


def _request_id(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the request id is empty; without one, the last decisions are shown"
        )
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
