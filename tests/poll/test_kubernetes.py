"""Pods of a Service are found by list and watch, and stay known while the API server fails."""

import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from lightkube.resources.discovery_v1 import EndpointSlice

from extproc.config import ReplicaSource
from extproc.ground.runtime import Backoff
from extproc.poll import reflector
from extproc.poll.discovery import Discovery
from extproc.poll.kubernetes import Pod, pods_of
from tests.certificates import Authority
from tests.conftest import Logged, RedisServer
from tests.kubernetes_api import ApiServer, endpoint, endpoint_slice, terminating
from tests.poll.kubernetes import EMPTY, FOUND, LOST, SCALED, Found, RecordedAnswers
from tests.poll.polling import config, metrics_of, watching
from tests.poll.replica import ScriptedReplica, hang, serving
from tests.waiting import PATIENCE_S, until, until_read

SERVICE = {"service": "vllm", "port": 8000}
TWO = (endpoint("10.1.0.1", "vllm-0"), endpoint("10.1.0.2", "vllm-1"))


@pytest.fixture
async def api(api: ApiServer) -> ApiServer:
    api.put(endpoint_slice(*TWO))
    return api


@pytest.fixture
async def found(api: ApiServer) -> AsyncIterator[Found]:
    with Found(**SERVICE) as found:
        yield found


@pytest.fixture
async def watched(api: ApiServer, found: Found) -> Found:
    """Waits until both pods are found, and a watch has begun."""
    await found.has(vllm_0="serves", vllm_1="serves")
    await api.watched()
    return found


async def test_recorded_watch_of_a_real_server_is_followed(api: ApiServer, found: Found) -> None:
    real = RecordedAnswers("endpointslices", "endpointslices-watch", "watch-too-old")
    api.handler = real.answer
    await found.has(vllm_0="serves", vllm_1="serves")
    for now in (
        *SCALED,
        {"vllm_1": "serves", "vllm_2": "serves"},
        {"vllm_1": "serves", "vllm_2": "serves", "vllm_3": "serves", "vllm_4": "serves"},
        {"vllm_1": "serves", "vllm_2": "serves"},
    ):
        real.step.release()
        await found.has(**now)
    for _bookmark in range(2):
        real.step.release()
    await until(lambda: len(api.queries_of("watch")) == 2)
    await found.has(vllm_0="serves", vllm_1="serves")
    real.step.release()  # the error event: resourceVersion too old
    await until(lambda: len(api.queries_of("watch")) == 3)
    assert [query["resourceVersion"] for query in api.queries_of("watch")] == ["91"] * 3
    await found.has(vllm_0="serves", vllm_1="serves")


async def test_list_and_watch_send_the_query_of_the_kubernetes_api(
    api: ApiServer, found: Found
) -> None:
    await found.has(vllm_0="serves", vllm_1="serves")
    watch = await api.watched()
    path = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
    selected = {"path": path, "labelSelector": "kubernetes.io/service-name=vllm"}
    assert api.queries == [selected, watch]
    assert watch == selected | {"watch": "true", "resourceVersion": "91", "timeoutSeconds": "600"}


async def test_source_sets_namespace_and_name_prefix(api: ApiServer) -> None:
    source = {"kubernetes": SERVICE | {"namespace": "gpu"}, "name": "fast"}
    discovery = Discovery([ReplicaSource.model_validate(source)], None, PATIENCE_S)
    assert [target.name for target in await discovery.targets()] == ["fast/vllm-0", "fast/vllm-1"]
    assert api.queries[0]["path"].split("/")[5] == "gpu"
    discovery.stop()


@pytest.mark.parametrize("last", [b"", b'{"type": "MODIFIED", "object": {"kind": "EndpointSl'])
@pytest.mark.parametrize("cut", [ApiServer.drop_watches, ApiServer.end_watches])
async def test_change_between_two_watches_is_found_by_the_next_list(
    api: ApiServer,
    watched: Found,
    logged: Logged,
    cut: Callable[[ApiServer, bytes], None],
    last: bytes,
) -> None:
    api.put(endpoint_slice(TWO[0], terminating("10.1.0.2", "vllm-1")))
    await watched.has(vllm_0="serves", vllm_1="drains")
    cut(api, last)
    api.put(endpoint_slice(TWO[0]))  # while nobody watches
    await watched.has(vllm_0="serves")
    await api.watched(2)
    assert not logged.lines(LOST)


