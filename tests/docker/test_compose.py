"""``docker compose up --build`` starts a system that routes requests through its Envoy."""

import asyncio
import gc
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import docker
import pytest
import yaml
from docker.client import DockerClient
from docker.errors import DockerException, ImageNotFound

from extproc.lab.harness.processes import answers, free_port
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text(encoding="utf-8"))
IMAGES = ["python:3.11-slim", *(COMPOSE["services"][name]["image"] for name in ("envoy", "redis"))]
PORTS = ("ENVOY_PORT", "ENVOY_ADMIN_PORT", "ROUTER_ADMIN_PORT", "POLLER_ADMIN_PORT")


def compose_command() -> list[str] | None:
    """Return ``docker compose``, its older ``docker-compose``, or None."""
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def reason_to_skip() -> str:
    """Return the reason why this machine cannot run the test; empty if it can."""
    if compose_command() is None:
        return "docker compose is not installed"
    if not engine_answers():
        return "no Docker engine answers"
    with closing(docker.from_env()) as engine:
        for image in IMAGES:
            try:
                engine.images.get(image)
            except ImageNotFound:
                return f"the image {image} is not here: docker pull {image}"
    return ""


def engine_answers() -> bool:
    with warnings.catch_warnings():
        # If no engine answers, the client leaves its socket open.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with closing(docker.from_env()) as engine:
                answered = bool(engine.ping())
        except DockerException:
            answered = False
        gc.collect()
    return answered


class ComposeSystem:
    """The running services, by their addresses."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.url, self.envoy_admin, self.router_admin, self.poller_admin = (
            f"http://127.0.0.1:{ports[name]}" for name in PORTS
        )

    async def get(self, url: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.json(content_type=None)

    async def chat(self, text: str) -> dict[str, Any]:
        body = {
            "model": "llama-8b",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": text}],
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def routed(self) -> bool:
        """Send a request; return true if the router decided on it."""
        before = await self._decided()
        await self.chat("Is the router back?")
        return await self._decided() > before

    async def _decided(self) -> int:
        return len(await self.get(f"{self.router_admin}/decisions"))

    async def ready(self) -> None:
        """Wait until the router knows the four replicas and Envoy has them as members."""
        await until(self._knows_replicas, 120)

    async def _knows_replicas(self) -> bool:
        if not await answers(f"{self.envoy_admin}/ready")():
            return False
        fleet = await self.get(f"{self.router_admin}/fleet")
        clusters = await self.get(f"{self.envoy_admin}/clusters?format=json")
        members = {
            cluster["name"]: len(cluster.get("host_statuses", []))
            for cluster in clusters["cluster_statuses"]
        }
        return len(fleet["replicas"]) == members["replicas"] == 4


@pytest.fixture(scope="module")
def system() -> Iterator[ComposeSystem]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    ports = {name: free_port() for name in PORTS}
    env = {**os.environ, **{name: str(port) for name, port in ports.items()}}
    command = [*(compose_command() or []), "--project-name", f"extproc-test-{os.getpid()}"]

    def compose(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *arguments],
            cwd=REPOSITORY,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    try:
        up = compose("up", "--build", "--detach")
        assert up.returncode == 0, up.stdout[-4000:]
        yield ComposeSystem(ports)
    finally:
        compose("down", "--volumes", "--timeout", "5")


async def test_requests_are_routed_mostly_to_fast_replicas(system: ComposeSystem) -> None:
    await system.ready()
    answered = await asyncio.gather(*(system.chat(f"hello {number}") for number in range(40)))
    assert all(answer["usage"]["completion_tokens"] > 0 for answer in answered)
    decisions = await system.get(f"{system.router_admin}/decisions")
    assert len(decisions) == 40
    fleet = await system.get(f"{system.router_admin}/fleet")
    profiles = {replica["id"]: replica["profile"] for replica in fleet["replicas"]}
    assert sorted(profiles.values()) == ["llama-8b-a10"] * 2 + ["llama-8b-h100"] * 2
    chosen = [profiles[decision["replica"]] for decision in decisions]
    assert chosen.count("llama-8b-h100") > chosen.count("llama-8b-a10")


def container_of(engine: DockerClient, service: str) -> Any:
    project = f"com.docker.compose.project=extproc-test-{os.getpid()}"
    labels = [project, f"com.docker.compose.service={service}"]
    (found,) = engine.containers.list(all=True, filters={"label": labels})
    return found


async def test_no_request_fails_while_router_is_down(system: ComposeSystem) -> None:
    await system.ready()
    answered: list[dict[str, Any]] = []
    over = asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            answered.append(await system.chat("hello"))

    async def more(count: int) -> None:
        wanted = len(answered) + count

        async def answered_or_failed() -> bool:
            return len(answered) >= wanted or any(one.done() for one in clients)

        await until(answered_or_failed)

    with closing(docker.from_env()) as engine:
        router = container_of(engine, "router")
        clients = [asyncio.create_task(client()) for _ in range(8)]
        try:
            await more(40)
            await asyncio.to_thread(router.kill)
            await more(80)
            await asyncio.to_thread(router.start)
            await until(answers(f"{system.router_admin}/healthz"))
            await until(system.routed)
            await more(40)
        finally:
            over.set()
            await asyncio.gather(*clients)  # raises the error of any request
    assert len(answered) >= 160


async def test_router_and_poller_report_metrics(system: ComposeSystem) -> None:
    assert await answers(f"{system.router_admin}/metrics")()
    assert await answers(f"{system.poller_admin}/metrics")()


async def test_every_service_gets_healthy(system: ComposeSystem) -> None:
    with closing(docker.from_env()) as engine:

        async def healthy() -> bool:
            label = f"com.docker.compose.project=extproc-test-{os.getpid()}"
            found = await asyncio.to_thread(engine.containers.list, filters={"label": label})
            assert len(found) == 8
            return all(one.attrs["State"]["Health"]["Status"] == "healthy" for one in found)

        await until(healthy)
