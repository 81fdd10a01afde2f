"""``python -m tests.chaos [SCENE …]``: parts fail in turn while requests arrive at a steady rate.

The system is a real Envoy with two routers, two pollers, a Redis and four simulated replicas. The
command prints figures of each scene. It exits with 1 if a request failed that should not have, a
failing replica still got traffic, states of other replicas became stale, or a router's ledger is
not empty at the end.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from extproc.ground.text import Column, table
from tests.chaos.figures import HEADINGS, SceneFigures, Times
from tests.chaos.report import report
from tests.chaos.scenes import SCENES, ChaosScene
from tests.chaos.stack import ChaosStack
from tests.chaos.system import FaultySystem, LoadedSystem
from tests.waiting import until

_RATE = 50.0  # a second
_BEFORE_S = 3.0
_AFTER_S = 2.0
_LEDGER_S = 5.0


async def play(scene: ChaosScene, system: FaultySystem) -> Times:
    """Make a part fail and repair it; return after the recovery, or after 60 s without one."""
    began = time.monotonic()
    await asyncio.sleep(_BEFORE_S)
    failed = time.monotonic()
    await scene.fault.fail(system)
    await asyncio.sleep(scene.hold_s)
    mended, recovered = await scene.repair(system)
    await asyncio.sleep(_AFTER_S)
    return Times(began, failed, mended, recovered, time.monotonic())


async def _ledgers(system: LoadedSystem) -> dict[str, int]:
    async def empty() -> bool:
        return not any((await system.ledgers()).values())

    with suppress(TimeoutError):
        await until(empty, _LEDGER_S)
    return await system.ledgers()


async def run(scenes: Sequence[ChaosScene], rate: float, directory: Path) -> list[str]:
    """Play the scenes and print their figures; return the problems."""
    async with FaultySystem.started(ChaosStack(directory), rate, answer_s=2.0) as system:
        stack, load, played = system.stack, system.load, []
        watching = asyncio.create_task(system.watch_ages())
        async with load:
            for scene in scenes:
                print(f"{scene.name} …")
                times = await play(scene, system)
                played.append((scene, times))
                if times.recovered is None and scene.victim:
                    for line in await system.account(scene.victim):
                        print(line)
        watching.cancel()
        await system.settled()
        ledgers = await _ledgers(system)
        figures = [
            SceneFigures(
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
    print(f"requests in the ledgers at the end: {ledgers}")
    problems = [
        f"{scene.scene.name}: {problem}" for scene in figures for problem in scene.problems()
    ]
    return problems + [
        f"{router}: {count} requests are left in its ledger"
        for router, count in ledgers.items()
        if count
    ]


def _show(figures: Sequence[SceneFigures], names: dict[str, str]) -> None:
    head = [Column(name, left=name == "scene") for name in HEADINGS]
    print(*table(head, [scene.row() for scene in figures]), sep="\n")
    total = sum(len(scene.requests) for scene in figures)
    failed = sum(len(scene.failed) for scene in figures)
    print(f"{total} requests, {failed} failed")
    for scene in figures:
        for failure, count in scene.failures(names).items():
            print(f"{scene.scene.name}: {count} {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    known = {scene.name: scene for scene in SCENES}
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(known))
    parser.add_argument(
        "--rate", type=float, default=_RATE, help="requests/s (default: %(default)g)"
    )
    args = parser.parse_args()
    chosen = args.scenes or list(known)
    if unknown := set(chosen) - known.keys():
        parser.error(f"no such scene: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return report(partial(run, [known[name] for name in chosen], args.rate))


if __name__ == "__main__":
    raise SystemExit(main())
