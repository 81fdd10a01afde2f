"""``docker compose up --build`` starts a system that routes requests through its Envoy."""

import asyncio
import itertools
import uuid
from contextlib import closing
from typing import Self

import docker
import pytest

from extproc.lab.harness.processes import answers
from tests.docker.conftest import ComposeSystem
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


class Load:
    """Eight clients; each sends its next request when its last request is answered."""

    def __init__(self, system: ComposeSystem) -> None:
        self._system, self._answered, self._over = system, 0, asyncio.Event()

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._client()) for _ in range(8)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._clients)  # raises the error of any request

    async def _client(self) -> None:
        while not self._over.is_set():
            await self._system.chat("hello")
            self._answered += 1

    async def more(self, count: int) -> None:
        """Wait for further answers, or for the first request that fails."""
        wanted = self._answered + count

        async def answered_or_failed() -> bool:
            return self._answered >= wanted or any(client.done() for client in self._clients)

        await until(answered_or_failed)


async def test_requests_are_routed_mostly_to_fast_replicas(system: ComposeSystem) -> None:
    await system.ready()
    fleet = await system.get(f"{system.router_admin}/fleet")
    profiles = {replica["id"]: replica["profile"] for replica in fleet["replicas"]}
    assert sorted(profiles.values()) == ["llama-8b-a10"] * 2 + ["llama-8b-h100"] * 2
    chosen = list[str]()
    while len(chosen) < 40:  # on a busy machine, Envoy does not wait for every decision
        ids = [str(uuid.uuid4()) for _ in range(8)]
        await asyncio.gather(*(system.chat("hello", request) for request in ids))
        decisions = [decision for request in ids for decision in await system.decisions(request)]
        chosen += [profiles[decision["replica"]] for decision in decisions]
    assert chosen.count("llama-8b-h100") > chosen.count("llama-8b-a10")


async def test_openai_client_gets_a_streamed_answer(system: ComposeSystem) -> None:
    await system.ready()
    await system.stream("hello")


# A paused replica is not among them: after serve.hung_s its requests end (tests/e2e/test_hung.py).
@pytest.mark.parametrize(
    ("part", "fault"),
    [*itertools.product(["router", "redis", "poller"], ["kill", "pause"]), ("fast", "kill")],
)
async def test_no_request_fails_while_part_is_away(
    system: ComposeSystem, part: str, fault: str
) -> None:
    await system.ready()
    async with Load(system) as load:
        await load.more(40)
        with closing(docker.from_env()) as engine:
            container = system.containers(engine, part)[0]
            back = {"kill": container.start, "pause": container.unpause}[fault]
            await asyncio.to_thread(getattr(container, fault))
            try:
                await load.more(80)
            finally:
                await asyncio.to_thread(back)
        await until(system.routed)
        await load.more(40)


async def test_requests_that_meet_a_paused_envoy_are_answered_later(system: ComposeSystem) -> None:
    await system.ready()
    async with Load(system) as load:
        await load.more(40)
        with closing(docker.from_env()) as engine:
            (envoy,) = system.containers(engine, "envoy")
            await asyncio.to_thread(envoy.pause)
            try:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(system.chat("hello"), timeout=2)
            finally:
                await asyncio.to_thread(envoy.unpause)
        await load.more(40)


async def test_killed_envoy_routes_again(system: ComposeSystem) -> None:
    await system.ready()
    with closing(docker.from_env()) as engine:
        (envoy,) = system.containers(engine, "envoy")
        await asyncio.to_thread(envoy.kill)
        await asyncio.to_thread(envoy.start)
    await system.ready()
    assert await system.routed()


@pytest.mark.parametrize("part", ["router", "poller", "fast"])
async def test_process_is_not_root_and_cannot_write(system: ComposeSystem, part: str) -> None:
    with closing(docker.from_env()) as engine:
        container = system.containers(engine, part)[0]
        user = await asyncio.to_thread(container.exec_run, ["id", "-u"])
        assert user.output.strip() == b"65532"
        written = await asyncio.to_thread(container.exec_run, ["touch", "/tmp/file"])
        assert written.exit_code == 1
        assert b"Read-only file system" in written.output


_PRINT_MODULES_WITHOUT_BYTECODE = """
import os, sys
import extproc.cli.services, extproc.proxy.app, extproc.poll.into_redis, extproc.envoy.eds
files = {name: getattr(module, "__cached__", None) for name, module in sys.modules.items()}
print(*(name for name, file in files.items() if file and not os.path.exists(file)))
"""


async def test_services_start_from_bytecode(system: ComposeSystem) -> None:
    with closing(docker.from_env()) as engine:
        (router,) = system.containers(engine, "router")
        command = ["python", "-c", _PRINT_MODULES_WITHOUT_BYTECODE]
        done = await asyncio.to_thread(router.exec_run, command)
        assert (done.exit_code, done.output.split()) == (0, [])


async def test_router_and_poller_report_metrics(system: ComposeSystem) -> None:
    assert await answers(f"{system.router_admin}/metrics")()
    assert await answers(f"{system.poller_admin}/metrics")()


async def test_every_service_gets_healthy(system: ComposeSystem) -> None:
    with closing(docker.from_env()) as engine:

        async def healthy() -> bool:
            found = await asyncio.to_thread(system.containers, engine)
            states = [item.attrs["State"] for item in found]
            checked = [state["Health"]["Status"] for state in states if "Health" in state]
            assert len(checked) == 8
            return all(status == "healthy" for status in checked)

        await until(healthy)
