"""``python -m tests.chaos.named [SCENE …]``: the system names each fault in time.

Each scene breaks a part of the running system and repairs it only after everything has named the
fault: page, ``extproc top``, a metric and the log within 60 s, and the alert within its ``for:``. A
real Prometheus evaluates the shipped alerts. ``--healthy MINUTES`` breaks nothing instead, and no
alert may fire. The command exits with 1 if something is missing.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from extproc.cli.routers import AskedRouter
from extproc.cli.screen import screen
from extproc.config import AdminSettings
from extproc.ground.text import WIDTH, Column, table
from extproc.observe.client import RouterUnavailableError, follow
from tests.chaos.load import LONG
from tests.chaos.prometheus import Prometheus, longest_s
from tests.chaos.report import report
from tests.chaos.scenes import SCENES, ChaosScene
from tests.chaos.stack import ChaosStack
from tests.chaos.system import FaultySystem

RATE = 4.0
NAMED_S = 60.0
_SCRAPES_S = 20.0
"""Time before a fault in which Prometheus scrapes a healthy system."""
_LATE_S = 60.0  # longest window of an alert's figure before its ``for`` begins
_LOOK_S = 1.0
_SETTLE_S = 10.0
_SIGNS = ("page", "top", "metric", "log", "alert")


class Watch:
    """Looks for the signs of one fault, and notes when each appeared."""

    def __init__(self, scene: ChaosScene, system: FaultySystem, prometheus: Prometheus) -> None:
        self.seen: dict[str, float] = {}  # seconds after the fault
        self.other_alerts: dict[str, str] = {}
        self._scene = scene
        self._named_by = ""  # the router whose page named the fault first
        self._stack = system.stack
        self._prometheus = prometheus
        self._began = time.monotonic()
        self._logs = {log: log.stat().st_size for log in self._log_files()}

    @property
    def due(self) -> dict[str, float]:
        """Limit of each sign that the scene has, in seconds after the fault."""
        signs = self._scene.signs
        limits = dict.fromkeys(("page", "top") if signs.page else (), NAMED_S)
        limits |= {"metric": NAMED_S} if signs.metric else {}
        limits |= {"log": NAMED_S} if signs.log else {}
        if signs.alert:
            limits["alert"] = longest_s(signs.alert) + _LATE_S
        return limits

    async def follow(self) -> None:
        """Return when every sign was seen or is late."""
        await asyncio.gather(*(self._await(sign, limit) for sign, limit in self.due.items()))

    async def _await(self, sign: str, limit: float) -> None:
        while self.now < limit:
            if await self._shows(sign):
                self.seen[sign] = self.now
                return
            await asyncio.sleep(_LOOK_S)

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    async def _shows(self, sign: str) -> bool:
        signs = self._scene.signs
        match sign:
            case "page":
                for router in self._stack.routers:
                    if re.search(signs.page, await self._page(router)):
                        self._named_by = router
                        return True
                return False
            case "top":
                router = self._named_by
                return bool(router and re.search(signs.page, await self._top(router)))
            case "metric":
                return await self._prometheus.holds(signs.metric)
            case "log":
                return bool(re.search(signs.log, self._logged()))
        firing = await self._prometheus.firing()
        self.other_alerts |= {name: text for name, text in firing.items() if name != signs.alert}
        return signs.alert in firing

    async def _page(self, router: str) -> str:
        """Return what the page of a router shows, in one line, or why the page shows nothing."""
        try:
            async with asyncio.timeout(5.0):
                snapshots = follow(self._stack.admin(router), AdminSettings())
                async with aclosing(snapshots):
                    shown = await anext(snapshots)
        except (RouterUnavailableError, TimeoutError) as error:
            return str(error)
        notes = [
            f"{name}: {note}"
            for pool in shown["pools"]
            for column in pool["replicas"]["columns"]
            for name, note in zip(pool["replicas"]["keys"], column.get("notes", ()), strict=False)
        ]
        return "  ".join(
            [*screen([AskedRouter(router, snapshot=shown)], (), WIDTH), *shown["warnings"], *notes]
        )

    async def _top(self, router: str) -> str:
        """Return the output of ``extproc top`` in one line."""
        argv = (sys.executable, "-m", "extproc", "top", "--once")
        process = await asyncio.create_subprocess_exec(
            *argv, "--router", self._stack.address(f"{router}-admin"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return " ".join(output.decode().split())

    def _log_files(self) -> list[Path]:
        services = (*self._stack.routers, *self._stack.pollers)
        return [self._stack.process(name).log for name in services]

    def _logged(self) -> str:
        texts = []
        for log, size in self._logs.items():
            with log.open("rb") as file:
                file.seek(size)
                texts.append(file.read().decode(errors="replace"))
        return "".join(texts)


async def play(scene: ChaosScene, system: FaultySystem) -> Watch:
    """Make a part fail, wait for the signs, and repair the part."""
    directory = system.stack.directory / f"prometheus-{scene.name}"
    prometheus = await Prometheus.start(system.stack, directory, system.session)
    try:
        await asyncio.sleep(_SCRAPES_S)
        watch = Watch(scene, system, prometheus)
        await scene.fault.fail(system)
        await watch.follow()
    finally:
        await prometheus.stop()
    await scene.repair(system)  # make chaos judges the recovery
    await asyncio.sleep(_SETTLE_S)
    return watch


def _row(watch: Watch, scene: ChaosScene) -> list[str]:
    due = watch.due
    times = [f"{watch.seen[sign]:.0f}" if sign in watch.seen else "" for sign in due]
    shown = dict(zip(due, times, strict=True))
    return [scene.name, *(shown.get(sign, "–") for sign in _SIGNS), scene.signs.alert]


async def run(scenes: Sequence[ChaosScene], directory: Path) -> list[str]:
    """Play the scenes and print the seconds until each sign; return the problems."""
    problems, rows = [], []
    async with FaultySystem.started(ChaosStack(directory), RATE, LONG) as system, system.load:
        for scene in scenes:
            watch = await play(scene, system)
            rows.append(_row(watch, scene))
            print(*rows[-1], dict(watch.other_alerts) or "", flush=True)
            problems += [
                f"{scene.name}: the {sign} does not name it within {limit:.0f} s"
                for sign, limit in watch.due.items()
                if sign not in watch.seen
            ]
    head = [Column(name, left=True) for name in ("scene", *_SIGNS, "")]
    print(*table(head, rows), sep="\n")
    return problems


async def run_healthy(minutes: float, directory: Path) -> list[str]:
    """Break nothing; return the alerts that fired."""
    fired = dict[str, str]()
    async with FaultySystem.started(ChaosStack(directory), RATE, LONG) as system:
        load, folder = system.load, directory / "prometheus"
        prometheus = await Prometheus.start(system.stack, folder, system.session)
        try:
            async with load:
                ends = time.monotonic() + 60.0 * minutes
                while time.monotonic() < ends:
                    fired |= await prometheus.firing()
                    await asyncio.sleep(5.0)
        finally:
            await prometheus.stop()
    failed = sum(not answer.ok for answer in load.answers.values())
    print(f"{minutes:g} minutes, {len(load.answers)} requests, {failed} failed, alerts: {fired}")
    return [f"{name} fired: {text}" for name, text in fired.items()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.named", description=__doc__)
    known = {scene.name: scene for scene in SCENES}
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(known))
    parser.add_argument("--healthy", type=float, metavar="MINUTES", help="break nothing")
    args = parser.parse_args()
    if args.healthy:
        return report(lambda directory: run_healthy(args.healthy, directory))
    chosen = [known[name] for name in args.scenes or known]
    return report(lambda directory: run(chosen, directory))


if __name__ == "__main__":
    raise SystemExit(main())
