"""``extproc what-if``: replays recorded traffic, first unchanged and then with a change."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
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
    add("--pool", default="", metavar="NAME", help="pool of the record, if the folder has several")
    add("--policy", default="", choices=POLICIES, metavar="NAME", help=", ".join(POLICIES))
    more = "add a copy of this replica, or N copies of the recorded replicas in turn"
    add("--more", action="append", default=[], metavar="NAME|N", help=more)
    less = "remove this replica, or the last N replicas"
    add("--less", action="append", default=[], metavar="NAME|N", help=less)
    gpu = "move this replica to other hardware"
    add("--replica", type=_pair, action="append", default=[], metavar="NAME=PROFILE", help=gpu)
    times = "multiply the number of requests"
    add("--traffic", type=above_zero, default=1.0, metavar="X", help=times)
    hold = "on: requests wait at the router while replicas are full; off: no request waits"
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
        comparison = None
        if change != Change() and not problem:
            comparison = what_if(scene, other, str(change), progress("what if"))
    except (OSError, ValueError) as error:
        raise UsageError(error) from None
    if args.json:
        figures = replayed.to_json() | {
            "excluded": recorded.excluded,
            "unused_s": recorded.unused_s,
        }
        print(json.dumps(figures | (asdict(comparison) if comparison else {}), indent=2))
    else:
        print(replayed)
        if recorded.unused_s:
            first = f"the first {recorded.unused_s / 60:.1f} min of the record"
            print(f"not used: {first}, because {recorded.unused_why}")
        for why, count in recorded.excluded.items():
            print(f"excluded: {count} requests, {why}")
        if comparison:
            print(f"\n{comparison}")
    if problem:
        raise CommandError(problem)
    return 0


def _change(args: argparse.Namespace, scene: Scene) -> Change:
    names = [*scene.present]
    more, less = _replicas(args.more, names), _replicas(args.less, names[::-1])
    hold = None if args.hold is None else args.hold == "on"
    return Change(args.policy, more, less, tuple(args.replica), args.traffic, hold)


def _replicas(given: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the given names; a number N is replaced by N names, taken from ``names`` in turn."""
    found = list[str]()
    for word in given:
        if word in names or not word.isdecimal():
            found.append(word)
        elif int(word):
            found += islice(cycle(names), int(word))
        else:
            raise ValueError(f"{word} replicas change nothing: give 1 or more")
    return tuple(found)


def _removed(_: str) -> NoReturn:
    raise argparse.ArgumentTypeError("the option was removed: --json prints all figures")


def _pair(text: str) -> tuple[str, str]:
    name, equals, profile = text.rpartition("=")
    if not (name and equals and profile):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PROFILE")
    return name, profile
