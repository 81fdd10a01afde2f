"""Pods of an InferencePool are found by watches of the pool and of the pods that it selects."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from lightkube.resources import core_v1

from extproc.config import ReplicaSource
from extproc.poll.discovery import Discovery
from extproc.poll.kubernetes import Pod, members_of
from tests.conftest import Logged
from tests.kubernetes_api import ApiServer, inference_pool, pod
from tests.poll.kubernetes import EMPTY, LOST, SCALED, Found, RecordedAnswers
from tests.waiting import PATIENCE_S, until, until_read

POOL = {"inference_pool": "vllm-llama"}


@pytest.fixture
async def api(api: ApiServer) -> ApiServer:
    api.put(inference_pool(), "inferencepools")
    api.put(inference_pool(9000, name="other"), "inferencepools")
    api.put(pod("vllm-0", "10.1.0.1"), "pods")
    api.put(pod("vllm-1", "10.1.0.2"), "pods")
    api.put(pod("redis-0", "10.1.0.9", labels={"app": "redis"}), "pods")
    return api


@pytest.fixture
async def found(api: ApiServer) -> AsyncIterator[Found]:
    with Found(**POOL) as found:
        yield found


@pytest.fixture
async def watched(api: ApiServer, found: Found) -> Found:
    """Waits until both pods are found, and pool and pods are watched."""
    await found.has(vllm_0="serves", vllm_1="serves")
    await until(lambda: len(api.watches) == 2)
    return found


async def addresses(found: Found) -> list[str]:
    return [target.id for target in await found.discovery.targets()]


async def test_pool_and_its_pods_are_listed_and_watched(api: ApiServer, watched: Found) -> None:
    pools = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
    of_pool = {"path": pools, "fieldSelector": "metadata.name=vllm-llama"}
    of_pods = {"path": "/api/v1/namespaces/llm/pods", "labelSelector": "app=vllm"}
    assert api.queries_of("list") == [of_pool, of_pods]
    by_path = {query["path"]: query for query in api.queries_of("watch")}
    for selected in (of_pool, of_pods):
        assert selected.items() <= by_path[selected["path"]].items()


async def test_recorded_watch_of_pods_is_followed(api: ApiServer, found: Found) -> None:
    real, pools = RecordedAnswers("pods", "pods-watch"), api.handler

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (real.answer if request.path.endswith("/pods") else pools)(request)

    api.handler = answer
    await found.has(vllm_0="serves", vllm_1="serves")
    real.step.release()  # vllm-2 has no address yet
    for now in (
        *SCALED,
        {"vllm_0": "drains", "vllm_1": "serves", "vllm_2": "serves"},  # its grace has ended
        {"vllm_1": "serves", "vllm_2": "serves"},
        {"vllm_2": "serves"},  # vllm-1 lost its label
    ):
        real.step.release()
        await found.has(**now)


async def test_changed_port_of_the_pool_takes_effect(api: ApiServer, watched: Found) -> None:
    api.put(inference_pool(8080), "inferencepools")
    await until_read(lambda: addresses(watched), lambda now: now[0] == "10.1.0.1:8080")
    assert await addresses(watched) == ["10.1.0.1:8080", "10.1.0.2:8080"]
    assert len(api.queries_of("list")) == 2  # read from the watch


async def test_changed_selector_of_the_pool_takes_effect(api: ApiServer, watched: Found) -> None:
    api.put(inference_pool(app="redis"), "inferencepools")
    await watched.has(redis_0="serves")
    await until(lambda: len(api.watches) == 2)  # the watch of the former pods has ended
    api.put(pod("vllm-0", "10.1.0.1", ready=False), "pods")
    api.put(pod("vllm-0", "10.1.0.1", labels={"app": "redis"}), "pods")
    await watched.has(redis_0="serves", vllm_0="serves")


async def test_deleted_pool_has_no_replicas_until_it_exists_again(
    api: ApiServer, watched: Found, logged: Logged
) -> None:
    api.delete("vllm-llama", "inferencepools")
    await watched.has()
    line = await logged.line(EMPTY)
    assert line["source"] == "InferencePool vllm-llama"
    assert line["error"] == "no InferencePool of that name in that namespace"
    await until(lambda: len(api.watches) == 1)
    api.put(inference_pool(), "inferencepools")
    await watched.has(vllm_0="serves", vllm_1="serves")
    assert watched.discovery.problems() == {}


async def test_pool_without_pods_is_no_problem(api: ApiServer, watched: Found) -> None:
    for name in ("vllm-0", "vllm-1"):
        api.delete(name, "pods")
    await watched.has()
    assert watched.discovery.problems() == {}
    assert watched.discovery.unread() == []


@pytest.mark.parametrize(
    ("resource", "group"), [("inferencepools", "inference.networking.k8s.io"), ("pods", "")]
)
async def test_missing_right_on_pool_or_pods_is_named_in_the_log(
    api: ApiServer, found: Found, logged: Logged, resource: str, group: str
) -> None:
    api.forbidden = {resource}
    assert await found.pods() == {}
    assert found.discovery.unread() == ["InferencePool vllm-llama"]
    line = await logged.line(LOST)
    assert (line["source"], line["resource"]) == ("InferencePool vllm-llama", resource)
    assert f"allows the verbs list and watch on {resource} (403)" in str(line["error"])
    assert f'cannot list resource "{resource}" in API group "{group}"' in str(line["error"])
    api.forbidden = set()
    await found.has(vllm_0="serves", vllm_1="serves")
    assert len(logged.lines(LOST)) == 1


async def test_missing_definition_of_inference_pools_is_named_in_the_log(
    api: ApiServer, found: Found, logged: Logged
) -> None:
    api.unknown = {"inferencepools"}
    assert await found.pods() == {}
    error = (await logged.line(LOST))["error"]
    assert (
        error == "the cluster has no inferencepools (404): install their custom resource definition"
    )


async def test_each_port_of_the_pool_is_a_replica(api: ApiServer) -> None:
    api.put(inference_pool(8000, 8001), "inferencepools")
    source = {"kubernetes": POOL, "kv_events_port": 5557, "kv_events_replay_port": 6557}
    discovery = Discovery([ReplicaSource.model_validate(source)], None, PATIENCE_S)
    targets = await discovery.targets()
    assert [(target.id, target.name, target.kv_events_ports) for target in targets] == [
        ("10.1.0.1:8000", "vllm-0-rank-0", (5557, 6557)),
        ("10.1.0.1:8001", "vllm-0-rank-1", (5558, 6558)),
        ("10.1.0.2:8000", "vllm-1-rank-0", (5557, 6557)),
        ("10.1.0.2:8001", "vllm-1-rank-1", (5558, 6558)),
    ]
    discovery.stop()


def members(*pods: dict[str, Any], ports: tuple[int, ...] = (8000,)) -> dict[str, Pod]:
    return members_of(msgspec.convert(list(pods), list[core_v1.Pod]), ports)


def test_pod_without_address_or_that_has_ended_is_no_replica() -> None:
    ended = [pod(f"vllm-{phase}", "10.1.0.1") for phase in ("Succeeded", "Failed")]
    for item in ended:
        item["status"]["phase"] = item["metadata"]["name"].removeprefix("vllm-")
    assert members(*ended, pod("vllm-2"), {"metadata": {"name": "vllm-3"}, "status": {}}) == {}


def test_terminating_pod_serves_while_it_is_ready() -> None:
    end = "2026-11-22T01:16:43Z"
    first = pod("vllm-0", "10.1.0.1", deletionTimestamp=end)
    second = pod("vllm-1", "fd00::2", ready=False, deletionTimestamp=end)
    assert members(second, first) == {
        "10.1.0.1:8000": Pod("vllm-0", ready=True, terminating=True),
        "[fd00::2]:8000": Pod("vllm-1", ready=False, terminating=True),
    }


@pytest.mark.parametrize(
    ("active", "ranks"), [("8001", [1]), ("8002, 8000", [0, 2]), ("9000,", []), ("", [])]
)
def test_annotation_names_the_active_ports_of_a_pod(active: str, ranks: list[int]) -> None:
    annotation = {"inference.networking.k8s.io/active-ports": active}
    item = pod("vllm-0", "10.1.0.1", annotations=annotation)
    found = members(item, ports=(8000, 8001, 8002))
    assert [place.rank for place in found.values()] == ranks
    assert list(found) == [f"10.1.0.1:800{rank}" for rank in ranks]
