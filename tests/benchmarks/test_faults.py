"""``benchmarks.compare --fault``: faults, the parts that they hit, and the table of their harm."""

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import __main__ as compare
from benchmarks.compare.contenders import ComparedFleet, Contender, Front, Servers, SimulatedFleet
from benchmarks.compare.play import play
from benchmarks.fleet import FleetFile
from benchmarks.report.markdown import markdown
from benchmarks.report.results import Fault, RunResult, read
from benchmarks.report.words import harm, terminal_result
from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.predict.step import hardware_profile

Json = dict[str, Any]

AT_S = 1.55  # the trace pauses from here on: a busy machine takes long to inject the fault
RESUMES_S = 2.5
_TURNS = 3  # at most, until the fault falls within the pause
TIMEOUT_S = 6.0  # of the clients, where a replica hangs
FLEET = {"replicas": [{"name": "a", "profile": "llama-8b-h100", "count": 2}]}
ARRIVALS_MS = [*range(0, 1500, 100), *range(int(1000 * RESUMES_S), 4000, 100)]
TOKENS = 300  # of an answer, at least: no answer has ended at `AT_S`


def trace() -> str:
    lengths = ({"input_length": 60, "output_length": TOKENS + 10 * (n % 5)} for n in count())
    lines = zip(ARRIVALS_MS, lengths, strict=False)
    return "\n".join(json.dumps({"timestamp": at_ms} | length) for at_ms, length in lines)


def request(sent: float, took: float, failed: bool = False, struck: bool = False) -> Json:
    end = {"error": "broken stream", "failed_after_s": took} if failed else {"completion_s": took}
    return {"at_s": sent, "struck": struck, **end}


def turn(name: str, requests: list[Json]) -> Json:
    fault = {"name": "replica-killed", "at_s": 5.0}
    return {"run": {"name": name, "repeat": 0}, "fault": fault, "requests": requests}


HURT = [
    *(request(1.0, 1.0), request(2.0, 2.0)),
    *(request(4.0, 1.5, failed=True, struck=True), request(4.2, 9.0, struck=True)),
    request(4.5, 1.0, failed=True),
    *(request(6.0, 3.0), request(7.5, 20.0, failed=True), request(8.0, 5.0)),
]


def test_failures_are_counted_by_place_and_time() -> None:
    counts = {"hit": 2, "lost": 1, "elsewhere": 1, "later": 1}
    times = {"until_s": 2.5, "slowest_s": 20.0, "before_s": [1.0, 2.0], "after_s": [3.0, 5.0]}
    assert asdict(harm(RunResult.model_validate(turn("x", HURT)))) == counts | times


def result() -> Json:
    about = {"fault": {"name": "replica-killed", "at_s": 5.0}, "without_part": ["envoy:random"]}
    whole = [request(1.0, 1.0), request(6.0, 1.0)]
    doubtful = turn("whole:x", whole) | {"validity": {"doubts": ["CPU 95% busy"]}}
    return {"compare": about, "runs": [turn("hurt:x", HURT), doubtful]}


def test_harm_table_is_the_same_on_terminal_and_page() -> None:
    printed = terminal_result(result())
    rows = [line.split() for line in printed.splitlines()]
    hurt = ["2", "1", "1", "1", "2.50", "20.00", "1.50", "1.99", "4.00", "4.98"]
    whole = ["0", "0", "0", "0", "–", "1.00", "1.00", "1.00", "1.00", "1.00"]
    assert ["hurt:x", *hurt] in rows
    assert ["whole:x", "!", *whole] in rows
    assert ["envoy:random:", "has", "none", *"–" * 10] in rows
    assert "replica killed after 5 s" in printed
    known = read(result())
    page = markdown(known)
    assert f"| {' | '.join(('hurt:x', *hurt))} |" in page
    assert "replica killed after 5 s" in page


def test_contender_without_the_part_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    async def played(contender: Any, fleet: Any, args: Any, repeat: int, directory: Path) -> Any:
        begun.append((contender.name, args.fault))
        raise ValueError("no real turn")

    monkeypatch.setattr(compare, "play", played)
    given = ["--fault", "poller-killed", "--repeats", "1", "--duration", "8"]
    compare.main([*given, "--contenders", "envoy,router,envoy:random"])
    assert begun == [("router:completion", Fault(name="poller-killed", at_s=4.0))]
    assert compare.main([*given, "--contenders", "envoy"]) == 2
    assert "no contender in this comparison has a poller" in capsys.readouterr().err


