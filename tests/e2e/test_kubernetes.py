"""Replicas are the pods of a Service: Kubernetes deletes a pod while requests run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import IN_TURN, Client
from tests.e2e.stack import Stack
from tests.e2e.test_failures import more, traffic
from tests.kubernetes_api import ApiServer, endpoint, endpoint_slice
from tests.waiting import until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

FLEET = tuple(SimulatedReplica(f"vllm-{number}", "llama-8b-h100") for number in range(3))


class KubernetesStack(Stack):
    """A stack whose poller finds replicas only through an API server."""

    def __init__(self, directory: Path, api: ApiServer) -> None:
        super().__init__(directory, FLEET)
        self.api = api

    def put_pod(self, name: str, **conditions: bool) -> None:
        """Put a pod's EndpointSlice: each pod has a port of its own, and so a slice."""
        pod = endpoint("127.0.0.1", name, **conditions)
        self.api.put(endpoint_slice(pod, name=name, ports=[("http", self.ports[name])]))

    def _configuration(self) -> dict[str, Any]:
        service = {"service": "vllm", "port": "http"}
        replicas = [{"kubernetes": service, "profile": FLEET[0].profile}]
        return {**super()._configuration(), "replicas": replicas}

    def _poller_constants(self) -> dict[str, object]:
        """Move the service account's folder: only root may write where kubelet mounts it."""
        account = {"extproc.poll.reflector.ACCOUNT": self.api.account}
        return super()._poller_constants() | account


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubernetesStack]:
    api = ApiServer(tmp_path_factory.mktemp("api"))
    stack = KubernetesStack(tmp_path_factory.mktemp("cluster"), api)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        patched.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        for one in FLEET:
            stack.put_pod(one.name)
        await api.start()
        async with stack:
            yield stack
        await api.stop()


async def test_deleted_pod_finishes_its_streams_and_gets_no_requests(
    client: Client, stack: KubernetesStack
) -> None:
    tokens = 1000
    streaming = asyncio.create_task(client.chat(tokens=tokens, headers=IN_TURN, stream=True))
    busy = await client.busy()
    await client.simulate(busy, slow=20.0)  # its requests do not end by themselves
    async with traffic(client) as answers:
        await more(answers, 5)
        stack.put_pod(busy, ready=False, serving=True, terminating=True)
        await until_read(lambda: client.replica(busy), lambda now: now["draining"])
        assert not streaming.done()
        later = await more(answers, 20)
        await client.simulate(busy, slow=0.1)
        answer = await streaming
        stack.api.delete(busy)
        await stack.stop(busy)
        await until_read(
            client.fleet, lambda now: busy not in {one["name"] for one in now["replicas"]}
        )
        await more(answers, 10)
    assert answer.status == 200
    assert answer.decision["replica_name"] == busy
    assert answer.body.count(b"data: ") >= tokens
    assert answer.body.rstrip().endswith(b"data: [DONE]")
    assert {one.status for one in answers} == {200}
    assert busy not in {one.decision["replica_name"] for one in later}
    assert later[0].decision["excluded"][0]["why"] == "draining"
