"""Requests that a replica served alone tell its speed, where counters say little or nothing."""

from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from extproc.fleet.fleet import Fleet
from extproc.predict.firsthand import Served
from extproc.predict.step import PROFILES, StepModel
from extproc.route.router import Router
from tests.fakes import MODEL, ManualClock, chat, fleet_of, replica, state

A10, A100 = "llama-8b-a10", "llama-3-8b-a100"
TRUTH = PROFILES[A10].step


class Idle:
    """A replica that is an A10 and taken for an A100, asked for an answer of 20 tokens at times."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet: Fleet = fleet_of(self.clock, A100)
        self.served = 0
        self.counted = {"first_tokens": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0}

    def ask(self, prompt: int = 1000, cached: int = 0, beside: int = 0) -> None:
        """``beside``: requests that others sent there meanwhile."""
        ticket = self.fleet.dispatch(replica(1), chat(prompt, 20))
        ttft = TRUTH.step_time(prompt - cached, 0, 0)
        seconds = ttft + 19 * TRUTH.step_time(0, 1, prompt + 10)
        self.clock.advance(seconds)
        before = self.fleet.release(ticket).alone
        if before is not None:
            self.fleet.lone.served(replica(1), before, Served(prompt, 20, seconds, ttft))
        self.served += 1 + beside
        self.counted["first_tokens"] += 1 + beside
        self.counted["prompt_tokens"] += prompt * (1 + beside)
        self.counted["cached_tokens"] += cached
        self.clock.advance(1.0)
        self.poll()

    def poll(self) -> None:
        figures = self.counted | {"steps": 20.0 * self.served}
        self.fleet.put(state(1, A100, self.clock, **figures))

    def step(self) -> tuple[float, float]:
        """Believed over true time of a step that decodes, and of one that prefills 1,000 tokens."""
        costs = self.fleet.view(MODEL)
        decode = (costs.c0[0] + costs.c_batch[0] + costs.c_kv[0] * 1000) / TRUTH.step_time(
            0, 1, 1000
        )
        prefill = (costs.c0[0] + costs.c_prefill[0] * 1000) / TRUTH.step_time(1000, 0, 0)
        return float(decode), float(prefill)


def test_ten_requests_that_were_alone_are_enough() -> None:
    idle = Idle()
    assert idle.step()[0] < 0.5
    for prompt in range(200, 1200, 100):
        idle.ask(prompt)
    assert idle.step() == pytest.approx((1.0, 1.0), rel=0.05)


def test_prompt_tokens_that_were_cached_are_not_taken_for_fast_ones() -> None:
    idle = Idle()
    for prompt in range(200, 1200, 100):
        idle.ask(prompt, cached=prompt // 2)
    assert idle.step() == pytest.approx((1.0, 1.0), rel=0.1)


def test_one_beside_which_others_were_served_tells_nothing() -> None:
    idle = Idle()
    for _ in range(10):
        idle.ask(beside=1)
    assert idle.step()[0] < 0.5


def test_nor_do_two_of_the_routers_own_at_once() -> None:
    idle = Idle()
    other = idle.fleet.dispatch(replica(1), chat(100, 4000))
    for _ in range(10):
        idle.ask()
    idle.fleet.release(other)
    assert idle.step()[0] < 0.5


def test_what_was_seen_gives_way_when_the_counters_measure_something_else() -> None:
    """It was quick with three requests, and then slow with many at once."""
    idle = Idle()
    for _ in range(3):
        idle.ask()
    slow = TRUTH.slowed(20.0)
    page = state(1, A100, idle.clock, measured=True, steps=100.0, **idle.counted)
    idle.fleet.put(structs.replace(page, learned=slow))
    assert idle.step() == pytest.approx((20.0, 20.0), rel=0.05)


def test_the_first_requests_of_a_server_that_warms_up_tell_nothing() -> None:
    """Seen on a GPU: kernels are compiled while the first ones wait, for seconds."""
    idle = Idle()
    believed = idle.step()
    for _ in range(5):
        ticket = idle.fleet.dispatch(replica(1), chat(40, 1))
        idle.clock.advance(2.0)
        before = idle.fleet.release(ticket).alone
        assert before is not None
        idle.fleet.lone.served(replica(1), before, Served(40, 1, 2.0, 2.0))
        idle.counted["first_tokens"] += 1
        idle.counted["prompt_tokens"] += 40
        idle.fleet.put(
            state(1, A100, idle.clock, **idle.counted, steps=idle.counted["first_tokens"])
        )
    assert idle.step() == pytest.approx(believed)


def test_one_that_another_was_moved_to_is_not_alone() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A100, A100)
    first, second = (fleet.dispatch(replica(number), chat(100, 20)) for number in (1, 2))
    fleet.move(second, replica(1))
    assert fleet.release(first).alone is None
    assert fleet.release(second).alone is None


def test_a_stream_is_worth_reading_while_it_is_alone_on_a_replica_of_unknown_speed() -> None:
    idle = Idle()
    first = idle.fleet.dispatch(replica(1), chat(100, 100))
    assert idle.fleet.teaches(first)
    second = idle.fleet.dispatch(replica(1), chat(100, 100))
    assert not idle.fleet.teaches(first)
    idle.fleet.release(first)
    idle.fleet.release(second)
    for _ in range(10):
        idle.ask()
    assert not idle.fleet.teaches(idle.fleet.dispatch(replica(1), chat(100, 100)))


def test_nothing_is_learned_from_a_process_that_is_another_one_since() -> None:
    idle = Idle()
    idle.ask()
    believed = idle.step()
    ticket = idle.fleet.dispatch(replica(1), chat(1000, 20))
    idle.clock.advance(60.0)
    before = idle.fleet.release(ticket).alone
    assert before is not None
    idle.fleet.lone.served(replica(1), before, Served(1000, 20, 60.0, 30.0))
    idle.counted, idle.served = dict.fromkeys(idle.counted, 0.0), 0
    idle.clock.advance(1.0)
    idle.poll()
    assert idle.step()[0] == pytest.approx(believed[0], rel=0.2)


TAUGHT = PROFILES[A100].step.slowed(3)
"""What a poller makes of short requests: their time is right, the profile's proportions stay."""
DEAR_PROMPTS = StepModel(0.014, 750e-6, TAUGHT.c_batch, TAUGHT.c_kv)


