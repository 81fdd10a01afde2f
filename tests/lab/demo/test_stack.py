"""The demo's stack: printed commands, failures of processes, and ports."""

import asyncio
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import islice
from random import Random

import pytest
import pytest_asyncio

from extproc.lab.demo.app import instructions
from extproc.lab.demo.journal import Entry, Journal
from extproc.lab.harness.processes import pick_ports
from extproc.lab.harness.samples import samples
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.lab.harness.traffic import send_all
from tests.e2e.stack import PatientStack
from tests.waiting import until

FAST = SimulatedReplica("fast", "llama-8b-h100")
OTHER = SimulatedReplica("other", "llama-8b-h100")


async def sent(stack: PatientStack, journal: Journal) -> list[Entry]:
    mix = islice(samples(MODEL, 20.0, Random(7)), 50)
    chats = [sample for sample in mix if sample.kind == "chat"]
    answers = await send_all(stack.url, chats[:5], f"after-{len(journal.entries)}")
    assert [answer.problem for answer in answers] == [""] * 5
    return await journal.settle([answer.request_id for answer in answers])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PatientStack]:
    async with PatientStack(tmp_path_factory.mktemp("demo"), [FAST, OTHER]) as running:
        yield running


@pytest.fixture
def journal(stack: PatientStack) -> Journal:
    return Journal(stack)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.asyncio(loop_scope="module")
async def test_printed_commands_work(stack: PatientStack, journal: Journal) -> None:
    commands = re.findall(r"^  (?:.+\\\n)*.+", instructions(stack), re.MULTILINE)
    chat, streamed, by_policy, top, explain, listed, decisions, fleet, envoy, kill, start = commands
    for command in (chat, by_policy):
        assert '"finish_reason": "stop"' in await shell(command)
    assert (await shell(streamed)).rstrip().endswith("data: [DONE]")
    assert "fast" in await shell(top)
    assert "llama-8b: its turn" in await shell(explain)
    assert "fast" in await shell(listed)
    assert '"policy":"round_robin"' in await shell(decisions)
    assert '"name":"fast"' in await shell(fleet)
    assert "replicas::" in await shell(envoy)
    await shell(kill)
    await stack.process("router").wait()
    assert [process.name for process in stack.ended()] == ["router"]
    assert all(entry.fallback for entry in await sent(stack, journal))
    router = await asyncio.create_subprocess_shell(f"exec {start}", stderr=subprocess.DEVNULL)
    try:
        await until(lambda: routes_again(stack, journal))
    finally:
        router.terminate()
        await router.wait()
    await stack.kill("poller")
    assert stack.ended() == []  # a process killed on purpose is not reported


async def routes_again(stack: PatientStack, journal: Journal) -> bool:
    return all(entry.routed for entry in await sent(stack, journal))


async def shell(command: str) -> str:
    process = await asyncio.create_subprocess_shell(command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


def test_taken_port_is_replaced_by_a_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = pick_ports({"first": port, "second": 0})
    assert len({port, *ports.values()}) == 3
    assert pick_ports({"first": port}) == {"first": port}


def test_two_processes_choose_different_ports() -> None:
    wanted = dict.fromkeys("abcdefgh", 0)
    module = "extproc.lab.harness.processes"
    program = f"from {module} import pick_ports; print(*pick_ports({wanted}).values())"
    own = pick_ports(wanted).values()
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert len({*own, *map(int, output.split())}) == 16
