"""``extproc what-if``: plays recorded traffic again, as it was and as it would be."""

import argparse
import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NoReturn

from extproc.cli.arguments import CommandError, UsageError, above_zero
from extproc.lab.replay.comparison import too_far
from extproc.lab.replay.figures import progress
from extproc.lab.replay.recorded import read
from extproc.lab.replay.scene import Scene, scene_of
from extproc.lab.replay.what_if import Change, changed, replay, what_if
from extproc.route.policies import POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s RECORD [OPTION]..."
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD", help="folder of record.path, or one of its files")
    add("--pool", default="", metavar="NAME", help="whose record, where the folder has several")
    add("--policy", default="", choices=POLICIES, metavar="NAME", help=", ".join(POLICIES))
    more = "one more replica like that one, or so many more like those there are"
    add("--more", action="append", default=[], metavar="NAME|N", help=more)
    less = "without that replica, or without the last so many"
    add("--less", action="append", default=[], metavar="NAME|N", help=less)
    gpu = "that replica on other hardware"
    add("--replica", type=_pair, action="append", default=[], metavar="NAME=PROFILE", help=gpu)
    add("--traffic", type=above_zero, default=1.0, metavar="X", help="times as many requests")
    hold = "whether requests wait at the router while no replica can carry them"
    add("--hold", choices=("on", "off"), help=hold)
    add("--json", action="store_true", help="print all figures as JSON")
    add("--page", type=_removed, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    try:
        recorded = read(args.record, args.pool)
        scene = scene_of(recorded)
        change = _change(args, scene)
        other = changed(scene, change)
        replayed = replay(scene, progress("replay"))
        problem = too_far(replayed.fits)
        asked = change != Change() and not problem
        answer = what_if(scene, other, str(change), progress("what if")) if asked else None
        left_out = dict(recorded.left_out)
        if args.json:
            figures = replayed.to_json() | {"left_out": left_out}
            print(json.dumps(figures | (answer.to_json() if answer else {}), indent=2))
        else:
            print(replayed)
            for why, count in left_out.items():
                print(f"left out: {count} requests, {why}")
            if answer:
                print(f"\n{answer}")
    except (OSError, ValueError) as error:
        raise UsageError(error) from None
    if problem:
        raise CommandError(problem)
    return 0


def _change(args: argparse.Namespace, scene: Scene) -> Change:
    names = list(scene.names)
    more, less = _replicas(args.more, names), _replicas(args.less, names[::-1])
    hold = None if args.hold is None else args.hold == "on"
    return Change(args.policy, more, less, tuple(args.replica), args.traffic, hold)


def _replicas(given: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, and for a number so many of ``names``, one after the other."""
    found = list[str]()
    for one in given:
        if one in names or not one.isdecimal():
            found.append(one)
        elif int(one):
            found += islice(cycle(names), int(one))
        else:
            raise ValueError(f"{one} replicas more or less are no change")
    return tuple(found)


def _removed(_: str) -> NoReturn:
    raise argparse.ArgumentTypeError("the option was removed: --json prints all figures")


def _pair(text: str) -> tuple[str, str]:
    name, equals, profile = text.rpartition("=")
    if not (name and equals and profile):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PROFILE")
    return name, profile