class Taught:
    """Alone in its fleet; its counters taught something, and it serves one request at a time."""

    def __init__(self, truth: StepModel) -> None:
        self._truth = truth
        self._clock = ManualClock()
        self._first_tokens = self._prompt_tokens = 0
        self.fleet: Fleet = fleet_of(self._clock)
        self._polled()

    def serve(self, prompt: int, tokens: int, slower: float = 1.0) -> None:
        """A request whose response is read, and a poll."""
        ticket = self.fleet.dispatch(replica(1), chat(prompt, tokens))
        ttft = self._truth.frontend + self._truth.step_time(prompt, 0, 0)
        seconds = ttft + (tokens - 1) * self._truth.step_time(0, 1, prompt + tokens / 2)
        ttft, seconds = slower * ttft, slower * seconds
        self._clock.advance(seconds)
        before = self.fleet.release(ticket).alone
        assert before is not None
        self.fleet.lone.served(replica(1), before, Served(prompt, tokens, seconds, ttft))
        self._first_tokens += 1
        self._prompt_tokens += prompt
        self._clock.advance(0.2)
        self._polled()

    def rest(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self._polled()

    def work(self, seconds: float) -> None:
        """It has several requests at once."""
        for number in range(round(seconds / 0.2)):
            self._clock.advance(0.2)
            self._polled(running=8, kv_usage=0.1 + 0.1 * (number % 2))

    def _polled(self, running: int = 0, kv_usage: float = 0.0) -> None:
        polled = state(
            1,
            A100,
            self._clock,
            running=running,
            kv_usage=kv_usage,
            measured=True,
            first_tokens=self._first_tokens,
            prompt_tokens=self._prompt_tokens,
        )
        self.fleet.put(structs.replace(polled, learned=TAUGHT))


def test_lone_requests_tell_prompts_from_steps_where_counters_do_not() -> None:
    server, random = Taught(DEAR_PROMPTS), Random(1)
    for _ in range(30):
        server.serve(random.randint(20, 400), random.randint(3, 30))
        server.rest(10.0)
    costs = server.fleet.view(MODEL)
    assert costs.c0[0] == pytest.approx(DEAR_PROMPTS.c0, rel=0.1)
    assert costs.c_prefill[0] == pytest.approx(DEAR_PROMPTS.c_prefill, rel=0.15)
    # Of a single sequence's part nothing is seen: it stays as it was.
    assert costs.c_batch[0] == pytest.approx(TAUGHT.c_batch, rel=0.3)


def test_counters_of_a_replica_at_work_prevail_over_lone_requests() -> None:
    """Those were slow by an accident, and there are no others that could say so."""
    server = Taught(TAUGHT)
    for slower in (1.0,) * 5 + (20.0,) * 3:
        server.serve(100, 20, slower)
    assert server.fleet.view(MODEL).c0[0] > 3.0 * TAUGHT.c0
    server.work(5.0)
    costs = server.fleet.view(MODEL)
    assert costs.c0[0] == pytest.approx(TAUGHT.c0, rel=0.2)
    assert costs.c_prefill[0] == pytest.approx(TAUGHT.c_prefill, rel=0.1)


def test_the_way_to_the_engine_is_in_the_first_token_and_not_in_those_that_follow() -> None:
    truth = replace(DEAR_PROMPTS, frontend=0.016)
    server, random = Taught(truth), Random(1)
    for _ in range(30):
        server.serve(random.randint(20, 400), random.randint(3, 30))
        server.rest(1.0)
    decision = Router(server.fleet, "completion", random).decide(chat(30, 20))
    assert decision is not None
    ttft = truth.frontend + truth.step_time(30, 0, 0)
    assert decision.predicted_ttft == pytest.approx(ttft, rel=0.15)
    decode = 19 * truth.step_time(0, 1, 40)
    assert decision.predicted_completion == pytest.approx(ttft + decode, rel=0.08)


def test_a_lone_stream_is_read_until_enough_was_seen_whatever_counters_taught() -> None:
    server = Taught(DEAR_PROMPTS)
    fleet = server.fleet
    ticket = fleet.dispatch(replica(1), chat(100, 10))
    assert fleet.teaches(ticket)
    other = fleet.dispatch(replica(1), chat(100, 10))
    assert not fleet.teaches(ticket)
    fleet.release(ticket)
    fleet.release(other)
    server.rest(1.0)
    for _ in range(10):
        server.serve(100, 20)
    assert not fleet.teaches(fleet.dispatch(replica(1), chat(100, 10)))
