"""envoy/envoy.yaml and envoy/ext_proc.yaml in a real Envoy, with a fake router."""

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyResponse,
    CommonResponse,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from envoy_data_plane.google.protobuf import Struct, Value
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from yarl import URL

from extproc.lab.harness.envoy_config import (
    Bootstrap,
    addressed,
    endpoints,
    manager_of,
    socket_address,
)
from extproc.lab.harness.processes import Process, answers, envoy_binary, free_port, listening
from tests.e2e.stack import patient
from tests.waiting import until

SKIPPED = "x-extproc-response-skipped"

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

ENVOY = Path(__file__).parents[2] / "envoy"
DESTINATION = "x-gateway-destination-endpoint"
COMPLETIONS = "/v1/completions"
ENOUGH = 40  # requests to the same of two replicas by chance in one of 500,000,000,000 cases


async def validate(config: Path) -> str:
    """Run ``envoy --mode validate``, which must accept the file; return its output."""
    process = await asyncio.create_subprocess_exec(
        envoy_binary(), "--mode", "validate", "-c", config,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("name", ["envoy.yaml", "eds.yaml", "ext_proc.yaml"])
async def test_shipped_file_is_valid_without_deprecated_fields(tmp_path: Path, name: str) -> None:
    file = ENVOY / name
    if name == "ext_proc.yaml":  # a fragment
        file = tmp_path / "envoy.yaml"
        file.write_text(yaml.safe_dump({"static_resources": merged()}), encoding="utf-8")
    assert "eprecated" not in await validate(file)


def merged(port: int = 0) -> dict[str, Any]:
    """Return listeners and clusters with the fragment in them, as its comments say."""
    part = yaml.safe_load((ENVOY / "ext_proc.yaml").read_text(encoding="utf-8"))
    types = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{types}.http.router.v3.Router"}
    host = {"name": "mine", "domains": ["*"], "routes": part["routes"]}
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "mine",
        **part["http_connection_manager"],
        "route_config": {"virtual_hosts": [host]},
    }
    manager["http_filters"].append({"name": "router", "typed_config": router})
    filters = [{"name": "http", "typed_config": manager}]
    listener = {
        "name": "mine",
        "address": socket_address(f"127.0.0.1:{port}"),
        "filter_chains": [{"filters": filters}],
        **part["listener"],
    }
    return {"listeners": [listener], "clusters": part["clusters"]}


def around_the_fragment(port: int, admin: int, router: str, replicas: Sequence[str]) -> Bootstrap:
    """Return a whole configuration with the fragment in it, on these ports of loopback."""
    resources = merged(port)
    members = {"extproc_router": [router], "vllm_replicas": replicas}
    for cluster in resources["clusters"]:
        cluster["load_assignment"]["endpoints"] = endpoints(members[cluster["name"]])
    address = {"address": socket_address(f"127.0.0.1:{admin}")}
    return {"admin": address, "static_resources": resources}


@asynccontextmanager
async def replica(name: str) -> AsyncIterator[str]:
    """Run a replica that answers with its name and the request; yield its ``ip:port``."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        header = request.headers.get(DESTINATION)
        seen = {"name": name, "header": header, "bytes": len(body), "path": request.raw_path}
        return web.json_response(seen | {"headers": dict(request.headers)})

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def dying_replica() -> AsyncIterator[str]:
    """Run a replica that closes each connection after the request; yield its ``ip:port``."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


class FakeRouter:
    """An ext_proc server that sends every request to ``destination``."""

    def __init__(self) -> None:
        self.destination = ""
        self.served_by = ""
        self.messages: list[str] = []  # kinds of the messages before requests left
        self.attributes: dict[str, str] = {}  # of the last request body

    async def process(
        self, requests: AsyncIterator[ProcessingRequest], _: object
    ) -> AsyncIterator[ProcessingResponse]:
        async for request in requests:
            if request.response_headers is not None:
                fields = request.attributes["envoy.filters.http.ext_proc"].fields
                self.served_by = fields["upstream.address"].string_value or ""
                yield ProcessingResponse(response_headers=HeadersResponse(CommonResponse()))
            elif request.request_headers is not None:
                self.messages.append("headers")
                yield ProcessingResponse(
                    request_headers=HeadersResponse(CommonResponse()),
                    dynamic_metadata=self._choice(),
                )
            else:
                self.messages.append("body")
                for struct in request.attributes.values():
                    attributes = struct.fields.items()
                    self.attributes = {key: value.string_value or "" for key, value in attributes}
                yield ProcessingResponse(
                    request_body=BodyResponse(CommonResponse()), dynamic_metadata=self._choice()
                )

    def _choice(self) -> Struct:
        chosen = Struct(fields={DESTINATION: Value(string_value=self.destination)})
        return Struct(fields={"envoy.lb": Value(struct_value=chosen)} if self.destination else {})


