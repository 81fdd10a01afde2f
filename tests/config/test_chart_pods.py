"""Pods of the Helm chart: their options, restarts and ends."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.lab.harness.processes import free_port
from tests.config.chart import ROOT, Manifest, by_title, container, manifests, pod
from tests.envoy.test_envoy import around_the_fragment, running
from tests.poll.replica import serving, text


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("envoy", {"envoy": {"requestHeaders": ["x-tenant"]}}),
        ("router", {"config": {"route": {"policy": "random"}}}),
        ("poller", {"replicas": [{"url": "10.0.0.1:8000"}]}),
    ],
)
def test_pods_restart_when_their_configuration_changes(part: str, changed: dict[str, Any]) -> None:
    def template(**own: Any) -> Manifest:
        deployment = by_title(manifests(**own))[f"Deployment-extproc-{part}"]
        metadata: Manifest = deployment["spec"]["template"]["metadata"]
        return metadata

    assert template(**changed) != template()
    assert template(replicas=[{"url": "10.0.0.1:8000"}])["labels"] == template()["labels"]


def test_variables_of_the_user_precede_those_that_refer_to_them() -> None:
    password = {"name": "P", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "p"}}}
    url = {"name": "EXTPROC_REDIS__URL", "value": "redis://:$(P)@redis:6379/0"}
    objects = by_title(manifests(pods={"env": [password]}, router={"env": [url]}))
    env = container(objects["Deployment-extproc-router"])["env"]
    assert env[:2] == [password, url]
    assert len(env) == len({item["name"] for item in env})


def test_pod_of_helm_test_has_the_documented_file_of_replicas() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    found = re.search(r"^# values of the chart\n(replicas: \[\]\n.*?)^```", page, re.M | re.S)
    assert found
    objects = by_title(manifests(**yaml.safe_load(found[1])))
    for spec in (objects["Pod-extproc-test"]["spec"], pod(objects["Deployment-extproc-poller"])):
        (only,) = spec["containers"]
        assert "/etc/replicas" in {item["mountPath"] for item in only["volumeMounts"]}


def test_pod_of_helm_test_has_the_files_and_variables_of_routers() -> None:
    options: dict[str, Any] = {
        "env": [{"name": "A", "value": "b"}],
        "volumes": [{"name": "tokenizers", "emptyDir": {}}],
        "volumeMounts": [{"name": "tokenizers", "mountPath": "/tokenizers"}],
    }
    tested = by_title(manifests(router=options))["Pod-extproc-test"]["spec"]
    given = {"volumes": tested["volumes"], **tested["containers"][0]}
    for name, values in options.items():
        assert values[0] in given[name]


def test_pod_of_helm_test_has_the_options_of_all_pods() -> None:
    options = {
        "tolerations": [{"key": "gateway", "operator": "Exists"}],
        "nodeSelector": {"pool": "gateway"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "low",
    }
    proxy = {"name": "NO_PROXY", "value": ".svc"}
    named = {"podLabels": {"team": "a"}, "podAnnotations": {"sidecar.istio.io/inject": "false"}}
    objects = by_title(manifests(pods=options | {"env": [proxy]} | named))
    tested = objects["Pod-extproc-test"]
    assert options.items() <= tested["spec"].items()
    assert tested["spec"]["enableServiceLinks"] is False
    (only,) = tested["spec"]["containers"]
    assert only["env"] == container(objects["Deployment-extproc-router"])["env"]
    assert proxy in only["env"]
    assert named["podLabels"].items() <= tested["metadata"]["labels"].items()
    annotations = {"helm.sh/hook": "test"} | named["podAnnotations"]
    assert annotations.items() <= tested["metadata"]["annotations"].items()


@pytest.mark.process
@pytest.mark.parametrize(("status", "passes"), [(200, True), (401, True), (503, False)])
async def test_helm_test_passes_where_replicas_want_an_api_key(status: int, passes: bool) -> None:
    script = by_title(manifests())["Pod-extproc-test"]["spec"]["containers"][0]["command"][-1]
    (program,) = re.findall(r"<<'END'\n(.*?)^END$", script, re.M | re.S)
    async with serving() as replica:
        replica.answers["/v1/models"] = text("the answer", status)
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, f"http://{replica.id}/v1/models"),
            stdout=PIPE,
            stderr=PIPE,
        )
        printed, _ = await asking.communicate()
    assert (asking.returncode == 0) == passes
    assert printed == b"the answer\n" * passes


@pytest.mark.process
async def test_terminating_envoy_ends_when_no_request_is_active(tmp_path: Path) -> None:
    envoy = container(by_title(manifests())["Deployment-extproc-envoy"])
    *command, script = envoy["lifecycle"]["preStop"]["exec"]["command"]
    assert "\nsleep 10\n" in script
    port, admin = free_port(), free_port()
    script = script.replace("9901", str(admin)).replace("sleep 10", "sleep 0.2")
    script = script.replace("http.openai.", "http.mine.")
    released = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with (
        serving() as replica,
        running(
            tmp_path,
            around_the_fragment(port, admin, "127.0.0.1:1", [replica.id]),
            admin,
            envoy["args"][2:],
        ),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        replica.answers["/"] = answer
        active = asyncio.create_task(client.get("/"))
        hook = await asyncio.create_subprocess_exec(
            *command, script, stdout=asyncio.subprocess.DEVNULL
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hook.wait(), 2)
        released.set()
        async with await active as response:  # new connections are closed after their response
            assert response.headers["connection"] == "close"
        async with asyncio.timeout(10):
            assert await hook.wait() == 0
