"""Batch limit and tokens per step are learned from the figures of consecutive polls."""

from typing import Any

import pytest
from msgspec import structs

from extproc.poll.batch import scraped_state
from extproc.poll.metrics_text import PageFigures
from extproc.replica_state import ReplicaState
from tests.fakes import replica


def polled(steps: int, **figures: Any) -> PageFigures:
    """Figures of a process whose four running sequences all decode while a fifth waits."""
    usual: dict[str, Any] = {
        "running": 4,
        "waiting": 1,
        "kv_usage": 0.05,
        "generated_tokens": 4.0 * steps,
    }
    return PageFigures(steps=steps, **(usual | figures))


NINE_RUN = polled(30, running=9, generated_tokens=210.0)
NINE_STILL_RUN = polled(40, running=9, generated_tokens=300.0)


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        pytest.param((polled(10), polled(20)), 4, id="full in two polls"),
        pytest.param((polled(10), polled(20, running=3)), 4, id="first poll has more"),
        pytest.param((polled(10, running=3), polled(20), polled(30, running=3, waiting=0)), 4,
            id="full once"),
        pytest.param((polled(10), polled(20), NINE_RUN, NINE_STILL_RUN), 9, id="refuted"),
        pytest.param((polled(10), polled(20), structs.replace(NINE_RUN, waiting=0)), 0,
            id="refuted, not full"),
        pytest.param((polled(10), polled(20, waiting=0)), 0, id="nobody waits any more"),
        pytest.param((polled(10, waiting=0), polled(20)), 0, id="nobody waited before"),
        pytest.param((polled(10), polled(10)), 0, id="engine is paused"),
        pytest.param((polled(10), polled(20, kv_usage=0.95)), 0, id="KV cache is full"),
        pytest.param((polled(10), polled(12)), 0, id="too few steps"),
        pytest.param((polled(5, running=9, waiting=0), polled(10), polled(20)), 0,
            id="nine ran before"),
        pytest.param((polled(10), polled(20, running=5)), 0, id="fifth is in prefill"),
        pytest.param((polled(10), polled(20, generated_tokens=120.0, accepted_tokens=60.0)), 0,
            id="only two decode"),
    ],
)  # fmt: skip
def test_batch_limit_is_learned_from_polls_of_one_process(
    polls: tuple[PageFigures, ...], expected: int
) -> None:
    state = ReplicaState(id=replica(1))
    for now in polls:
        state = scraped_state(state, state, now)
    assert state.max_num_seqs == expected


@pytest.mark.parametrize("tokens", [1.0, 4.0])
def test_tokens_per_step_are_those_of_the_last_thousands(tokens: float) -> None:
    """After 100,000 tokens with half of the drafts accepted, none or all are accepted."""
    state, generated, accepted = ReplicaState(id=replica(1)), 0.0, 0.0
    for per_step, polls in ((2.0, 1000), (tokens, 60)):
        for _ in range(polls):
            generated += 100.0
            accepted += 100.0 * (1.0 - 1.0 / per_step)
            figures = PageFigures(generated_tokens=generated, accepted_tokens=accepted)
            state = scraped_state(state, state, figures)
        assert state.tokens_per_step == pytest.approx(per_step, rel=0.02)
