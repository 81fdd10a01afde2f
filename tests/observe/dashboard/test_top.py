"""``extproc top`` against a router's admin address, on a pipe and on a terminal."""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from msgspec.json import decode, encode

from extproc.cli import main
from extproc.cli.routers import AskedRouter
from extproc.cli.screen import draw, screen
from extproc.ground.runtime import in_turns
from extproc.ground.text import WIDTH
from extproc.lab.harness.processes import free_port
from extproc.observe import dashboard
from extproc.observe.dashboard.snapshot import snapshot
from extproc.proxy.services import Services
from extproc.proxy.sharing import apply
from extproc.share.replicas import Snapshot
from tests.fakes import chat, replica
from tests.large import thousand_states
from tests.observe.conftest import Run, decide, serving
from tests.observe.dashboard.conftest import poll
from tests.observe.terminal import on_terminal

STYLE = (Path(dashboard.__file__).parent / "page" / "style.css").read_text()


@pytest.fixture
def top(run: Run) -> Run:
    return partial(run, "top")


async def view_of(services: Services) -> AskedRouter:
    return AskedRouter("router", snapshot=decode(encode(await snapshot([services]))))


def rows(lines: list[str]) -> list[str]:
    begin = next(at for at, line in enumerate(lines) if line.startswith("Replica "))
    return [line.split()[0] for line in lines[begin + 1 :] if line.startswith("r")]


async def test_worst_replicas_are_on_top(services: Services, router: str, top: Run) -> None:
    services.fleet.dispatch(replica(3), chat(50_000, 100))
    poll(services, 4, healthy=False, problem="/health answered 503")
    lines = await top("--router", router)
    assert "3 of 4 replicas in use, 1 requests in flight, 0 waiting at" in lines[0]
    assert any(line.startswith("! r4 is excluded: ") for line in lines)
    assert rows(lines) == ["r4", "r3", "r1", "r2"]
    assert "unhealthy" in next(line for line in lines if line.startswith("r4"))


async def test_each_health_has_a_rank_in_the_terminal_and_a_mark_on_the_page(
    services: Services,
) -> None:
    poll(services, 2, draining=True)
    poll(services, 4, healthy=False, problem="/health answered 503")
    for _ in range(3):
        services.fleet.eligibility.failed(replica(3))
    view = await view_of(services)
    assert rows(screen([view], (), WIDTH)) == ["r4", "r3", "r2", "r1"]
    (health,) = (
        column["values"]
        for column in view.snapshot["pools"][0]["replicas"]["columns"]
        if column["title"] == "Health"
    )
    for value in {*health} - {"ok"}:
        assert f".health.{value} > span::before" in STYLE


async def test_top_says_that_there_is_no_warning(services: Services) -> None:
    assert "No warnings." in screen([await view_of(services)], (), WIDTH)
    poll(services, 4, healthy=False, problem="/health answered 503")
    assert "No warnings." not in screen([await view_of(services)], (), WIDTH)


async def test_top_keeps_the_last_warnings_while_no_router_answers(services: Services) -> None:
    poll(services, 4, healthy=False, problem="/health answered 503")
    silent = replace(await view_of(services), error="no router answers")
    lines = screen([silent, replace(silent, name="second")], (), WIDTH)
    assert "No warnings." not in lines
    assert [line for line in lines if line.startswith("! r4 is excluded: ")]


async def test_decisions_are_listed(services: Services, router: str, top: Run) -> None:
    decide(services, chat(1234, 50), "request-7")
    lines = await top("--once", "--router", router)
    (line,) = (line for line in lines if "request-7" in line)
    assert " 1234 " in line
    assert lines[-1].startswith("-: the request still runs")


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
async def test_screen_fits_the_width(services: Services, width: int) -> None:
    poll(services, 1, name="\x1b[2Jr1")
    poll(services, 4, healthy=False, problem="/health answered 503")
    lines = screen([await view_of(services)], (), width)
    assert all(len(line) <= width for line in lines)
    assert not any("\x1b" in line for line in lines)
    (header,) = (line for line in lines if line.startswith("Replica"))
    assert ("TTFT p99" in header) is (width >= 120)
    assert not header.endswith("...")


def test_nothing_is_erased_behind_a_line_of_full_width(capsys: pytest.CaptureFixture[str]) -> None:
    draw(["first", "last"])
    assert "first\n" in (drawn := capsys.readouterr().out)
    assert "last\n" in drawn


async def test_character_that_the_encoding_lacks_is_a_question_mark(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(output, encoding="ascii"))
    assert await asyncio.to_thread(main, ["top", "--router", router]) == 0
    assert "Backlog ? Share" in " ".join(output.getvalue().decode().split())


async def test_a_thousand_replicas_are_shown(services: Services, router: str, top: Run) -> None:
    await in_turns(apply(services.fleet, Snapshot(thousand_states())))
    assert len(await top("--router", router)) > 1000


@pytest.mark.process
@pytest.mark.parametrize("unbuffered", ["", "1"])  # the image sets this variable
@pytest.mark.parametrize("command", ["explain", "completion bash"])
async def test_reader_that_leaves_ends_a_command_without_an_error(
    command: str, unbuffered: str, services: Services, router: str
) -> None:
    for _ in range(20):
        decide(services)
    read, write = os.pipe()
    os.close(read)
    words = command.split() + (["--router", router] if "completion" not in command else [])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *words),
        stdout=write,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.process
async def test_terminal_is_redrawn_until_interrupted(services: Services) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        async with serving(services, address=address):
            top = await stack.enter_async_context(on_terminal("top", "--router", address))
            await top.shows("4 of 4 replicas in use")
            poll(services, 4, healthy=False, problem="/health answered 503")
            await top.shows("r4 is excluded")
        await top.shows("! no router answers")  # above the last snapshot
        async with serving(services, address=address):
            await top.shows("3 of 4 replicas in use", "! no router answers")
            assert await top.interrupt() == 0
    assert "Traceback" not in top.output
