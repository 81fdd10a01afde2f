"""OpenAI-compatible HTTP server of a simulated replica."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Annotated, Any, Literal, NoReturn, TypeVar
from uuid import uuid4

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from extproc.ground.address import join_address
from extproc.ground.runtime import started
from extproc.lab.simulator import OUTPUT_TOKENS_HEADER, SERVED_BY_HEADER, bodies, tokens
from extproc.lab.simulator.answers import GENERATING, Reply, ResponseStore, error_body
from extproc.lab.simulator.bodies import Body, RequestError
from extproc.lab.simulator.kv_events import publishing
from extproc.lab.simulator.live import Generation
from extproc.lab.simulator.metrics import CONTENT_TYPE
from extproc.lab.simulator.pooling import POOLING
from extproc.lab.simulator.replica import Replica
from extproc.request.endpoint import Endpoint

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
BACKLOG = 2048  # connections waiting to be accepted, as in vLLM's server
VLLM_VERSION = "0.32.0"  # simulated version

# Key in `tracestate` in place of `OUTPUT_TOKENS_HEADER`, for proxies that drop such headers.
OUTPUT_TOKENS_STATE = "simulate-output-tokens"
# The client's id of a request, in `tracestate`: some gateways overwrite `x-request-id`.
REQUEST_STATE = "simulate-request"
RANK_HEADER = "x-data-parallel-rank"  # only rank 0 exists
PRIORITY_HEADER = "x-vllm-priority"  # overrides the `priority` of a body

AUDIO = (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)
_INFERENCE = frozenset({*GENERATING, *POOLING, *AUDIO})

Parsed = TypeVar("Parsed", bound=BaseModel)
Inference = TypeVar("Inference", bound=Body)
Result = TypeVar("Result")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Seconds = Annotated[float, Field(ge=0, le=60)]


class Faults(BaseModel):
    """Body of ``/simulate``, which sets faults for chaos tests and demos; absent fields change
    nothing."""

    model_config = ConfigDict(extra="forbid")

    # Factor of the step times, as on a throttled GPU.
    slow: float = Field(default=1.0, gt=0, le=1000)
    # Answer nothing: requests, streams, /health and /metrics hang.
    hang: bool = False
    # Status of all inference requests; /health and /metrics are not affected; 0: no fault.
    fail: Literal[0] | Annotated[int, Field(ge=400, le=599)] = 0
    # Close the connection of every inference request, as if the engine died of the request.
    reset: bool = False
    # As vLLM up to 0.10.1, keep the gauges if all requests are aborted, until the next request.
    freezing_gauges: bool = False
    # Shortest and longest delay of /metrics, drawn for each answer.
    metrics_seconds: tuple[Seconds, Seconds] = (0.0, 0.0)


class ReplicaServer:
    """HTTP handlers of a replica."""

    engine: asyncio.Task[NoReturn]

    def __init__(self, replica: Replica, random: Random) -> None:
        self.replica = replica
        self._random = random
        self._responses = ResponseStore()
        self._faults = Faults()
        self._in_flight: list[str] = []

    def app(self) -> web.Application:
        """Return the HTTP application, which also runs the replica's engine."""
        app = web.Application(middlewares=[self._fault, _errors], client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._engine)
        app.on_response_prepare.append(_name_replica)
        engine, live, stored = self.replica.engine, self.replica.live, self._responses
        response = f"{Endpoint.RESPONSES}/{{name}}"
        cancel = f"{response}/cancel"
        sleeping = _json(lambda _: {"is_sleeping": engine.sleep_level is not None})
        routes = [
            *(web.post(path, self._generate) for path in GENERATING),
            *(web.post(path, self._pool) for path in POOLING),
            *(web.post(path, self._transcribe) for path in AUDIO),
            web.get(response, _json(lambda request: stored.response(request.match_info["name"]))),
            web.post(cancel, _json(lambda request: stored.cancel(request.match_info["name"]))),
            web.post("/tokenize", self._tokenize),
            web.post("/sleep", _json(self._sleep)),
            web.post("/wake_up", _json(self._wake_up)),
            web.get("/is_sleeping", sleeping),
            web.post("/simulate", self._simulate),
            web.get("/simulate/late", _json(lambda _: live.lateness.to_json())),
            web.get("/simulate/requests", _json(lambda _: self._in_flight)),
            web.get("/version", _json(lambda _: {"version": VLLM_VERSION})),
            web.get("/v1/models", _json(self._models)),
            web.get("/metrics", self._metrics),
            web.get("/health", _healthy),
        ]
        app.add_routes(routes)
        return app

    async def _engine(self, app: web.Application) -> AsyncIterator[None]:
        async with started(self.replica.live.run()) as [self.engine]:
            yield

    @web.middleware
    async def _fault(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/simulate":
            return await handler(request)
        await self.replica.live.working.wait()
        if request.path not in _INFERENCE:
            return await handler(request)
        if self._faults.reset and request.transport is not None:
            request.transport.abort()
        if self._faults.fail:
            return _error(request, self._faults.fail, "This fault was set with /simulate.")
        name = _trace_state(request, REQUEST_STATE) or ""
        self._in_flight.append(name)
        try:
            return await handler(request)
        finally:
            self._in_flight.remove(name)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body_type, reply_type = GENERATING[request.path]
        body = await self._inference(request, body_type)
        self._responses.resume(body)
        generation = self.replica.generate(body, _output_tokens(request))
        details = self.replica.settings.enable_prompt_tokens_details
        reply = reply_type(*self._head(body), details)
        if body.stream:
            stream = _stream(request, generation, reply, body.include_usage)
            return await self._finish(stream, generation, body, reply)
        work = self._finish(generation.done(), generation, body, reply)
        if isinstance(body, bodies.ResponsesBody) and body.background:
            return web.json_response(self._responses.queue(reply, asyncio.create_task(work)))
        await work
        return web.json_response(reply.whole(generation))

    def _head(self, body: Body) -> tuple[str, str, int]:
        return uuid4().hex, body.model or self.replica.settings.model, int(time.time())

    async def _inference(self, request: web.Request, body: type[Inference]) -> Inference:
        """Parses an inference request; the header's priority overrides the body's."""
        parsed = await _parse(request, body)
        if request.headers.get(RANK_HEADER, "0") != "0":
            raise RequestError("data_parallel_rank is out of range [0, 1)")
        try:
            parsed.priority = int(request.headers.get(PRIORITY_HEADER, parsed.priority))
        except ValueError:
            raise RequestError(f"{PRIORITY_HEADER} is not an integer") from None
        self.replica.check_model(parsed.model)
        return parsed

    async def _finish(
        self, work: Awaitable[Result], generation: Generation, body: Body, reply: Reply | None
    ) -> Result:
        try:
            return await work
        finally:
            self.replica.live.abort(generation)
            self._responses.store(body, reply, generation)

    async def _pool(self, request: web.Request) -> web.Response:
        body = await self._inference(request, POOLING[request.path])
        generation = self.replica.pool(body)
        await self._finish(generation.done(), generation, body, None)
        return web.json_response(body.reply(*self._head(body)))

    async def _transcribe(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form.get("file")
        if not isinstance(file, web.FileField):
            raise RequestError("file: an audio file is required", "file")
        body = bodies.AudioBody(model=str(form.get("model", "")), file=file.file.read())
        self.replica.check_model(body.model)
        generation = self.replica.generate(body, _output_tokens(request))
        await self._finish(generation.done(), generation, body, None)
        text = "".join(answer.text for answer in generation.answers)
        usage = {"type": "duration", "seconds": body.seconds}
        return web.json_response({"text": text, "usage": usage})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _parse(request, bodies.TokenizeBody)
        self.replica.check_model(body.model)
        ids = tokens.token_ids(body.encoded)
        answer = {"count": len(ids), "max_model_len": self.replica.max_model_len}
        return web.json_response(answer | {"tokens": ids, "token_strs": None})

    async def _simulate(self, request: web.Request) -> web.Response:
        given = (await _parse(request, Faults)).model_dump(exclude_unset=True)
        self._faults = faults = self._faults.model_copy(update=given)
        engine, working = self.replica.engine, self.replica.live.working
        engine.slow_down(faults.slow)
        engine.freezing_gauges = faults.freezing_gauges
        (working.clear if faults.hang else working.set)()
        logger.info("simulated faults changed", extra=faults.model_dump())
        return web.json_response(faults.model_dump())

    def _sleep(self, request: web.Request) -> dict[str, Any]:
        level = request.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise RequestError(f"level: {level!r} is not 0, 1 or 2", "query.level")
        self.replica.live.sleep(int(level))
        return {"status": "sleeping", "level": int(level)}

    def _wake_up(self, request: web.Request) -> dict[str, Any]:
        self.replica.live.wake()
        return {"status": "awake", "tags": None}

    def _models(self, request: web.Request) -> dict[str, Any]:
        settings = self.replica.settings
        base = {
            "id": settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": settings.model,
            "parent": None,
            "max_model_len": self.replica.max_model_len,
        }
        # vLLM reports no context length for adapters.
        adapter = {"parent": settings.model, "max_model_len": None}
        adapters = [base | adapter | {"id": name, "root": name} for name in settings.adapters]
        return {"object": "list", "data": [base, *adapters]}

    async def _metrics(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self._random.uniform(*self._faults.metrics_seconds))
        page = self.replica.metrics.page()
        return web.Response(body=page.encode(), headers={"content-type": CONTENT_TYPE})


async def _name_replica(request: web.Request, response: web.StreamResponse) -> None:
    """Adds a response header by which clients behind a proxy can tell replicas apart."""
    host, port, *_ = request.get_extra_info("sockname") or ("", 0)
    response.headers[SERVED_BY_HEADER] = join_address(host, port)


def _json(answer: Callable[[web.Request], Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(request))

    return handle


async def _healthy(request: web.Request) -> web.Response:
    return web.Response()


async def _stream(
    request: web.Request, generation: Generation, reply: Reply, include_usage: bool
) -> web.StreamResponse:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    with suppress(ConnectionError):  # the client has closed the connection
        await response.prepare(request)
        await response.write(reply.prelude())
        pending = reply.opening(generation)
        async for batch in generation.stream():
            pending += b"".join([reply.token(*token) for token in batch])
            if generation.complete:
                pending += reply.closing(generation, include_usage)
            await response.write(pending)
            pending = b""
    return response


async def _parse(request: web.Request, body: type[Parsed]) -> Parsed:
    try:
        return body.model_validate_json(await request.read())
    except ValidationError as error:
        raise bodies.invalid(error) from None


def _output_tokens(request: web.Request) -> int | None:
    """Output length that the client sets in a header or else in ``tracestate``; None: not set."""
    value = request.headers.get(OUTPUT_TOKENS_HEADER, _trace_state(request, OUTPUT_TOKENS_STATE))
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and 0 < len(value) < 10 and int(value)):
        raise RequestError(f"{OUTPUT_TOKENS_HEADER}: {value!r} is not a number above 0")
    return int(value)


def _trace_state(request: web.Request, name: str) -> str | None:
    """Value of a key in the header ``tracestate`` (W3C: comma-separated ``key=value`` pairs)."""
    entries = ",".join(request.headers.getall("tracestate", [])).split(",")
    pairs = (entry.strip().partition("=") for entry in entries)
    return next((value for key, _, value in pairs if key == name), None)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error(request, error.status, str(error), error.param)
    except web.HTTPClientError as error:
        return _error(request, error.status, error.reason)


def _error(
    request: web.Request, status: int, message: str, param: str | None = None
) -> web.Response:
    return web.json_response(error_body(request.path, status, message, param), status=status)


@asynccontextmanager
async def serving(
    replica: Replica, host: str, port: int
) -> AsyncIterator[tuple[int, asyncio.Task[NoReturn]]]:
    """Run the HTTP server of a replica; yield its port and the task of its engine. The task ends
    only by a failure, after which no request is answered. Port 0 lets the system choose.

    Raises:
        OSError: the address cannot be bound.
    """
    server = ReplicaServer(replica, Random(replica.settings.seed))
    app = server.app()
    # If a client disconnects, its handler is cancelled, and its sequences leave the batch. Bodies
    # are not decompressed, as in vLLM.
    runner = web.AppRunner(
        app, shutdown_timeout=0.5, access_log=None, handler_cancellation=True, auto_decompress=False
    )
    if replica.engine.events and replica.settings.kv_events_ports:
        events = publishing(replica.engine.events, host, *replica.settings.kv_events_ports)
        app.cleanup_ctx.append(lambda _: events)
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        yield runner.addresses[0][1], server.engine
    finally:
        await runner.cleanup()
