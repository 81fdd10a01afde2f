"""A router that only observes: Envoy alone decides, whatever the router does."""

import asyncio
import io
import json
import re
import resource
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.typedefs import Handler

from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from extproc.lab.harness.envoy_config import AccessLog, Bootstrap, manager_of
from extproc.lab.harness.processes import Process
from extproc.lab.harness.stack import MODEL
from extproc.lab.simulator import SERVED_BY_HEADER, server
from extproc.proxy.headers import is_steered
from extproc.proxy.messages import DESTINATION
from extproc.settings import load
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient, RoutedAnswer
from tests.e2e.stack import FAST_AND_SLOW, Behind, PatientStack, ext_proc_of, here
from tests.waiting import PATIENCE_S, until_read

SESSION = "x-session-id"
OWN = {"x-vllm-priority": "7", "x-data-parallel-rank": "0", "x-own": "kept"}
TWENTY_MB = 20_000_000
PROMPT_S = 5.0  # of Envoy's 10 s of patience with the router in these tests
OBSERVE: dict[str, Any] = {
    "serve": {"mode": "observe"},
    "route": {"models": {"alias": MODEL}, "max_ttft_s": 1e-9, "session_header": SESSION},
    "hold": {"objectives": {"urgent": {"priority": 5, "models": [MODEL]}}},
}
"""A router that routed would refuse every request by ``max_ttft_s``, and set priorities."""
SHARE: dict[str, Any] = {
    "serve": {"share": 0.5, "chunks_per_s": 1e6},
    "route": {"session_header": SESSION},
}


class ReceivedRequest(NamedTuple):
    """A request as its replica got it."""

    replica: str
    headers: dict[str, str]
    body: bytes


class RecordingServer(server.ReplicaServer):
    """A simulated replica that records the requests of the module's tests."""

    requests: ClassVar[dict[str, tuple[dict[str, str], bytes]]] = {}

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.insert(0, self._record)
        return app

    @web.middleware
    async def _record(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests[headers.get("x-request-id", "")] = headers, await request.read()
        return await handler(request)


class RecordingStack(Behind):
    """A stack whose replicas record requests."""

    async def __aenter__(self) -> Self:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "ReplicaServer", RecordingServer)
            return await super().__aenter__()


class ObservedStack(RecordingStack):
    """An Envoy that takes turns between the replicas, and sends the router every response."""

    name = "observe"

    def _shipped(self) -> Bootstrap:
        bootstrap = super()._shipped()
        sampled, _ = manager_of(bootstrap)["route_config"]["virtual_hosts"][0]["routes"]
        sampled["match"]["runtime_fraction"]["default_value"]["numerator"] = 100
        bootstrap["static_resources"]["clusters"][1]["lb_policy"] = "ROUND_ROBIN"
        ext_proc_of(bootstrap)["deferred_close_timeout"] = "5s"  # a busy machine is slow
        return bootstrap


system = partial(ObservedStack, replicas=here(FAST_AND_SLOW), settings=OBSERVE, pollers=0)


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def accesses(stack: PatientStack) -> AccessLog:
    """Envoy's access log since the test began."""
    log = AccessLog(stack.access_log)
    log.new()
    return log


def odd_body(tokens: int = 3, pad: int = 0, **fields: Any) -> bytes:
    """A body that any rewriting would change: spaces, escapes, a key that occurs twice."""
    more = "".join(f', "{name}": {json.dumps(value)}' for name, value in fields.items())
    text = f'{{ "priority": 1,"priority" :2, "max_tokens":{tokens} , "user": "\\u00e9{"x" * pad}"'
    return f'{text}, "model":"{MODEL}",\t"messages": {json.dumps(MESSAGES)}{more}}}\n'.encode()


async def send(client: EnvoyClient, body: bytes, **headers: str) -> RoutedAnswer:
    values = {"x-request-id": str(uuid.uuid4()), "content-type": "application/json"}
    answer = await client.send("POST", CHAT, io.BytesIO(body), values | OWN | headers)
    assert answer.status == 200
    return answer


def recorded(client: EnvoyClient, answer: RoutedAnswer) -> ReceivedRequest:
    replica = client.stack.name_of(answer.headers[SERVED_BY_HEADER])
    return ReceivedRequest(replica, *RecordingServer.requests[answer.headers["x-request-id"]])


async def unchanged(client: EnvoyClient, requests: int = 8) -> list[ReceivedRequest]:
    """Send requests; assert that they arrived unchanged."""
    body, found = odd_body(), []
    for _ in range(requests):
        found.append(recorded(client, await send(client, body)))
    assert {request.body for request in found} == {body}
    for request in found:
        assert DESTINATION not in request.headers
        assert OWN.items() <= request.headers.items()
    return found


async def in_turn(client: EnvoyClient, requests: int = 8) -> list[ReceivedRequest]:
    """Send requests over one connection; assert that Envoy's own policy chose, and that requests
    arrived unchanged."""
    found = await unchanged(client, requests)
    half = requests / 2
    assert Counter(request.replica for request in found) == {"one": half, "two": half}
    return found


async def compared(client: EnvoyClient, answer: RoutedAnswer) -> dict[str, Any]:
    """The router's record of a request, once the router has seen its end."""
    found = await until_read(
        lambda: client.decisions(answer.headers["x-request-id"]),
        lambda records: bool(records) and records[0]["outcome"]["completion_s"] is not None,
    )
    return found[0]


