"""Writes docs/dashboard.png, the page of a healthy router, and a picture of the page in each fault.

``python -m tests.observe.dashboard.picture`` needs ``chromium`` and takes three minutes.
"""

import asyncio
import tempfile
import time
from base64 import b64decode
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from random import Random

import aiohttp

from extproc.lab.harness.samples import samples
from extproc.lab.harness.stack import MODEL, SimulatedReplica, Stack
from extproc.lab.harness.traffic import send_all
from tests.chaos.load import LONG, SteadyLoad
from tests.chaos.scenes import SCENES, ChaosScene
from tests.chaos.stack import ChaosStack
from tests.chaos.system import FaultySystem
from tests.observe.dashboard.browser import BrowserPage, chromium, tab
from tests.waiting import until

DOCS = Path(__file__).parents[3] / "docs"
REPLICAS = [
    SimulatedReplica(f"{gpu}-{number}", f"llama-8b-{gpu}")
    for gpu in ("a10", "h100")
    for number in (1, 2, 3)
]
LOAD_S, SHOWN_AFTER_S, RATE = 45.0, 30.0, 15.0
WIDTH, HEIGHT = 1280, 1800  # of the window: higher than what is shown
SHOWN = "$('.side-by-side').getBoundingClientRect().bottom + 16"  # all but the last decisions
FAULTS = "envoy-not-following", "replica-killed", "replica-stopped"
FAULTS_RATE, WARM_UP_S, SETTLE_S = 12.0, 20.0, 5.0
FAULT_SHOWN = "$('#replicas .scroll').getBoundingClientRect().bottom + 4"
OVER_S = 90.0  # a warning of requests of the last minute lasts a minute
NO_WARNING = "!$('#warnings').children.length"


async def main() -> None:
    for take in (_healthy, _faults):
        with tempfile.TemporaryDirectory() as folder:
            async with chromium(Path(folder)) as browser, tab(browser) as page:
                await page.look(WIDTH, HEIGHT)
                await take(page, Path(folder))


async def _healthy(page: BrowserPage, folder: Path) -> None:
    async with Stack(folder, REPLICAS) as stack:
        drawn = samples(MODEL, RATE, Random(1))
        load = takewhile(lambda sample: sample.at_s < LOAD_S, drawn)
        sending = asyncio.create_task(send_all(stack.url, load, "request"))
        await page.open(stack.router_admin)
        await page.until("$$('#replicas tbody tr').length == 6")
        await asyncio.sleep(SHOWN_AFTER_S)
        await _shoot(page, SHOWN, "dashboard")
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending


async def _faults(page: BrowserPage, folder: Path) -> None:
    scenes = {scene.name: scene for scene in SCENES}
    async with ChaosStack(folder) as stack, aiohttp.ClientSession() as session:
        load = SteadyLoad(stack.url, FAULTS_RATE, Random(1), LONG)
        async with load:
            system = FaultySystem(stack, load, session)
            await page.open(stack.router_admin)
            await asyncio.sleep(WARM_UP_S)
            for name in FAULTS:
                await _fault(page, scenes[name], system)


async def _fault(page: BrowserPage, scene: ChaosScene, system: FaultySystem) -> None:
    await until(lambda: page.evaluate(NO_WARNING), OVER_S)
    await scene.fault.fail(system)
    await page.until(f"/{scene.signs.page}/.test($('#warnings').textContent)")
    await asyncio.sleep(SETTLE_S)
    await _shoot(page, FAULT_SHOWN, f"page-{scene.name}")
    mended = time.monotonic()
    await scene.fault.mend(system)
    await until(lambda: scene.recovered(system, mended))


async def _shoot(page: BrowserPage, bottom: str, name: str) -> None:
    height = await page.evaluate(bottom)
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = await page.command("Page.captureScreenshot", format="png", clip=clip)
    (DOCS / f"{name}.png").write_bytes(b64decode(shot["data"]))


if __name__ == "__main__":
    asyncio.run(main())
