"""``python -m tests.chaos.queued --count 500``: a router is killed while requests are in its queue.

The system is a real Envoy with a router, a poller, a Redis and two simulated replicas with small KV
caches. The command exits with 1 if a request failed or the restarted router does not become idle.
"""

import argparse
import asyncio
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from extproc.lab.harness.stack import MODEL, SimulatedReplica, Stack
from tests.chaos.report import report
from tests.waiting import until

_WORDS, _TOKENS = 1000, 120
_FIT = 16
_REPLICAS = tuple(
    SimulatedReplica(name, "llama-8b-h100", ("--kv-tokens", str(_FIT * 1152)))
    for name in ("one", "two")
)
_MORE = 3 * _FIT * len(_REPLICAS)
"""Requests beyond those that are to wait: the replicas serve them before the last one arrives."""
_GIVE_UP_S = 300.0


class QueueClient:
    """Sends requests, and reads the router's queue."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._session = session

    async def send(self, content: str, tokens: int) -> str:
        """Return the status of the answer, or the error."""
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
        """Send some work; return True once the router has measured the speed of each replica."""
        await asyncio.gather(*(self.send("warm", 300) for _ in range(8)))
        return all(replica["measured"] for replica in (await self._fleet())["replicas"])

    async def waiting(self) -> int:
        """Number of requests at the router that are on no replica."""
        async with self._session.get(f"{self._stack.router_admin}/metrics") as page:
            found = re.search(r"^extproc_open_streams (\S+)$", await page.text(), re.M)
        streams = int(float(found[1])) if found else 0
        return streams - int((await self._fleet())["in_flight"])

    async def idle(self) -> bool:
        """Return True if no request waits or is in flight."""
        return not await self.waiting() and not (await self._fleet())["in_flight"]

    async def _fleet(self) -> Any:
        async with self._session.get(f"{self._stack.router_admin}/fleet") as response:
            return await response.json()


async def run(directory: Path, count: int) -> list[str]:
    """Print figures; return the problems."""
    async with (
        Stack(directory, _REPLICAS) as stack,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_GIVE_UP_S),
        ) as session,
    ):
        client = QueueClient(stack, session)
        await until(client.measured)
        sent = [
            asyncio.create_task(client.send(str(number) + " sea" * _WORDS, _TOKENS))
            for number in range(count + _MORE)
        ]

        async def enough() -> bool:
            return await client.waiting() >= count

        await until(enough)
        waiting, began = await client.waiting(), time.monotonic()
        await stack.kill("router")
        answers = Counter(await asyncio.gather(*sent))
        seconds = time.monotonic() - began
        print(
            f"{waiting} waited when the router was killed: {dict(answers)} within {seconds:.0f} s"
        )
        await stack.start("router")
        await stack.wait_routing()
        await until(client.idle)
    return [
        f"{number} requests failed: {answer}"
        for answer, number in answers.items()
        if answer != "200"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.queued")
    parser.add_argument("--count", type=int, default=500, help="requests in the queue")
    args = parser.parse_args()
    return report(lambda directory: run(directory, args.count))


if __name__ == "__main__":
    raise SystemExit(main())
