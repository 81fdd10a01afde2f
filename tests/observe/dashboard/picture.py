"""Writes docs/dashboard.png: the page of a router with six replicas, one of them down.

``python -m tests.observe.dashboard.picture`` needs ``chromium`` on the PATH.
"""

import asyncio
import tempfile
from base64 import b64decode
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from random import Random

from extproc.lab.harness.samples import samples
from extproc.lab.harness.stack import MODEL, SimulatedReplica, Stack
from extproc.lab.harness.traffic import send_all
from tests.observe.dashboard.browser import chromium, tab

PICTURE = Path(__file__).parents[3] / "docs" / "dashboard.png"
REPLICAS = [
    SimulatedReplica(f"{gpu}-{number}", f"llama-8b-{gpu}")
    for gpu in ("a10", "h100")
    for number in (1, 2, 3)
]
LOAD_S, SHOWN_AFTER_S, RATE = 45.0, 30.0, 15.0
WIDTH, HEIGHT = 1120, 1800  # of the window: higher than what is shown
SHOWN = "$('.side-by-side').getBoundingClientRect().bottom + 16"  # all but the last decisions


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Stack(Path(folder), REPLICAS) as stack,
            chromium(Path(folder)) as browser,
            tab(browser) as page,
        ):
            await stack.wait_routing()
            await stack.kill("a10-3")
            drawn = samples(MODEL, RATE, Random(1))
            load = takewhile(lambda sample: sample.at_s < LOAD_S, drawn)
            sending = asyncio.create_task(send_all(stack.url, load, "request"))
            await page.look(WIDTH, HEIGHT)
            await page.open(stack.router_admin)
            await page.until("$$('#replicas tbody tr').length == 6")
            await asyncio.sleep(SHOWN_AFTER_S)
            height = await page.evaluate(SHOWN)
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
            shot = await page.command("Page.captureScreenshot", format="png", clip=clip)
            PICTURE.write_bytes(b64decode(shot["data"]))
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending


if __name__ == "__main__":
    asyncio.run(main())
