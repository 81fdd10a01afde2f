"""A replica whose answers a test chooses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from extproc.lab.harness.processes import free_port
from tests.waiting import Changes

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def page(
    *,
    running: int = 2,
    waiting: int = 1,
    steps: int = 100,
    generated: int = 0,
    kv_blocks: int = 100,
    model: str = "tiny",
    started_at: float | None = None,
    asleep: bool = False,
) -> str:
    start = f"process_start_time_seconds {started_at}\n" if started_at else ""
    labels = f'{{engine="0",model_name="{model}"}}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} {waiting}.0\nvllm:kv_cache_usage_perc{labels} 0.5\n"
        f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{kv_blocks}"}} 1.0\n'
        f"vllm:iteration_tokens_total_count{labels} {steps}.0\n{start}"
        f"vllm:generation_tokens_total{labels} {generated}.0\n"
        f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {int(not asleep)}.0\n'
    )


def text(body: str | bytes, status: int = 200) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    return answer


def models(*names: str, adapters: tuple[str, ...] = (), max_model_len: int = 4096) -> Handler:
    listed: list[dict[str, object]] = [
        {"id": name, "parent": None, "max_model_len": max_model_len} for name in names
    ]
    listed += [{"id": name, "parent": names[0], "max_model_len": None} for name in adapters]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": listed})

    return answer


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


class FirstAnswer:
    def __init__(self, first: Handler, then: Handler) -> None:
        self._first = first
        self._then = then
        self._is_used = False
        self.over = asyncio.Event()  # the second request has arrived

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self._is_used:
            self.over.set()
            return await self._then(request)
        self._is_used = True
        return await self._first(request)


class HeldAnswer:
    def __init__(self, then: Handler) -> None:
        self._then = then
        self.requested, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.requested.set()
        await self.released.wait()
        return await self._then(request)


def late(seconds: float, body: str) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(1.2 * seconds)
        return web.Response(text=body)

    return answer


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(page().encode() * 1000)


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"vllm:num_requests_running 1.0\n")
        await asyncio.sleep(0.01)


async def disconnect(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(page().encode()[:100])
    assert request.transport is not None
    request.transport.close()
    return response


class ScriptedReplica:
    """A healthy vLLM until a test changes ``answers``; restarts on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.id = f"127.0.0.1:{self.port}"
        self.answers: dict[str, Handler] = {
            "/health": text(""),
            "/metrics": text(page()),
            "/v1/models": models("tiny", adapters=("adapter",)),
            "/version": text('{"version": "0.32.0"}'),
        }
        self.paths: list[str] = []  # of all requests
        self._changes = Changes()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def requested(self, path: str, more: int) -> None:
        """Waits for this many more requests."""
        count = self.paths.count(path) + more
        await self._changes.until(lambda: self.paths.count(path) >= count)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self._changes.note()
        return await self.answers[request.path](request)


@asynccontextmanager
async def serving() -> AsyncIterator[ScriptedReplica]:
    replica = ScriptedReplica()
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()
