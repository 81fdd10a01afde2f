"""The demo's screen, at the widths terminals have."""

from io import StringIO
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

from extproc.lab.demo.journal import Entry, Journal, ReplicaNow
from extproc.lab.demo.screen import Screen
from extproc.lab.harness.envoy_config import Access
from extproc.lab.harness.stack import Stack
from tests.lab.demo.decision import decision_record

WHY = (
    "fast-2 finishes it in 0.62 s, fast-1 in 0.61 s: as good as equal, and here the first token "
    "comes 12.3 ms sooner, after 45.6 ms; slow-1 in 3.50 s though it is idle"
)


@pytest.fixture
async def journal(tmp_path: Path) -> Journal:
    """Of a stack that does not run."""
    async with aiohttp.ClientSession() as session:
        return Journal(Stack(tmp_path), session)


def screen(stack: Stack, journal: Journal, width: int, height: int) -> list[str]:
    """Its lines, after thirty requests on four replicas."""
    for number in range(1, 31):
        decision = decision_record(
            f"sample-{number:03}",
            stack.address("fast-2"),
            stack.address("fast-1"),
            predicted_s=12.34,
            why=WHY,
        )
        ended = Access(decision.request_id, 200, decision.replica, 23.45, 1.0)
        journal.entries[decision.request_id] = Entry(decision.request_id, 0.0, decision, ended)
    journal.fleet = {
        one.name: ReplicaNow(
            id=stack.address(one.name),
            name=one.name,
            healthy=True,
            running=123,
            waiting=45,
            kv_usage=0.995,
            in_flight=678,
        )
        for one in stack.replicas
    }
    out = StringIO()
    console = Console(file=out, width=width, height=height)
    console.print(Screen(stack, journal, reserved=3))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (100, 40), (160, 50)])
async def test_everything_is_readable(
    tmp_path: Path, journal: Journal, width: int, height: int
) -> None:
    stack = Stack(tmp_path)
    lines = screen(stack, journal, width, height)
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for words in ("fast-1", "llama-8b-h100", "678", "99.5%", "12.34 s", "23.45 s", "sample-030"):
        assert words in text
    said = WHY.partition(";")[0].split()
    assert all(word in text for word in said)
    assert len(lines) <= height - 3
