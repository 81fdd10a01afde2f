"""The services of ``compose.yaml``, under a project name and ports of their own."""

import gc
import os
import shutil
import subprocess
import uuid
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
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from extproc.lab.harness.processes import answers, free_port
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text(encoding="utf-8"))
PROJECT = f"extproc-test-{os.getpid()}"
_PORTS = (
    "ENVOY_PORT", "ENVOY_ADMIN_PORT", "ROUTER_ADMIN_PORT", "POLLER_ADMIN_PORT", "PROMETHEUS_PORT"
)  # fmt: skip


def image_of(service: str) -> str:
    return str(COMPOSE["services"][service]["image"])


def _command() -> list[str] | None:
    """Return ``docker compose``, its older ``docker-compose``, or None."""
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def _engine_answers() -> bool:
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


def _has_image(name: str) -> bool:
    with closing(docker.from_env()) as engine:
        try:
            engine.images.get(name)
        except ImageNotFound:
            return False
    return True


def require_image(name: str) -> None:
    """Skip the test unless the engine has the image."""
    if not _has_image(name):
        pytest.skip(f"the image {name} is not here: docker pull {name}")


class ComposeSystem:
    """The running services, by their addresses."""

    def __init__(self, compose: list[str]) -> None:
        self._compose, ports = compose, {name: free_port() for name in _PORTS}
        self._env = {**os.environ, **{name: str(port) for name, port in ports.items()}}
        self.url, self.envoy_admin, self.router_admin, self.poller_admin, self.prometheus = (
            f"http://127.0.0.1:{ports[name]}" for name in _PORTS
        )

    def compose(self, *arguments: str) -> None:
        """Run a command of ``docker compose`` for this project; fail with its output."""
        done = subprocess.run(
            [*self._compose, "--project-name", PROJECT, *arguments],
            cwd=REPOSITORY,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:]

    def containers(self, engine: DockerClient, service: str = "") -> list[Any]:
        """Return the running containers of one service, or of all."""
        labels = [f"com.docker.compose.project={PROJECT}"]
        labels += [f"com.docker.compose.service={service}"] if service else []
        return list(engine.containers.list(filters={"label": labels}))

    async def get(self, url: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.json(content_type=None)

    async def chat(self, text: str, request: str = "") -> dict[str, Any]:
        """Send a request with this id; fail unless its answer is 200."""
        headers = {"x-request-id": request} if request else {}
        body = {
            "model": "llama-8b",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": text}],
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def stream(self, text: str) -> None:
        """Send a request for a streamed answer, and read it to its end."""
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        message: ChatCompletionUserMessageParam = {"role": "user", "content": text}
        async with client:
            chunks = await client.chat.completions.create(
                model="llama-8b", messages=[message], max_tokens=8, stream=True
            )
            reasons = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
        assert reasons[-1] == "length"

    async def decisions(self, request: str) -> list[dict[str, Any]]:
        return list(await self.get(f"{self.router_admin}/decisions?request_id={request}"))

    async def routed(self) -> bool:
        """Send a request; return true if the router decided on it."""
        if not await answers(f"{self.router_admin}/readyz")():
            return False
        request = str(uuid.uuid4())
        await self.chat("Does the router decide?", request)
        return bool(await self.decisions(request))

    async def ready(self) -> None:
        """Wait until the router uses the four replicas, and Envoy the router and the replicas."""
        await until(self._uses_replicas, 120)

    async def _uses_replicas(self) -> bool:
        pages = (f"{self.envoy_admin}/ready", f"{self.router_admin}/readyz")
        if not all([await answers(page)() for page in pages]):
            return False
        fleet = await self.get(f"{self.router_admin}/fleet")
        clusters = await self.get(f"{self.envoy_admin}/clusters?format=json")
        healthy = {
            cluster["name"]: sum(
                not host["health_status"].get("failed_active_health_check")
                for host in cluster.get("host_statuses", ())
            )
            for cluster in clusters["cluster_statuses"]
        }
        return len(fleet["replicas"]) == healthy["replicas"] == 4 and healthy["router"] == 1


@pytest.fixture(scope="package")
def system() -> Iterator[ComposeSystem]:
    """Start the services of the profile ``simulated``; skip if the machine cannot run them."""
    compose = _command()
    if compose is None:
        pytest.skip("docker compose is not installed")
    if not _engine_answers():
        pytest.skip("no Docker engine answers")
    for image in ("python:3.11-slim", image_of("envoy"), image_of("redis")):
        require_image(image)
    made = ComposeSystem(compose)
    try:
        made.compose("up", "--build", "--detach")
        yield made
    finally:
        made.compose("--profile", "observe", "down", "--volumes", "--timeout", "5")
