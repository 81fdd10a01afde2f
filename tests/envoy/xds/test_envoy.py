"""What is served, in a real Envoy."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from envoy_data_plane.envoy.config.core.v3 import HealthStatus

from extproc.config import TlsFiles
from extproc.envoy.xds.catalog import CLUSTERS, ENDPOINTS, Catalog
from extproc.envoy.xds.endpoints import load_assignment
from extproc.envoy.xds.resources import resources
from extproc.envoy.xds.server import XdsServer
from extproc.lab.harness.envoy_config import addressed, endpoints, socket_address
from extproc.lab.harness.processes import Process, answers, envoy_binary, free_port, listening
from tests.certificates import Authority
from tests.conftest import Logged
from tests.e2e.test_security import documented
from tests.envoy.test_envoy import ENOUGH, post, replica, validate
from tests.waiting import until

pytestmark = pytest.mark.process

ENVOY = Path(__file__).parents[3] / "envoy"
_NOWHERE = "127.0.0.1:1"


class Envoy:
    """A running one."""

    def __init__(self, port: int, admin: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._admin = f"http://127.0.0.1:{admin}"

    async def ask(self, path: str) -> Any:
        """Its admin address."""
        async with aiohttp.ClientSession() as session, session.get(self._admin + path) as response:
            return await response.json(content_type=None)

    async def dumped(self, resource: str) -> list[Any]:
        """Resources of one kind, by name."""
        found = (await self.ask(f"/config_dump?resource={resource}")).get("configs", [])
        return sorted(found, key=lambda one: str(one.get("name", one)))

    async def members(self) -> dict[str, str]:
        """Address and health of each replica in the cluster."""
        clusters = (await self.ask("/clusters?format=json"))["cluster_statuses"]
        hosts = [
            host
            for cluster in clusters
            if cluster["name"] == "replicas"
            for host in cluster.get("host_statuses", [])
        ]
        return {_address(host): host["health_status"]["eds_health_status"] for host in hosts}


def _address(host: Mapping[str, Any]) -> str:
    where = host["address"]["socket_address"]
    return f"{where['address']}:{where['port_value']}"


@asynccontextmanager
async def running(directory: Path, bootstrap: dict[str, Any], port: int) -> AsyncIterator[Envoy]:
    """An Envoy with this bootstrap, whose listener is at the port."""
    envoy = Envoy(port, admin := free_port())
    where = {"address": socket_address(f"127.0.0.1:{admin}")}
    config = directory / f"envoy-{admin}.yaml"
    config.write_text(yaml.safe_dump(bootstrap | {"admin": where}))
    argv: list[str | Path] = [envoy_binary(), "-c", config, "--use-dynamic-base-id"]
    async with await Process.start(
        "envoy",
        [*argv, "--concurrency", "1"],
        log=directory / "envoy.log",
        ready=answers(f"http://127.0.0.1:{admin}/ready"),
    ):
        yield envoy


PLAIN = TlsFiles()


@asynccontextmanager
async def serving(catalog: Catalog, files: TlsFiles = PLAIN) -> AsyncIterator[dict[str, Any]]:
    """Serves the catalog; gives a bootstrap that takes everything from there."""
    server = XdsServer(catalog, files)
    port = await server.start("127.0.0.1:0")
    bootstrap: dict[str, Any] = yaml.safe_load((ENVOY / "xds_all.yaml").read_text())
    (cluster,) = bootstrap["static_resources"]["clusters"]
    cluster["load_assignment"]["endpoints"] = endpoints([f"127.0.0.1:{port}"])
    try:
        yield bootstrap
    finally:
        await server.stop()


def whole(port: int, *replicas: str) -> dict[str, Any]:
    """envoy/envoy.yaml on loopback."""
    return addressed(
        listen=f"127.0.0.1:{port}",
        admin=_NOWHERE,
        routers=[_NOWHERE],
        replicas=replicas,
    )


def serve(catalog: Catalog, tree: dict[str, Any], members: Mapping[str, HealthStatus]) -> None:
    catalog.replace_all(resources(tree, "default"))
    catalog.replace(ENDPOINTS, {"default": load_assignment("default", members)})


def healthy(address: str) -> dict[str, HealthStatus]:
    return {address: HealthStatus.HEALTHY}


@pytest.mark.parametrize("name", ["xds.yaml", "xds_all.yaml"])
async def test_our_own_files_are_valid_and_name_nothing_deprecated(name: str) -> None:
    assert "eprecated" not in await validate(ENVOY / name)


async def test_an_envoy_that_takes_everything_is_as_one_that_has_the_file(tmp_path: Path) -> None:
    port, catalog = free_port(), Catalog()
    async with replica("a") as a:
        tree = whole(port, a)
        serve(catalog, tree, healthy(a))
        async with running(tmp_path, tree, port) as envoy:
            (listener,) = [one["listener"] for one in await envoy.dumped("static_listeners")]
            static = [one["cluster"] for one in await envoy.dumped("static_clusters")]
        async with serving(catalog) as bootstrap, running(tmp_path, bootstrap, port) as envoy:
            assert (await post(envoy.url))["name"] == "a"
            (dumped,) = await envoy.dumped("dynamic_listeners")
            active = await envoy.dumped("dynamic_active_clusters")
            routes = await envoy.dumped("dynamic_route_configs")
    taken = dumped["active_state"]["listener"]
    manager, expected = (
        one["filter_chains"][0]["filters"][0]["typed_config"] for one in (taken, listener)
    )
    assert manager.pop("rds")["route_config_name"] == "openai"
    assert without_type(routes[0]["route_config"]) == expected.pop("route_config")
    assert without_type(taken) == without_type(listener)
    clusters = {one["cluster"]["name"]: one["cluster"] for one in active}
    wanted = {one["name"]: one for one in static}
    assert clusters["router"] == wanted["router"]
    assert clusters["replicas"].pop("eds_cluster_config")["service_name"] == "default"
    assert clusters["replicas"].pop("type") == "EDS"
    for key in ("type", "dns_lookup_family", "load_assignment"):
        wanted["replicas"].pop(key, None)
    assert clusters["replicas"] == wanted["replicas"]


def without_type(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "@type"}


async def test_an_envoy_takes_everything_over_mutual_tls(tmp_path: Path) -> None:
    port, catalog = free_port(), Catalog()
    authority = Authority(tmp_path / "authority")
    for name, file in zip(("tls.crt", "tls.key"), authority.sign("router"), strict=True):
        shutil.copy(file, tmp_path / name)
    shutil.copy(authority.file, tmp_path / "ca.crt")
    files = TlsFiles(
        tls_cert=tmp_path / "tls.crt",
        tls_key=tmp_path / "tls.key",
        tls_client_ca=tmp_path / "ca.crt",
    )
    async with replica("a") as a, serving(catalog, files) as bootstrap:
        serve(catalog, whole(port), healthy(a))
        (cluster,) = bootstrap["static_resources"]["clusters"]
        cluster |= documented(tmp_path)
        async with running(tmp_path, bootstrap, port) as envoy:
            assert (await post(envoy.url))["name"] == "a"
            (plane,) = [
                one
                for one in (await envoy.ask("/clusters?format=json"))["cluster_statuses"]
                if one["name"] == "xds"
            ]
            assert "failed_active_health_check" not in plane["host_statuses"][0]["health_status"]


async def test_replicas_join_and_leave_and_health_follows(tmp_path: Path) -> None:
    port, catalog = free_port(), Catalog()
    async with (
        replica("a") as a,
        replica("b") as b,
        replica("c") as c,
        serving(catalog) as bootstrap,
    ):
        serve(catalog, whole(port), healthy(a))
        async with running(tmp_path, bootstrap, port) as envoy:
            assert await envoy.members() == {a: "HEALTHY"}
            members = healthy(a) | {b: HealthStatus.DRAINING} | healthy(c)
            serve(catalog, whole(port), members)
            wanted = {a: "HEALTHY", b: "DRAINING", c: "HEALTHY"}
            await until(lambda: has(envoy, wanted))
            assert {(await post(envoy.url))["name"] for _ in range(ENOUGH)} == {"a", "c"}
            serve(catalog, whole(port), {a: HealthStatus.UNHEALTHY} | healthy(c))
            await until(lambda: has(envoy, {a: "UNHEALTHY", c: "HEALTHY"}))
            assert {(await post(envoy.url))["name"] for _ in range(ENOUGH)} == {"c"}


async def has(envoy: Envoy, members: dict[str, str]) -> bool:
    return await envoy.members() == members


async def test_a_cluster_that_changes_keeps_its_replicas(tmp_path: Path) -> None:
    port, catalog = free_port(), Catalog()
    async with replica("a") as a, serving(catalog) as bootstrap:
        serve(catalog, whole(port), healthy(a))
        async with running(tmp_path, bootstrap, port) as envoy:
            assert (await post(envoy.url))["name"] == "a"
            changed = whole(port)
            changed["static_resources"]["clusters"][-1]["connect_timeout"] = "7s"
            serve(catalog, changed, healthy(a))

            async def taken() -> bool:
                active = await envoy.dumped("dynamic_active_clusters")
                return "7s" in [one["cluster"]["connect_timeout"] for one in active]

            await until(taken)
            assert await envoy.members() == {a: "HEALTHY"}
            assert (await post(envoy.url))["name"] == "a"


async def test_no_request_fails_while_a_cluster_is_renamed(tmp_path: Path) -> None:
    port, catalog = free_port(), Catalog()
    async with replica("a") as a, serving(catalog) as bootstrap:
        serve(catalog, whole(port), healthy(a))
        async with running(tmp_path, bootstrap, port) as envoy:
            answered, over = 0, asyncio.Event()

            async def client() -> None:
                nonlocal answered
                while not over.is_set():
                    assert (await post(envoy.url))["name"] == "a"
                    answered += 1

            async with asyncio.TaskGroup() as clients:
                for _ in range(4):
                    clients.create_task(client())
                for name in ("renamed", "replicas", "renamed"):
                    serve(catalog, with_replicas_called(name, port), healthy(a))
                    await until(partial(has_only, envoy, {"router", "xds", name}))
                    before = answered

                    async def more(before: int = before) -> bool:
                        return answered > before + 20

                    await until(more)
                over.set()


def with_replicas_called(name: str, port: int) -> dict[str, Any]:
    tree = whole(port)
    tree["static_resources"]["clusters"][-1]["name"] = name
    manager = tree["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
    host["routes"][0]["route"]["cluster"] = name
    return tree


async def has_only(envoy: Envoy, clusters: set[str]) -> bool:
    found = (await envoy.ask("/clusters?format=json"))["cluster_statuses"]
    return {one["name"] for one in found} == clusters


async def test_listeners_that_are_no_more_are_closed(tmp_path: Path) -> None:
    port, catalog = free_port(), Catalog()
    async with replica("a") as a, serving(catalog) as bootstrap:
        serve(catalog, whole(port), healthy(a))
        async with running(tmp_path, bootstrap, port) as envoy:
            assert (await post(envoy.url))["name"] == "a"
            tree = whole(port)
            tree["static_resources"]["listeners"] = []
            serve(catalog, tree, healthy(a))

            async def closed() -> bool:
                return not await listening(port)()

            await until(closed)


async def test_what_envoy_refuses_is_logged_and_it_keeps_what_it_had(
    tmp_path: Path, logged: Logged
) -> None:
    port, catalog = free_port(), Catalog()
    async with replica("a") as a, serving(catalog) as bootstrap:
        serve(catalog, whole(port), healthy(a))
        async with running(tmp_path, bootstrap, port) as envoy:
            broken = whole(port)
            broken["static_resources"]["clusters"][-1]["lb_policy"] = "CLUSTER_PROVIDED"
            del broken["static_resources"]["clusters"][-1]["load_balancing_policy"]
            catalog.replace(CLUSTERS, resources(broken, "default")[CLUSTERS])
            line = await logged.line("envoy refused what it was sent")
            assert (line["type"], line["node"]) == ("Cluster", "envoy")
            assert "replicas" in str(line["reason"])
            assert (await post(envoy.url))["name"] == "a"
