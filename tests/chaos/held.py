"""``python -m tests.chaos.held``: a router is killed while requests wait at it.

    python -m tests.chaos.held --count 500

A real Envoy with a router, a poller, a Redis and two simulated replicas of small KV caches. Exits
with 1 where a request failed, or something is left of them at the router that is started anew.
"""

import argparse
import asyncio
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from extproc.lab.harness.stack import MODEL, SimulatedReplica, Stack
from tests.waiting import until

_WORDS, _TOKENS = 1000, 120
_FIT = 16
_REPLICAS = tuple(
    SimulatedReplica(name, "llama-8b-h100", ("--kv-tokens", str(_FIT * 1152)))
    for name in ("one", "two")
)
_MORE = 3 * _FIT * len(_REPLICAS)
"""Sent beyond those that are to wait: they go, or end before the last has come."""
_GIVE_UP_S = 300.0


class Held:
    """Sends requests, and asks the router what became of them."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._session = session

    async def ask(self, content: str, tokens: int) -> str:
        """The status of the answer, or what happened instead."""
        message = {"role": "user", "content": content}
        body = {"model": MODEL, "messages": [message], "max_tokens": tokens}
        headers = {"x-simulate-output-tokens": str(tokens)}
        url = f"{self._stack.url}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                await response.read()
                return str(response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            return repr(error)

    async def measured(self) -> bool:
        """Whether the router knows how fast each replica is, after some more work for it."""
        await asyncio.gather(*(self.ask("warm", 300) for _ in range(8)))
        return all(one["measured"] for one in (await self._fleet())["replicas"])

    async def waiting(self) -> int:
        """How many have asked the router and are on no replica."""
        async with self._session.get(f"{self._stack.router_admin}/metrics") as page:
            found = re.search(r"^extproc_open_streams (\S+)$", await page.text(), re.M)
        streams = int(float(found[1])) if found else 0
        return streams - int((await self._fleet())["in_flight"])

    async def nothing_left(self) -> bool:
        """Whether nothing waits, nor is in flight."""
        return not await self.waiting() and not (await self._fleet())["in_flight"]

    async def _fleet(self) -> Any:
        async with self._session.get(f"{self._stack.router_admin}/fleet") as response:
            return await response.json()


async def run(directory: Path, count: int) -> list[str]:
    """Prints figures; returns what must not be."""
    async with (
        Stack(directory, _REPLICAS) as stack,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_GIVE_UP_S),
        ) as session,
    ):
        held = Held(stack, session)
        await until(held.measured)
        asked = [
            asyncio.create_task(held.ask(str(number) + " sea" * _WORDS, _TOKENS))
            for number in range(count + _MORE)
        ]

        async def enough() -> bool:
            return await held.waiting() >= count

        await until(enough)
        waiting, began = await held.waiting(), time.monotonic()
        await stack.kill("router")
        answers = Counter(await asyncio.gather(*asked))
        seconds = time.monotonic() - began
        print(
            f"{waiting} waited when the router was killed: {dict(answers)} within {seconds:.0f} s"
        )
        await stack.start("router")
        await stack.wait_routing()
        await until(held.nothing_left)
    return [f"{count} requests failed: {what}" for what, count in answers.items() if what != "200"]


def main() -> int:
    """Runs once; 1 where something was that must not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.held")
    parser.add_argument("--count", type=int, default=500, help="requests that wait")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="extproc-held-"))
    print(f"logs: {directory}")
    problems = asyncio.run(run(directory, args.count))
    for problem in problems:
        print(f"FAILED {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
