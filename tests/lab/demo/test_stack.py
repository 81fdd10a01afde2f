"""System of the demo, and the demo's words to its user."""

import asyncio
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from random import Random

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.demo.app import instructions
from extproc.lab.demo.journal import Entry, Journal
from extproc.lab.harness.processes import ProcessError, pick_ports
from extproc.lab.harness.samples import Sample, samples
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.lab.harness.traffic import send_all
from tests.e2e.stack import Stack

FAST = SimulatedReplica("fast", "llama-8b-h100")
OTHER = SimulatedReplica("other", "llama-8b-h100")


def chats(count: int, rate: float) -> list[Sample]:
    short = (
        one for one in islice(samples(MODEL, rate, Random(7)), 4 * count) if one.kind == "chat"
    )
    return list(islice(short, count))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(tmp_path_factory.mktemp("demo"), [FAST, OTHER]) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def journal(stack: Stack) -> AsyncIterator[Journal]:
    async with aiohttp.ClientSession() as session:
        yield Journal(stack, session)


@pytest.mark.process
@pytest.mark.asyncio(loop_scope="module")
async def test_with_the_router_killed_envoy_serves_and_routing_resumes_with_it(
    stack: Stack, journal: Journal
) -> None:
    sending = asyncio.create_task(send_all(stack.url, chats(60, rate=10), "killed"))
    while not journal.entries:
        await journal.refresh()
    await stack.kill("router")
    answers = await sending
    assert [answer.problem for answer in answers if not answer.ok] == []
    entries = await settled(journal, {answer.request_id for answer in answers})
    assert any(entry.fallback for entry in entries)
    assert not journal.router_up

    await stack.start("router")
    await stack.wait_routing()
    answers = await send_all(stack.url, chats(5, rate=20), "resumed")
    entries = await settled(journal, {answer.request_id for answer in answers})
    assert len(entries) == 5
    assert all(entry.routed for entry in entries)
    assert stack.ended() == []  # what was killed on purpose is no news


@pytest.mark.process
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.asyncio(loop_scope="module")
async def test_the_commands_to_try_work_as_printed(stack: Stack, journal: Journal) -> None:
    commands = re.findall(r"^  (?:.+\\\n)*.+", instructions(stack), re.MULTILINE)
    chat, streamed, by_policy, explain, decisions, fleet, envoy, kill, start = commands
    for command in (chat, by_policy):
        assert '"finish_reason": "stop"' in await shell(command)
    assert (await shell(streamed)).rstrip().endswith("data: [DONE]")
    assert "llama-8b: its turn" in await shell(explain)
    assert '"policy":"round_robin"' in await shell(decisions)
    assert '"name":"fast"' in await shell(fleet)
    assert "replicas::" in await shell(envoy)
    await shell(kill)
    await stack.process("router").wait()
    assert [process.name for process in stack.ended()] == ["router"]
    router = await asyncio.create_subprocess_shell(f"exec {start}", stderr=subprocess.DEVNULL)
    try:
        while not journal.router_up:
            await journal.refresh()
    finally:
        router.terminate()
        await router.wait()


async def shell(command: str) -> str:
    process = await asyncio.create_subprocess_shell(command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.process
async def test_an_early_death_is_told_with_the_reason(tmp_path: Path) -> None:
    wrong = SimulatedReplica("wrong", "llama-8b-h100", ("--kv-tokens", "none"))
    with pytest.raises(ProcessError, match=r"(?s)wrong ended with status 2.*--kv-tokens"):
        async with Stack(tmp_path, [FAST, wrong]):
            pass


async def settled(journal: Journal, request_ids: set[str]) -> list[Entry]:
    await journal.settle(request_ids)
    return [journal.entries[request_id] for request_id in request_ids]


def test_a_usual_port_is_taken_only_where_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = pick_ports({"first": port, "second": 0})
    assert len({port, *ports.values()}) == 3
    assert pick_ports({"first": port}) == {"first": port}


def test_no_two_processes_choose_the_same_port() -> None:
    wanted = dict.fromkeys("abcdefgh", 0)
    module = "extproc.lab.harness.processes"
    program = f"from {module} import pick_ports; print(*pick_ports({wanted}).values())"
    own = pick_ports(wanted).values()
    theirs = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert len({*own, *map(int, theirs)}) == 16