@asynccontextmanager
async def serve(router: FakeRouter) -> AsyncIterator[int]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2**28)])
    method = grpc.stream_stream_rpc_method_handler(
        router.process, request_deserializer=ProcessingRequest.parse, response_serializer=bytes
    )
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    handler = grpc.method_handlers_generic_handler(service, {"Process": method})
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


Change = Callable[[dict[str, Any]], object]


@asynccontextmanager
async def envoy(
    directory: Path,
    router_port: int,
    replicas: Sequence[str],
    change: Change = lambda _: None,
    fragment: bool = False,
) -> AsyncIterator[str]:
    """Run envoy.yaml with a change, or the fragment in an Envoy; yield its URL."""
    port, admin, router = free_port(), free_port(), f"127.0.0.1:{router_port}"
    listen, look = f"127.0.0.1:{port}", f"127.0.0.1:{admin}"
    bootstrap = (
        around_the_fragment(port, admin, router, replicas)
        if fragment
        else addressed(listen=listen, admin=look, routers=[router], replicas=replicas)
    )
    change(bootstrap)
    async with running(directory, bootstrap, admin):
        yield f"http://{listen}"


@asynccontextmanager
async def running(
    directory: Path, bootstrap: Bootstrap, admin: int, options: Sequence[str] = ()
) -> AsyncIterator[None]:
    config = directory / "envoy.yaml"
    text = patient(yaml.safe_dump(bootstrap))  # a busy machine is slow
    config.write_text(text, encoding="utf-8")
    argv: list[str | Path] = [envoy_binary(), "-c", config, "--use-dynamic-base-id"]
    async with await Process.start(
        "envoy",
        [*argv, "--concurrency", "1", *options],
        log=directory / "envoy.log",
        ready=answers(f"http://127.0.0.1:{admin}/ready"),
    ):
        yield


