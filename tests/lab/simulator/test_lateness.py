"""Lateness of a replica's steps, as ``/simulate/late`` reports it."""

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.live import Lateness


def test_lateness_has_mean_p99_and_maximum() -> None:
    lateness = Lateness()
    for _ in range(99):
        lateness.delivered(0.0008)
    lateness.delivered(1.25)
    assert lateness.to_json() == {
        "steps": 100,
        "late_s": {"mean": pytest.approx(0.0132920), "p99": 0.001, "max": 1.25},
        "lost_s": 0.25,
    }


def test_p99_of_few_steps_is_at_most_the_maximum() -> None:
    lateness = Lateness()
    assert lateness.to_json()["late_s"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}
    lateness.delivered(0.0001)
    lateness.delivered(3.0)
    assert lateness.to_json()["late_s"]["p99"] == 3.0


async def test_replica_reports_the_lateness_of_its_steps(client: ClientSession) -> None:
    async with client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5}) as answer:
        assert answer.status == 200
    async with client.get("/simulate/late") as answer:
        late = await answer.json()
    assert late["steps"] >= 5
    assert 0 < late["late_s"]["p99"] <= late["late_s"]["max"]
