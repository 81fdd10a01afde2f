"""Requests with partly cached prompts, in the ledger and after polls."""

import numpy as np
import pytest

from extproc.request.endpoint import Endpoint
from extproc.request.prefix import NO_PREFIX, UNIT_BYTES, Prefix, prefix_of
from extproc.request.profile import RequestProfile
from tests.fakes import H100, MODEL, replica
from tests.fleet.conftest import PolledFleet

TOKENS = 10_000
CACHED = 9_000.0


@pytest.fixture
def fleet() -> PolledFleet:
    return PolledFleet(2, H100)


def request(prefix: Prefix = NO_PREFIX, tokens: int = TOKENS) -> RequestProfile:
    return RequestProfile(Endpoint.CHAT, MODEL, tokens, 0, 1000, prefix=prefix)


def prompt(letter: str, tokens: int = TOKENS) -> Prefix:
    return prefix_of(letter.encode() * (tokens * UNIT_BYTES // 64), tokens, 1)


def test_expected_hits_are_whole_blocks_of_the_replica(fleet: PolledFleet) -> None:
    fleet.poll(1, block_size=3000)
    fleet.dispatch(replica(1), request(prefix := prompt("a")))
    assert fleet.prefix_hits(prefix, fleet.view(MODEL)).expected.max() == 9000.0


def test_prompt_far_too_long_for_the_replica_displaces_no_cached_prompt(fleet: PolledFleet) -> None:
    """Nor is the prompt announced: the replica refuses it at once, so a client can send many. Nor
    is a prompt without tokens: other routers would take the replica's cache for empty."""
    fleet.poll(1, kv_tokens=100_000)
    fleet.dispatch(replica(1), request(prefix := prompt("a")))
    fleet.dispatch(replica(1), request(prompt("b", 240_000), 240_000))
    fleet.dispatch(replica(1), request(NO_PREFIX, 0))
    assert fleet.prefix_hits(prefix, fleet.view(MODEL)).expected.max() > CACHED
    assert len(fleet.prompt_log.take()) == 1


def test_prompt_that_may_fit_is_expected_in_the_cache(fleet: PolledFleet) -> None:
    """The tokens of a prompt are an estimate, which may be too high."""
    fleet.poll(1, max_model_len=6_000)
    fleet.dispatch(replica(1), request(prefix := prompt("a")))
    assert fleet.prefix_hits(prefix, fleet.view(MODEL)).expected.max() > CACHED


@pytest.mark.parametrize("cached", [0.0, CACHED])
def test_poll_leaves_known_kv_tokens_unchanged(fleet: PolledFleet, cached: float) -> None:
    for _ in range(25):
        fleet.first_token(fleet.dispatch(replica(1), request(), cached))
    before = fleet.view(MODEL).kv_used[0]
    fleet.clock.advance(0.2)
    usage = 25 * TOKENS / 400_000
    fleet.poll(1, running=25, kv_usage=usage, steps=1)
    assert fleet.view(MODEL).kv_used[0] == pytest.approx(before, rel=0.02)


def test_end_of_a_request_frees_no_shared_blocks(fleet: PolledFleet) -> None:
    tickets = [fleet.dispatch(replica(1), request(), CACHED) for _ in range(10)]
    fleet.first_token(tickets[-1])
    fleet.clock.advance(0.2)
    used = CACHED + 10 * (TOKENS - CACHED)
    fleet.poll(1, running=10, kv_usage=used / 400_000, steps=1)
    for ticket in tickets[:2]:
        fleet.release(ticket)
    assert used * 0.7 < fleet.view(MODEL).kv_used[0] < used


def test_long_prompt_reaches_the_engine_after_it_is_tokenized(fleet: PolledFleet) -> None:
    fleet.poll(1, max_model_len=200_000)
    fleet.dispatch(replica(1), request(tokens=150_000), 90_000.0)
    fleet.clock.advance(1.2)
    fleet.poll(1)
    assert fleet.view(MODEL).backlog[0] > 20_000


def test_retried_prompt_is_prefilled_on_the_new_replica(fleet: PolledFleet) -> None:
    prefix = prompt("a")
    fleet.dispatch(replica(1), request(prefix))
    ticket = fleet.dispatch(replica(1), request(prefix), CACHED)
    fleet.move(ticket, replica(2), prefix)
    assert fleet.view(MODEL).backlog[1] == TOKENS
    held = fleet.prefix_hits(prefix, fleet.view(MODEL)).expected
    assert held[1] == pytest.approx(TOKENS, abs=64)


def test_peers_learn_the_replica_of_a_retried_prompt(fleet: PolledFleet) -> None:
    other = PolledFleet(2, H100)
    prefix = prompt("a")
    fleet.move(fleet.dispatch(replica(1), request(prefix)), replica(2), prefix)
    other.receive_prompts(fleet.router, fleet.prompt_log.take())
    assert np.all(other.prefix_hits(prefix, other.view(MODEL)).expected > 0)


@pytest.mark.parametrize(
    "after",
    [{"steps": 1}, {"asleep": True}, {"asleep": True, "healthy": False}],
    ids=["restart", "sleep", "sleep, not ready"],
)
def test_prompts_from_before_a_cache_was_lost_count_for_no_router(
    fleet: PolledFleet, after: dict[str, float]
) -> None:
    prefix = prompt("a")
    fleet.poll(1, steps=100)
    fleet.dispatch(replica(1), request(prefix))
    batches = [fleet.prompt_log.take()]
    for figures in (after, after, after | {"asleep": False, "healthy": True}):
        fleet.clock.advance(1)
        fleet.poll(1, **({"steps": 100} | figures))
        batches.append(fleet.prompt_log.take())
    assert len([batch for batch in batches if batch]) == 2
    other = PolledFleet(0, H100)
    other.poll(1, steps=100)
    for batch in batches:
        other.receive_prompts(fleet.router, batch)
    for each in (fleet, other):
        assert not each.prefix_hits(prefix, each.view(MODEL)).expected.any()


@pytest.mark.parametrize(
    ("starts", "polls", "known"),
    [
        pytest.param((1e9, 1e9), [(199, 3.0)], True, id="second poller, late"),
        pytest.param((0.0, 0.0), [(199, 1.9)], True, id="pushed while a newer state was read"),
        pytest.param((0.0, 0.0), [(199, 3.0)], False, id="restart"),
        pytest.param((0.0, 0.0), [(40, 1.8), (50, 1.9)], False, id="restart, clock behind"),
        pytest.param((1e9, 2e9), [(40, 1.8)], False, id="restart with start time, clock behind"),
    ],
)
def test_older_state_keeps_the_index(
    fleet: PolledFleet, starts: tuple[float, float], polls: list[tuple[float, float]], known: bool
) -> None:
    prefix = prompt("a")
    before, after = starts
    for steps, scraped_at, started_at in (
        (100, 1.0, before),
        (200, 2.0, before),
        *((*poll, after) for poll in polls),
        (201, 4.0, after),
    ):
        fleet.clock.advance(1)
        poll = {"steps": steps, "started_at": started_at, "scraped_at": scraped_at}
        fleet.poll(1, **poll)
        if steps == 100:
            fleet.dispatch(replica(1), request(prefix))
    assert fleet.prefix_hits(prefix, fleet.view(MODEL)).expected.any() == known


@pytest.mark.parametrize(("started_at", "known"), [(1e9, True), (2e9, False)])
def test_replica_that_rejoins_keeps_the_index_of_the_same_process(
    fleet: PolledFleet, started_at: float, known: bool
) -> None:
    prefix = prompt("a")
    fleet.poll(1, steps=100, started_at=1e9)
    fleet.dispatch(replica(1), request(prefix))
    fleet.remove(replica(1))
    fleet.poll(1, steps=200, started_at=started_at)
    assert fleet.prefix_hits(prefix, fleet.view(MODEL)).expected.any() == known


@pytest.mark.parametrize(("cached", "each"), [(9e5, 1000), (3e6, 0)])
def test_external_prompts_are_cached_as_much_as_all(
    fleet: PolledFleet, cached: float, each: int
) -> None:
    """vLLM up to 0.15 counts cached tokens at each attempt to admit a prompt."""
    figures = {"waiting": 5, "prompt_tokens": 1e6, "cached_tokens": cached, "first_tokens": 100}
    for _ in range(2):
        fleet.clock.advance(0.2)
        fleet.poll(1, steps=100, **figures)
    assert fleet.view(MODEL).backlog[0] == 5 * each