async def post(
    url: str, headers: dict[str, str] | None = None, body: bytes = b"{}", path: str = COMPLETIONS
) -> dict[str, Any]:
    """Send a request for a path exactly as written; return the replica's answer."""
    target, data = URL(url + path, encoded=True), io.BytesIO(body)
    async with (
        aiohttp.ClientSession() as session,
        session.post(target, data=data, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer | {"request_id": response.headers.get("x-request-id")}


class RoutedPair(NamedTuple):
    router: FakeRouter
    url: str
    a: str
    b: str


@asynccontextmanager
async def system(
    directory: Path,
    change: Change = lambda _: None,
    others: Sequence[str] = (),
    fragment: bool = False,
) -> AsyncIterator[RoutedPair]:
    """Run envoy.yaml with a change, or the fragment; the router chooses replica a."""
    router = FakeRouter()
    async with (
        replica("a") as a,
        replica("b") as b,
        serve(router) as port,
        envoy(directory, port, [*others, a, b], change, fragment) as url,
    ):
        router.destination = a
        yield RoutedPair(router, url, a, b)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RoutedPair]:
    async with system(tmp_path_factory.mktemp("envoy")) as running:
        yield running


@pytest.fixture
def whole_file(shared: RoutedPair) -> RoutedPair:
    """The shared system, whose router chooses replica a and has seen no request."""
    router = shared.router
    router.destination, router.served_by = shared.a, ""
    router.messages.clear()
    router.attributes.clear()
    return shared


@pytest.fixture
def refusing() -> Iterator[int]:
    """Yield a port that refuses connections: bound, but never listened on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        # Paths that clients of vLLM use stay unchanged.
        *[(path, path) for path in (
            "/v1/chat/completions", "/v1/models/org%2Fmodel", "/v1/models/a%20b%C3%A9:7b@main",
            "/v1/files/f.1/content?u=http://x//y&z=..", "/v1/responses", "/",
        )],
        ("//v1//completions", COMPLETIONS),
        ("/v1/../metrics", "/metrics"),
        ("/v1/./models/%2e%2e/completions", COMPLETIONS),
    ],
)  # fmt: skip
async def test_router_and_replica_see_same_path(
    whole_file: RoutedPair, sent: str, arrives: str
) -> None:
    router, url, *_ = whole_file
    assert (await post(url, path=sent))["path"] == arrives
    assert router.attributes["request.path"] == arrives


async def test_request_leaves_after_one_message(whole_file: RoutedPair) -> None:
    router, url, *_ = whole_file
    named = {"x-request-id": "mine", "content-encoding": "identity", "x-other": "o"}
    answer = await post(url, named)
    assert router.messages == ["body"]
    assert router.attributes == {
        "request.path": COMPLETIONS,
        "request.id": "mine",
        "request.headers['content-encoding']": "identity",
    }
    assert answer["header"] == router.destination  # for logs and other filters


async def test_envoy_shows_router_100_responses_per_second(tmp_path: Path) -> None:
    def two(tree: dict[str, Any]) -> None:
        limit, *_ = manager_of(tree)["http_filters"]
        bucket = limit["typed_config"]["token_bucket"]
        assert bucket["tokens_per_fill"] / float(bucket["fill_interval"].removesuffix("s")) == 100
        bucket |= {"max_tokens": 2, "tokens_per_fill": 1, "fill_interval": "3600s"}

    async with system(tmp_path, two) as (router, url, a, _):
        for number in range(4):
            router.served_by = ""
            answer = await post(url)
            assert answer["header"] == a
            shown = number < 2
            assert router.served_by == (a if shown else "")
            assert (f"request.headers['{SKIPPED}']" in router.attributes) is not shown
            assert SKIPPED not in {name.lower() for name in answer["headers"]}
        await post(url, path="/v1/responses")
        assert router.served_by == a


@pytest.mark.parametrize("fragment", [False, True])
async def test_client_cannot_hide_response_from_router(tmp_path: Path, fragment: bool) -> None:
    async with system(tmp_path, fragment=fragment) as (router, url, a, _):
        await post(url, {"X-Extproc-Response-Skipped": "1"})
        assert router.served_by == a
        assert f"request.headers['{SKIPPED}']" not in router.attributes


@pytest.mark.parametrize(
    ("path", "size", "messages"),
    [
        ("/v1/models", 0, ["headers"]),
        ("/pool/v1/responses/resp_1/cancel?a=b", 0, ["headers"]),
        ("/v1/responses", 10, ["body"]),
        (COMPLETIONS, 8 * 2**20, ["body"]),
        (COMPLETIONS, 8 * 2**20 + 1, ["headers", "body"]),
        (COMPLETIONS, 0, []),
    ],
)
async def test_request_with_no_or_large_body_sends_headers(
    whole_file: RoutedPair, path: str, size: int, messages: list[str]
) -> None:
    router, url, *_ = whole_file
    answer = await post(url, body=bytes(size), path=path)
    assert router.messages == messages
    assert answer["bytes"] == size
    assert answer["header"] == (router.destination if messages else None)


@pytest.mark.parametrize("in_compose", [False, True])
async def test_admin_port_is_open_only_in_compose(tmp_path: Path, in_compose: bool) -> None:
    compose = yaml.safe_load((ENVOY.parent / "compose.yaml").read_text(encoding="utf-8"))
    option, _, *overrides = compose["services"]["envoy"]["command"]
    assert option == "-c"
    tree = yaml.safe_load((ENVOY / "envoy.yaml").read_text(encoding="utf-8"))
    admin = tree["admin"]["address"]["socket_address"]["port_value"] = free_port()
    tree["static_resources"] = {}
    options = overrides if in_compose else []
    async with running(tmp_path, tree, admin, options):
        # A listener on 127.0.0.1 does not answer on this address.
        assert await listening(admin, "127.0.0.2")() is in_compose


async def test_headers_with_underscores_are_dropped(whole_file: RoutedPair) -> None:
    url = whole_file.url
    forged = {DESTINATION.replace("-", "_"): "1.2.3.4:5", "x-mine": "kept"}
    arrived = (await post(url, forged))["headers"]
    assert arrived["x-mine"] == "kept"
    assert not [name for name in arrived if "_" in name]


async def test_overload_manager_refuses_requests(tmp_path: Path) -> None:
    def nearly_full(tree: dict[str, Any]) -> None:
        heap = tree["overload_manager"]["resource_monitors"][0]["typed_config"]
        heap["max_heap_size_bytes"] = 2**20

    async with replica("a") as a, envoy(tmp_path, 1, [a], nearly_full) as url:

        async def refused() -> bool:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status == 503 and "overloaded" in await response.text()

        await until(refused)


async def test_second_choice_serves_when_first_is_dead(tmp_path: Path, refusing: int) -> None:
    dead = f"127.0.0.1:{refusing}"
    async with (
        dying_replica() as dying,
        system(tmp_path, others=[dead, dying]) as (router, url, a, b),
    ):
        for first in (dead, dying):
            for name, second in [("a", a), ("b", b)]:
                router.destination = f"{first},{second}"
                assert (await post(url))["name"] == name
                assert router.served_by == second


@pytest.mark.parametrize("case", ["no router", "no router behind the fragment", "no choice"])
async def test_client_cannot_choose_when_router_does_not(
    tmp_path: Path, refusing: int, case: str
) -> None:
    dead = f"127.0.0.1:{refusing}"
    async with (
        replica("a") as a,
        replica("b") as b,
        serve(FakeRouter()) as port,
        envoy(
            tmp_path,
            port if case == "no choice" else refusing,
            [a, b] if "fragment" in case else [a, b, dead],
            fragment="fragment" in case,
        ) as url,
    ):
        forged = [await post(url, {DESTINATION: a}) for _ in range(ENOUGH)]
    assert {answer["name"] for answer in forged} == {"a", "b"}
    assert {answer["header"] for answer in forged} == {None}
