"""``benchmarks.ablation``: every part exists and changes decisions; finished runs are stored."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import ablation, trace
from benchmarks.ablation import CELLS, PAIRS, PARTS, difference
from benchmarks.discrete import FleetSimulation
from benchmarks.fleet import FleetFile
from tests.benchmarks.conftest import TRACES

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    "not shared": {},
    "shared": {"share_lag": 0.02},
    "adapters": {"adapters": 6},
}
"""Options of the simulation, in the order of play: the fastest variant first."""
DECISIONS = {"not shared": 160, "shared": 60, "adapters": 160}
"""Decisions of each variant to compare: enough for every part to change one."""
SHOWN_BY = {
    "prior of the fleet": "adapters",
    "trial of new replicas": "adapters",
    "wait for admission": "adapters",
    "trust in the prefix index": "adapters",
    "adapters": "adapters",
    "digests of other routers": "shared",
    "prompts of other routers": "shared",
}
"""Variant to play first for a part: "not shared" shows the part later or never."""
_LORAS = {"max_loras": 2}
FLEET = FleetFile.model_validate(
    {
        "replicas": [
            {"name": "right", "profile": "llama-8b-h100", **_LORAS},
            {"name": "faster", "profile": "llama-8b-h100", "believed": "llama-8b-a10", **_LORAS},
            {"name": "slower", "profile": "llama-8b-a10", "believed": "llama-2-7b-h100", **_LORAS},
            {"name": "new", "profile": "llama-8b-h100", "believed": "llama-8b-a10", **_LORAS},
        ],
        "events": [
            {"at": 0, "replica": "new-0", "do": "down"},
            {"at": 22, "replica": "new-0", "do": "up"},
        ],
    }
)


def scene() -> list[trace.TracedRequest]:
    """Conversations, then at the same time agents and prompts that fill the caches."""
    mixed = [
        replace(request, at=request.at + later)
        for later, name, speed, most in (
            (0.0, "azure-2023-conv", 0.2, 30),
            (20.0, "agents", 6.0, 90),
            (24.0, "mooncake-synthetic", 1.0, 40),
        )
        for request in trace.read([TRACES / f"{name}.jsonl.gz"], speed, most)
    ]
    return sorted(mixed, key=lambda request: request.at)


def decisions(requests: list[trace.TracedRequest], variant: str) -> Iterator[tuple[int, str]]:
    options: dict[str, Any] = {"seed": 1, "routers": 2, "hold": True, **VARIANTS[variant]}
    simulation = FleetSimulation(FLEET, "completion", **options)
    for machine in simulation.machines.values():
        machine.runs_at(replace(machine.profile.step, frontend=0.05))
    served = islice(simulation.run(requests), DECISIONS[variant])
    return ((request.number, request.replica) for request in served)


@pytest.mark.timeout(600)  # long on a busy machine
def test_each_part_changes_decisions_and_is_restored() -> None:
    requests = scene()
    whole = {variant: [*decisions(requests, variant)] for variant in VARIANTS}

    def differs(variant: str) -> bool:
        """Plays the scene up to the first decision that differs; returns True if there is one."""
        pairs = zip(decisions(requests, variant), whole[variant], strict=True)
        return any(decision != other for decision, other in pairs)

    without_effect = set()
    for name, part in PARTS.items():
        order = dict.fromkeys([SHOWN_BY.get(name, "not shared"), *VARIANTS])
        with part.off():
            if not any(map(differs, order)):
                without_effect.add(name)
    assert without_effect == set()
    assert not any(map(differs, VARIANTS))


def test_segments_are_disjoint_and_cover_the_trace() -> None:
    segments = [CELLS["mooncake"].requests(pair, 10**6) for pair in range(PAIRS)]
    whole = trace.read([TRACES / "mooncake-synthetic.jsonl.gz"])
    assert sum(map(len, segments)) == len(whole) - 1  # the last request ends the last segment
    assert max(request.at for segment in segments for request in segment) <= whole[-1].at / PAIRS


@pytest.mark.parametrize("commit", ["0f3e", "0f3e-dirty", None])
def test_only_finished_runs_of_a_commit_are_not_repeated(
    commit: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dates = (f"2026-11-28T12:00:0{second}+00:00" for second in range(2))
    monkeypatch.setattr(ablation, "about", lambda *_: {"commit": commit, "date": next(dates)})
    monkeypatch.setattr(ablation, "PAIRS", 2)
    options = ["--cells", "mooncake", "--parts", "near ties", "--requests", "9", "--jobs", "1"]
    arguments = [*options, "--json", str(tmp_path)]
    assert ablation.main(arguments) == 0
    first = capsys.readouterr().out
    stored = [*tmp_path.rglob("*.json")]
    assert len(stored) == 2 * 2  # each pair with and without the part
    for file in stored:
        assert json.loads(file.read_text())["requests"] == 9

    def never(*_: object) -> None:
        raise AssertionError("simulated again")

    monkeypatch.setattr(ablation.Cell, "play", never)
    if commit != "0f3e":
        with pytest.raises(AssertionError, match="simulated again"):
            ablation.main(arguments)
        return
    assert ablation.main(arguments) == 0
    assert capsys.readouterr().out == first


def test_difference_is_shown_if_its_interval_excludes_zero() -> None:
    assert difference(np.zeros(PAIRS)) == ""
    assert difference(np.array([0.1, -0.1] * (PAIRS // 2))) == ""
    logs = np.log([1.02, 1.03] * (PAIRS // 2))
    assert difference(logs, least=2.0) == "+2.5 (+2.1 to +2.9)"
    assert difference(-logs) == "−2.4 (−2.8 to −2.1)"
    assert difference(logs, least=3.0) == ""
