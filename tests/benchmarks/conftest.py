"""Shipped traces and fleets, a simulated replica that runs 50 times as fast, and a check of a
command's refusal."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import start

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRACES, FLEETS = BENCHMARKS / "traces", BENCHMARKS / "fleets"
CONVERSATION = TRACES / "azure-2023-conv.jsonl.gz"
MIXED = FLEETS / "mixed.yaml"


@pytest.fixture
async def replica_url() -> AsyncIterator[str]:
    settings = ReplicaSettings(profile="llama-8b-h100", speed=50, max_model_len=131_072)
    serving = await start(Replica(settings), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{serving.port}"
    await serving.runner.cleanup()


def complaint_of(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str], *given: str | Path
) -> str:
    """Runs a command that must refuse its arguments; returns the last line of its error."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([*map(str, given)]))
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    usage = output.err.splitlines()[:-1]
    assert all(line.startswith(("usage: ", " ")) for line in usage)
    return output.err.splitlines()[-1]
