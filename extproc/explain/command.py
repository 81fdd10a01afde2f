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
        "--router",
        metavar="URL",
        help="admin address of one router (default: serve.admin, and those of its workers)",
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
        askers = [Asker(args.router)] if args.router else _configured(args.config)
        answer = asyncio.run(_ask_all(askers, args))
        text = json.dumps(answer, indent=2) if args.json else _text(askers[0], args, answer)
    except (settings.ConfigError, AskError) as error:
        print(f"extproc explain: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


async def _ask_all(askers: list[Asker], args: argparse.Namespace) -> list[Any]:
    """What the workers that answer know, oldest first; an error where none does."""
    answers = await asyncio.gather(*(_ask(one, args) for one in askers), return_exceptions=True)
    errors = [one for one in answers if isinstance(one, BaseException)]
    if len(errors) == len(answers):
        raise errors[0] if len(errors) == 1 else AskError("\n".join(map(str, errors)))
    found = [record for one in answers if not isinstance(one, BaseException) for record in one]
    if len(askers) > 1:  # the numbers of one worker say nothing of another's
        found.sort(key=lambda record: record.get("decided_at", 0.0))
    return found if args.request_id is not None else found[-args.last :]


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


def _configured(file: Path | None) -> list[Asker]:
    """The router's workers."""
    config = settings.load({}, os.environ, file)
    return [Asker(config.of_worker(number).serve.admin) for number in range(config.serve.workers)]


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
