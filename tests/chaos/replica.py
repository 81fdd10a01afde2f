"""A simulated replica whose ``/metrics`` page misbehaves on command.

``python -m tests.chaos.replica`` takes the arguments of ``extproc simulate``. A POST to
``/misbehave?metrics=…`` sets the fault, a value of :class:`MetricsPage`.
"""

import argparse
import asyncio
from enum import StrEnum
from random import Random

import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from extproc.cli import simulate
from extproc.lab.simulator.metrics import CONTENT_TYPE
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import ReplicaServer

_CHUNK = b"vllm:num_requests_running{} 1\n" * 2000
_HUGE = 200 * 2**20
_GARBAGE = b"\x00\xff<html>{}vllm:num_requests_running NaN\n" * 1500
_PAUSE_S = 0.05


class MetricsPage(StrEnum):
    """Kinds of answers of ``/metrics``."""

    GOOD = "good"
    GARBAGE = "garbage"
    HUGE = "huge"  # 200 MB, as fast as the reader takes them
    ENDLESS = "endless"  # a line every 50 ms, without end
    FROZEN = "frozen"  # always the figures of the first scrape


class MisbehavingServer(ReplicaServer):
    """Simulated replica with a faulty metrics page."""

    def __init__(self, replica: Replica, random: Random) -> None:
        super().__init__(replica, random)
        self._page = MetricsPage.GOOD
        self._frozen = b""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/misbehave", self._misbehave)
        app.middlewares.append(self._metrics_page)
        return app

    async def _misbehave(self, request: web.Request) -> web.Response:
        self._page = MetricsPage(request.query["metrics"])
        self._frozen = b""
        return web.Response()

    @web.middleware
    async def _metrics_page(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/metrics" or self._page is MetricsPage.GOOD:
            return await handler(request)
        if self._page is MetricsPage.GARBAGE:
            return web.Response(body=_GARBAGE)
        if self._page is MetricsPage.FROZEN:
            self._frozen = self._frozen or self.replica.metrics.page().encode()
            return web.Response(body=self._frozen, headers={"content-type": CONTENT_TYPE})
        response = web.StreamResponse()
        await response.prepare(request)
        if self._page is MetricsPage.HUGE:
            for _ in range(_HUGE // len(_CHUNK)):
                await response.write(_CHUNK)
            return response
        while True:
            await response.write(b"vllm:num_requests_running{} 1\n")
            await asyncio.sleep(_PAUSE_S)


async def _serve(args: argparse.Namespace) -> None:
    settings = ReplicaSettings(model=args.model, profile=args.profile, speed=args.speed)
    server = MisbehavingServer(Replica(settings), Random(args.seed))
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    await server.engine


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    uvloop.run(_serve(parser.parse_args()))