class InspectedContender:
    """Contender that keeps its front and its servers for the test."""

    def __init__(self, contender: Contender) -> None:
        self.name, self.about, self.parts = contender.name, contender.about, contender.parts
        self.front: Front
        self.servers: Servers
        self._contender = contender

    @asynccontextmanager
    async def running(
        self, fleet: ComparedFleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        self.servers = servers
        async with self._contender.running(fleet, servers, directory, seed) as self.front:
            yield self.front


class FaultTurn:
    def __init__(self, run: Json, accesses: list[Access], inspected: "InspectedContender") -> None:
        self.run = run
        self.by_envoy = {access.request_id: access for access in accesses}
        self.victim = inspected.servers["a-0"]
        parts = inspected.front.parts.items()
        self.killed = {name for name, process in parts if process.returncode == -9}
        self.harm = harm(RunResult.model_validate(run))
        self.at_s = run["fault"]["at_s"]
        assert AT_S <= self.at_s < RESUMES_S
        self.later = {name for name in self.ids() if self.sent_s(name) > self.at_s}
        assert 0 < len(self.later) < len(ARRIVALS_MS)
        assert not [text for text in run["complaints"] if "router's answer" not in text]

    def ids(self, **fields: Any) -> set[str]:
        """Ids of the requests with these fields."""
        every = self.run["requests"]
        return {each["request_id"] for each in every if fields.items() <= each.items()}

    def sent_s(self, name: str) -> float:
        (request,) = (each for each in self.run["requests"] if each["request_id"] == name)
        return float(request["at_s"] + request["late_s"])

    @property
    def failed(self) -> set[str]:
        return self.ids() - self.ids(error=None)


async def played(fault: str, contender: Contender, directory: Path) -> FaultTurn:
    (directory / "trace.jsonl").write_text(trace())
    part = {"speed": 1.0, "skip": 0.0, "duration": 4.0, "stream_share": 1.0, "seed": 0}
    args = Namespace(trace=[directory / "trace.jsonl"], fault=Fault(name=fault, at_s=AT_S), **part)
    simulated = SimulatedFleet(FleetFile.model_validate(FLEET))
    for number in range(_TURNS):
        inspected, files = InspectedContender(contender), directory / f"turn-{number}"
        run = await play(inspected, simulated, args, 0, files)
        if run["fault"]["at_s"] < RESUMES_S:
            break
    return FaultTurn(run, AccessLog(files / "access.log").new(), inspected)


@pytest.mark.process
async def test_only_requests_in_flight_on_a_killed_replica_fail(tmp_path: Path) -> None:
    turn = await played("replica-killed", compare.contender_named("envoy:round_robin"), tmp_path)
    struck = turn.ids(struck=True)
    assert struck
    assert turn.failed == turn.ids(error="broken stream") == struck
    assert {turn.by_envoy[name].upstream for name in struck} == {turn.victim}
    assert not turn.later & turn.ids(replica="a-0")
    assert turn.harm.hit == turn.harm.lost == len(struck)
    assert (turn.harm.elsewhere, turn.harm.later, turn.harm.until_s) == (0, 0, None)


@pytest.mark.process
async def test_requests_on_a_hung_replica_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.play.TIMEOUT_S", TIMEOUT_S)
    turn = await played("replica-hung", compare.contender_named("envoy:round_robin"), tmp_path)
    assert turn.failed == turn.ids(error="timeout")
    # Half of the later requests went there: Envoy alone does not see that the replica hangs.
    later = turn.failed & turn.later
    assert len(later) == pytest.approx(len(turn.later) / 2, abs=2)
    assert turn.failed - turn.later == turn.ids(struck=True)
    assert (turn.harm.lost, turn.harm.later) == (len(turn.failed - later), len(later))
    took = [each["failed_after_s"] for each in turn.run["requests"] if each["error"]]
    assert min(took) > TIMEOUT_S - 0.1
    assert turn.harm.slowest_s == pytest.approx(max(took))


@pytest.mark.process
async def test_steps_of_a_slow_replica_take_longer(tmp_path: Path) -> None:
    turn = await played("replica-slow", compare.contender_named("envoy:round_robin"), tmp_path)
    assert not turn.failed
    on_replica = turn.ids(replica="a-0")
    gaps = {each["request_id"]: each["gaps_s"]["mean"] for each in turn.run["requests"]}
    step_s = hardware_profile("llama-8b-h100").step.c0
    assert min(gaps[name] for name in on_replica & turn.later) > 3 * step_s
    assert turn.ids(struck=True) <= on_replica


@pytest.mark.process
@pytest.mark.parametrize("name", ["picker-hung", "redis-killed"])
async def test_no_request_fails_with_a_part_of_the_router(name: str, tmp_path: Path) -> None:
    turn = await played(name, compare.contender_named("router"), tmp_path)
    part = name.partition("-")[0]
    assert turn.killed == {part}
    assert not turn.failed
    in_flight = turn.ids(struck=True)
    assert turn.harm.hit == len(in_flight)
    assert (turn.harm.lost, turn.harm.elsewhere, turn.harm.later) == (0, 0, 0)
    advised = {name for name in turn.later if turn.by_envoy[name].destination}
    assert bool(advised) == (part != "picker")
    assert bool(in_flight) == (part == "picker")