def names(found: list[ReceivedRequest]) -> set[frozenset[str]]:
    return {frozenset(request.headers) for request in found}


async def test_envoy_alone_decides_and_no_byte_changes(client: EnvoyClient) -> None:
    observed = partial(client.metric, 'extproc_requests_total{result="observed"}')
    before = await observed()
    await in_turn(client)
    await until_read(observed, lambda now: now == before + 8)
    for result in ("routed", "refused", "unrouted", "gave_up"):
        assert await client.metric(f'extproc_requests_total{{result="{result}"}}') == 0


async def test_requests_are_the_same_without_a_router(client: EnvoyClient) -> None:
    observed = names(await in_turn(client))
    async with client.without_router():
        assert names(await in_turn(client)) == observed


async def test_predictions_are_compared_with_choice_of_envoy(
    client: EnvoyClient, accesses: AccessLog
) -> None:
    answers = [await client.chat(tokens=20, stream=stream) for stream in (True, False) * 3]
    upstream = dict[str, str]()
    while not {answer.headers["x-request-id"] for answer in answers} <= upstream.keys():
        upstream |= {access.request_id: access.upstream for access in accesses.new()}
        await asyncio.sleep(0.05)
    chosen = []
    for answer in answers:
        decision = await compared(client, answer)
        outcome = decision["outcome"]
        assert decision["observed"]
        assert outcome["served_by"] == upstream[decision["request_id"]]
        assert 0.0 < outcome["completion_s"] < 60.0
        assert outcome["output_tokens"] == 20
        chosen.append(decision["replica"] == outcome["served_by"])
    assert set(chosen) == {True, False}


async def test_request_counts_on_its_replica_from_first_token_on(client: EnvoyClient) -> None:
    request = asyncio.create_task(client.chat(tokens=150, stream=True))
    busy = await client.busy()
    decision = await compared(client, await request)
    assert client.stack.name_of(decision["outcome"]["served_by"]) == busy
    await client.has_in_flight(0)


async def test_hung_router_delays_no_request(client: EnvoyClient) -> None:
    """Envoy takes more than 10 s here to notice that the router hangs."""
    with client.stack.paused("router"):
        async with asyncio.timeout(PROMPT_S):
            await in_turn(client, 4)
            await send(client, odd_body(tokens=1, pad=TWENTY_MB))
            streamed = await send(client, odd_body(tokens=50, stream=True))
            assert streamed.body.endswith(b"data: [DONE]\n\n")


async def test_killed_router_ends_no_request(client: EnvoyClient) -> None:
    requests = [asyncio.create_task(send(client, odd_body(tokens=100, stream=True)))]
    await client.busy()
    async with client.without_router():
        requests += [asyncio.create_task(send(client, odd_body())) for _ in range(4)]
        streamed, *_ = await asyncio.gather(*requests)
        assert streamed.body.endswith(b"data: [DONE]\n\n")


def fill_memory(pid: int) -> None:
    """Let the system give a process no more memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^VmSize:\s+(\d+) kB$", status, re.M)
    now = int(kilobytes) * 1024
    resource.prlimit(pid, resource.RLIMIT_AS, (now, now))


@pytest_asyncio.fixture(loop_scope="session")
async def router_with_full_memory(
    client: EnvoyClient, stack: PatientStack
) -> AsyncIterator[Process]:
    process = stack.process("router")
    fill_memory(process.pid)
    yield process
    await stack.kill("router")
    await client.start_router()


async def test_router_with_full_memory_changes_no_request(
    client: EnvoyClient, router_with_full_memory: Process
) -> None:
    router = router_with_full_memory

    def met_its_limit() -> bool:
        return not router.running or "MemoryError" in router.log.read_text()

    async with asyncio.timeout(PATIENCE_S):
        while not met_its_limit():
            await unchanged(client, 2)
            large = odd_body(tokens=1, pad=TWENTY_MB)
            for answer in await asyncio.gather(*(send(client, large) for _ in range(4))):
                assert recorded(client, answer).body == large
    await unchanged(client)
    streamed = await send(client, odd_body(tokens=50, stream=True))
    assert streamed.body.endswith(b"data: [DONE]\n\n")


async def test_share_of_sessions_is_routed_and_rest_is_left_alone(
    client: EnvoyClient, tmp_path: Path
) -> None:
    sides, body = set[bool](), odd_body()
    replicas, headers = here(FAST_AND_SLOW), (SESSION,)
    async with RecordingStack(tmp_path, replicas, SHARE, pollers=0, headers=headers) as stack:
        client, config = EnvoyClient(stack, client.session), load({}, {}, stack.config_file)
        for session in map(str, range(8)):
            steered = is_steered(config, {SESSION: session})
            sides.add(steered)
            for _ in range(2):
                found = recorded(client, await send(client, body, **{SESSION: session}))
                assert (DESTINATION in found.headers) is steered
                assert found.body == body
    assert sides == {True, False}


async def test_check_accepts_configuration_of_the_stack(running: PatientStack) -> None:
    bootstrap = running._bootstrap()
    ext_proc_of(bootstrap)["deferred_close_timeout"] = "0.2s"
    findings = check_envoy(bootstrap, load({}, {}, running.config_file))
    assert {finding.level for finding in findings} == {Level.OK}