async def test_watch_of_a_vanished_server_ends(
    api: ApiServer, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "_WATCH_S", 0.05)
    monkeypatch.setattr(reflector, "_LATE_S", 0.05)
    answer = api.handler

    async def silent(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return await answer(request)
        await web.StreamResponse().prepare(request)
        return await hang(request)

    api.handler = silent
    await found.has(vllm_0="serves", vllm_1="serves")
    api.delete("vllm-abcde")
    await found.has()


async def test_server_that_accepts_and_never_answers_is_logged(
    api: ApiServer, found: Found, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    monkeypatch.setattr(reflector, "_LIST_S", 600)
    monkeypatch.setattr(reflector, "_CONNECT_S", 0.05)
    await api.stop()
    with socket.create_server(("127.0.0.1", api.port)):
        assert await found.pods() == {}
    assert found.discovery.unread() == ["Service vllm, port 8000"]
    assert (await logged.line(LOST))["error"] == "no answer from the API server: ConnectTimeout"


async def test_server_restored_from_a_backup_is_listed_again(
    api: ApiServer, watched: Found
) -> None:
    api.put(endpoint_slice(TWO[1]))
    await watched.has(vllm_1="serves")
    api.go_back(50)
    api.put(endpoint_slice(*TWO))
    api.drop_watches()
    await watched.has(vllm_0="serves", vllm_1="serves")


async def test_pods_stay_known_while_the_api_server_is_down(
    api: ApiServer, found: Found, logged: Logged
) -> None:
    api.put(endpoint_slice(TWO[0], endpoint("10.1.0.2", "vllm-1", ready=False)))
    api.put(endpoint_slice(terminating("10.1.0.3", "vllm-2"), name="vllm-second"))
    await found.has(vllm_0="serves", vllm_1="not ready", vllm_2="drains")
    await api.watched()
    await api.stop()
    await logged.line(LOST)
    assert await found.pods() == {"vllm-0": "serves", "vllm-1": "not ready", "vllm-2": "drains"}
    assert found.discovery.unread() == []
    await api.start()
    await logged.line(FOUND)
    api.put(endpoint_slice(TWO[0], TWO[1]))
    await found.has(vllm_0="serves", vllm_1="serves", vllm_2="drains")
    assert len(logged.lines(LOST)) == len(logged.lines(FOUND)) == 1


async def test_renewed_service_account_token_is_used(
    api: ApiServer, watched: Found, logged: Logged
) -> None:
    api.token = "token-2"
    api.drop_watches()
    line = await logged.line(LOST)
    assert "is not accepted (401): Unauthorized" in str(line["error"])
    assert str(api.account / "token") in str(line["error"])
    api.mount_token("token-2")
    await logged.line(FOUND)
    api.put(endpoint_slice(TWO[0]))
    await watched.has(vllm_0="serves")


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_missing_rbac_right_is_named_in_the_log(
    api: ApiServer, found: Found, logged: Logged, verb: str
) -> None:
    api.forbidden = {verb}
    await found.pods()
    error = str((await logged.line(LOST))["error"])
    assert "a Role that allows the verbs list and watch on endpointslices (403)" in error
    assert f'cannot {verb} resource "endpointslices" in API group "discovery.k8s.io"' in error
    api.forbidden = set()
    await found.has(vllm_0="serves", vllm_1="serves")
    assert len(logged.lines(LOST)) == 1


async def test_missing_service_account_file_is_named_in_the_log(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    async def problem(times: int) -> str:
        with Found(**SERVICE) as found:
            assert await found.pods() == {}
            await logged.line(LOST, times)
        return str(logged.lines(LOST)[-1]["error"])

    Authority(tmp_path / "other").file.rename(api.account / "ca.crt")
    assert "certificate verify failed" in await problem(1)
    (api.account / "ca.crt").write_text("nothing")
    assert "ca.crt holds no certificate (PEM)" in await problem(2)
    (api.account / "token").unlink()
    assert "account/token': give the pod a service account" in await problem(3)
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT")
    api.mount_token("any")
    assert "KUBERNETES_SERVICE_PORT is not set" in await problem(4)


@pytest.mark.parametrize(
    ("service", "problem"),
    [
        ({"service": "vlm"}, "does the Service exist"),
        ({"port": "grpc"}, "none of its endpoints has an IP address and the port grpc"),
    ],
)
async def test_service_without_replicas_is_logged_with_the_reason(
    api: ApiServer, logged: Logged, service: dict[str, str], problem: str
) -> None:
    with Found(**SERVICE | service) as found:
        assert await found.pods() == {}
        line = await logged.line(EMPTY)
        assert problem in str(line["error"])
        name = service.get("service", "vllm")
        assert line["source"] == f"Service {name}, port {service.get('port', 8000)}"
        await api.watched()
        api.put(endpoint_slice(TWO[0], name="new", ports=[("grpc", 1)], service=name))
        await found.has(vllm_0="serves")


async def test_largest_endpoint_slice_is_read_from_a_watch(api: ApiServer, watched: Found) -> None:
    many = [endpoint(f"10.1.{n // 250}.{n % 250}", f"vllm-{n}") for n in range(1000)]
    large = endpoint_slice(*many)
    large["metadata"]["annotations"] = {"what": "x" * 1_000_000}
    api.put(large)
    await until_read(watched.pods, lambda now: len(now) == 1000)
    assert len(api.queries_of("list")) == 1  # read from the watch


async def test_unreadable_watch_event_causes_a_new_list(api: ApiServer, watched: Found) -> None:
    api.send("MODIFIED", metadata=None)
    await until(lambda: len(api.queries_of("list")) == 2)
    await watched.has(vllm_0="serves", vllm_1="serves")


async def test_attempts_back_off_until_a_watch_begins(
    api: ApiServer, found: Found, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    waits: list[float] = []

    class RecordedBackoff(Backoff):
        def next(self) -> float:
            waits.append(super().next())
            return 0.0

    monkeypatch.setattr(reflector, "Backoff", RecordedBackoff)
    await api.stop()
    await found.pods()
    await until(lambda: len(waits) >= 8)
    assert min(waits[1:]) > reflector._FIRST_WAIT_S >= waits[0]
    assert len(logged.lines(LOST)) == 1
    await api.start()
    await logged.line(FOUND)
    waits.clear()
    api.drop_watches()
    await until(lambda: waits)
    assert waits[0] <= reflector._FIRST_WAIT_S


async def test_service_removed_from_the_replicas_file_is_no_longer_watched(
    api: ApiServer, tmp_path: Path
) -> None:
    file = tmp_path / "replicas.yaml"
    file.write_text("[{kubernetes: {service: vllm, port: http}}]")
    discovery = Discovery([], file, PATIENCE_S)
    assert [target.id for target in await discovery.targets()] == ["10.1.0.1:8000", "10.1.0.2:8000"]
    await api.watched()
    file.write_text('["10.9.0.1:8000"]')
    assert [target.id for target in await discovery.targets()] == ["10.9.0.1:8000"]
    await until(lambda: not api.watches)
    discovery.stop()


@pytest.mark.parametrize(
    ("conditions", "ready", "ends"),
    [
        ({}, True, False),
        ({"ready": None, "serving": None, "terminating": None}, True, False),
        ({"ready": False}, False, False),
        ({"ready": False, "serving": False, "terminating": False}, False, False),
        # publishNotReadyAddresses: pods count although they are not ready
        ({"ready": True, "serving": False, "terminating": False}, True, False),
        ({"ready": False, "serving": True, "terminating": True}, True, True),
        ({"ready": False, "serving": False, "terminating": True}, False, True),
        ({"ready": False, "terminating": True}, False, True),
    ],
)
def test_endpoint_conditions_decide_readiness(
    conditions: dict[str, Any], ready: bool, ends: bool
) -> None:
    (pod,) = pods([endpoint_slice({"addresses": ["10.1.0.1"], "conditions": conditions})]).values()
    assert (pod.ready, pod.terminating) == (ready, ends)


def pods(slices: list[dict[str, Any]], port: int | str = 8000) -> dict[str, Pod]:
    return pods_of(msgspec.convert(slices, list[EndpointSlice]), port)


def test_slices_of_a_service_are_merged() -> None:
    moved = endpoint("10.1.0.2", "vllm-1", ready=False)
    slices = [
        endpoint_slice(*TWO, name="a"),
        endpoint_slice(moved, endpoint("10.1.0.3", "vllm-2"), name="b"),
        endpoint_slice(terminating("10.1.0.3", "vllm-2"), name="c"),
        {**endpoint_slice(name="d"), "endpoints": None, "ports": None},
    ]
    for order in (slices, slices[::-1]):
        assert pods(order) == {
            "10.1.0.1:8000": Pod("vllm-0", ready=True, terminating=False),
            "10.1.0.2:8000": Pod("vllm-1", ready=True, terminating=False),
            "10.1.0.3:8000": Pod("vllm-2", ready=True, terminating=True),
        }


def test_pod_with_two_address_families_counts_once() -> None:
    six = endpoint_slice(endpoint("fd00::1", "vllm-0"), name="six", family="IPv6")
    four = endpoint_slice(TWO[0], name="four")
    name = endpoint_slice(endpoint("vllm.example.org", ""), name="name", family="FQDN")
    assert list(pods([six, four, name])) == ["10.1.0.1:8000"]
    assert list(pods([six, name])) == ["[fd00::1]:8000"]


def test_each_pod_is_found_by_the_address_family_it_has() -> None:
    six = endpoint_slice(
        endpoint("fd00::1", "vllm-0"), endpoint("fd00::2", "vllm-1"), name="six", family="IPv6"
    )
    both = ["[fd00::1]:8000", "[fd00::2]:8000"]
    for empty in (endpoint_slice(name="four"), {**endpoint_slice(name="four"), "endpoints": None}):
        assert list(pods([six, empty])) == list(pods([empty, six])) == both
    four = endpoint_slice(TWO[1], endpoint("10.1.0.3", "vllm-2"), name="four")
    assert list(pods([six, four])) == ["10.1.0.2:8000", "10.1.0.3:8000", "[fd00::1]:8000"]


def test_named_port_is_resolved_in_each_slice() -> None:
    slices = [
        endpoint_slice(TWO[0], name="a", ports=[("metrics", 9000), ("http", 8000)]),
        endpoint_slice(TWO[1], name="b", ports=[("http", 8001)]),
        endpoint_slice(endpoint("10.1.0.3", "vllm-2"), name="c", ports=[("metrics", 9000)]),
    ]
    assert list(pods(slices, "http")) == ["10.1.0.1:8000", "10.1.0.2:8001"]
    assert list(pods(slices, 7000)) == ["10.1.0.1:7000", "10.1.0.2:7000", "10.1.0.3:7000"]


@pytest.mark.process
async def test_pod_conditions_reach_routers_at_once(
    api: ApiServer, redis_server: RedisServer
) -> None:
    async with serving() as first, serving() as second:

        def put(replica: ScriptedReplica, **conditions: bool) -> None:
            pod = endpoint("127.0.0.1", f"vllm-{replica.port}", **conditions)
            api.put(endpoint_slice(pod, name=str(replica.port), ports=[("http", replica.port)]))

        api.delete("vllm-abcde")
        put(first)
        put(second, ready=False)
        source = {"kubernetes": {"service": "vllm", "port": "http"}}
        settings = config(redis_server, replicas=[source])
        async with watching(settings) as router:
            state = await router.replica(first, healthy=True)
            assert (state.name, state.draining) == (f"vllm-{first.port}", False)
            state = await router.replica(second, lambda state: bool(state.models))
            assert (state.healthy, state.ready) == (True, False)
            assert state.problem == "not ready, says Kubernetes"
            assert 'replicas_healthy{pool="default"} 1.0' in await metrics_of(settings)
            put(second)
            state = await router.replica(second, ready=True)
            assert (state.ready, state.problem) == (True, "")
            first.answers["/metrics"] = hang  # no scrape ends from now on
            await first.requested("/metrics", more=1)
            put(first, ready=False, serving=True, terminating=True)
            state = await router.replica(first, draining=True)
            assert state.healthy
            await first.stop()
            state = await router.replica(first, healthy=False)
            assert state.draining
            api.delete(str(first.port))
            await router.until(lambda states: [*states] == [second.id])
