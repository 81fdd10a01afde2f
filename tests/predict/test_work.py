"""What requests take of a replica adds up to one replica where that can just do them."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.sequence import Sequence
from extproc.predict.completion import work
from extproc.predict.step import HardwareProfile, hardware_profile
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.profile import RequestProfile
from extproc.route.router import Router
from tests.fakes import ManualClock, chat, embedding, fleet_of

A10, H100 = "llama-8b-a10", "llama-8b-h100"


def taken(name: str, profile: RequestProfile) -> float:
    """Seconds of an idle replica of that kind."""
    decision = Router(fleet_of(ManualClock(), name), "completion", Random(0)).decide(profile)
    assert decision is not None
    return work(decision.profile, decision.prediction, decision.situation.view, 0)


def asking(prompt: int, output: int, objective: Objective = NO_OBJECTIVE) -> RequestProfile:
    """A request of known length."""
    if not output:
        return embedding(prompt)
    return replace(chat(prompt, output), least_output=output, objective=objective)


def rate(profile: HardwareProfile, prompt: int, output: int, at_once: int) -> tuple[float, float]:
    """Requests that an engine ends in a second while it always has so many of them, of about this
    length; and the mean time of each token after the first."""
    engine, random, ended = Engine(profile), Random(1), list[Sequence]()

    def sequences() -> Iterator[Sequence]:
        for number in range(10**6):
            length = max(round(output * random.uniform(0.5, 1.5)), 1) if output else 0
            yield Sequence(number, prompt, length)

    new, now = sequences(), 0.0
    for _ in range(at_once):
        engine.add(next(new), now)
    while len(ended) < 4 * at_once + 20:
        engine.schedule(now)
        outcome = engine.complete()
        now = outcome.ends_at
        for one in outcome.finished:
            ended.append(one)
            engine.add(next(new), now)
    last = ended[2 * at_once :]
    times = [(one.finished or 0.0) - (one.first_token or 0.0) for one in last]
    tokens = sum(one.generated - 1 for one in last)
    seconds = (last[-1].finished or 0.0) - (last[0].finished or 0.0)
    return (len(last) - 1) / seconds, sum(times) / max(tokens, 1)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "at_once"),
    [
        (A10, 500, 200, 100),  # its KV cache is what is full
        (A10, 4000, 20, 20),  # its engine prefills all the time
        (A10, 50, 50, 400),  # all places in its batch are taken
        (A10, 1000, 0, 50),
        (H100, 500, 200, 600),
    ],
)
def test_a_busy_replica_does_a_second_of_work_in_a_second(
    name: str, prompt: int, output: int, at_once: int
) -> None:
    per_second, _ = rate(hardware_profile(name), prompt, output, at_once)
    assert per_second * taken(name, asking(prompt, output)) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("at_once", [4, 16, 48])
def test_with_a_target_a_replica_does_less(at_once: int) -> None:
    per_second, tpot = rate(hardware_profile(A10), 500, 200, at_once)
    aimed = asking(500, 200, objective=Objective(tpot_s=tpot))
    assert per_second * taken(A10, aimed) == pytest.approx(1.0, abs=0.15)
    prefill = 500 * hardware_profile(A10).step.c_prefill
    whole = asking(500, 200, objective=Objective(completion_s=tpot * 199 + prefill))
    assert per_second * taken(A10, whole) == pytest.approx(1.0, abs=0.2)
    assert taken(A10, aimed) > taken(A10, asking(500, 200))


def test_a_target_that_nothing_meets_takes_the_replica_for_itself() -> None:
    alone = taken(A10, asking(500, 200, objective=Objective(tpot_s=1e-3)))
    per_second, _ = rate(hardware_profile(A10), 500, 200, 1)
    assert alone * per_second == pytest.approx(1.0, abs=0.1)
