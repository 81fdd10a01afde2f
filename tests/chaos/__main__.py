"""``python -m tests.chaos [SCENE …]``: parts fail in turn while requests arrive at a steady rate.

A real Envoy with two routers, two pollers, a Redis and four simulated replicas. Prints figures of
each scene; exits with 1 where a request failed that should not have, a failing replica went on
getting traffic, what is known of the others grew old, or a router's ledger is not empty at the end.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import aiohttp

from extproc.ground.text import Column, table
from extproc.lab.harness.stack import Stack
from tests.chaos.figures import HEADINGS, Figures, Times
from tests.chaos.load import Load
from tests.chaos.scenes import SCENES, Scene
from tests.chaos.system import REPLICAS, System
from tests.waiting import until

RATE = 50.0
_BEFORE_S = 3.0
_AFTER_S = 2.0
_PATIENCE_S = 30.0
_LEDGER_S = 5.0


async def play(scene: Scene, system: System) -> Times:
    """Makes the part fail and mends it, and returns when all is as before, or patience ended."""
    began = time.monotonic()
    await asyncio.sleep(_BEFORE_S)
    failed = time.monotonic()
    await scene.fail(system)
    await asyncio.sleep(scene.hold_s)
    mended = time.monotonic()
    await scene.mend(system)
    over = await _over(scene, system, mended)
    await scene.tidy(system)
    await asyncio.sleep(_AFTER_S)
    return Times(began, failed, mended, over, time.monotonic())


async def _over(scene: Scene, system: System, since: float) -> float | None:
    with suppress(TimeoutError):
        await until(lambda: scene.over(system, since), _PATIENCE_S)
        return time.monotonic()
    return None


async def _ledgers(system: System) -> dict[str, int]:
    """What is left in them a moment after the last answer."""

    async def empty() -> bool:
        return not any((await system.ledgers()).values())

    with suppress(TimeoutError):
        await until(empty, _LEDGER_S)
    return await system.ledgers()


async def run(scenes: Sequence[Scene], directory: Path) -> list[str]:
    """Plays the scenes and prints their figures; returns what must not be."""
    async with (
        Stack(directory, REPLICAS, routers=2, pollers=2) as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
    ):
        played = []
        load = Load(stack.url, RATE, Random(1))
        system = System(stack, load, session)
        watching = asyncio.create_task(system.watch_ages())
        async with load:
            for scene in scenes:
                print(f"{scene.name} …")
                times = await play(scene, system)
                played.append((scene, times))
                if times.over is None and scene.victim:
                    for line in await system.account(scene.victim):
                        print(line)
        watching.cancel()
        await system.settled()
        ledgers = await _ledgers(system)
        figures = [
            Figures(
                scene,
                times,
                load.answers.values(),
                system.accesses,
                stack.address(scene.victim) if scene.victim else "",
                system.oldest(times.began, times.ended, {scene.victim, scene.stopped}),
            )
            for scene, times in played
        ]
    _show(figures, stack.names)
    print(f"in the ledgers at the end: {ledgers}")
    problems = [f"{one.scene.name}: {problem}" for one in figures for problem in one.problems()]
    return problems + [
        f"{router}: {count} requests left in its ledger"
        for router, count in ledgers.items()
        if count
    ]


def _show(figures: Sequence[Figures], names: dict[str, str]) -> None:
    head = [Column(name, left=name == "scene") for name in HEADINGS]
    print(*table(head, [one.row() for one in figures]), sep="\n")
    total = sum(len(one.requests) for one in figures)
    failed = sum(len(one.failed) for one in figures)
    print(f"{total} requests, {failed} failed")
    for one in figures:
        for what, count in one.failures(names).items():
            print(f"{one.scene.name}: {count} {what}")


def main() -> int:
    """Runs the scenes named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    known = {scene.name: scene for scene in SCENES}
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(known))
    chosen = parser.parse_args().scenes or list(known)
    if unknown := set(chosen) - known.keys():
        parser.error(f"no such scene: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    directory = Path(tempfile.mkdtemp(prefix="extproc-chaos-"))
    print(f"logs: {directory}")
    problems = asyncio.run(run([known[name] for name in chosen], directory))
    for problem in problems:
        print(f"FAILED {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
