"""LoRA adapters: requests prefer replicas that have them loaded; loads and waits are predicted."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
from msgspec import structs

from extproc.fleet.adapters import LOAD_S
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.fleet.members import ModelNames
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.router import Router
from tests.fakes import A10, MODEL, ManualClock, chat, decided, replica, state
from tests.large import bytecodes

ADAPTERS = ("a", "b", "c")
SHORT = 5  # tokens of an answer so short that a load exceeds the band of equal scores


class AdapterFleet:
    """Replicas that serve three adapters, and their router."""

    def __init__(self, replicas: int, max_loras: int, adapters: tuple[str, ...] = ADAPTERS) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet(OutputLengths(), self.clock)
        self.max_loras, self.adapters = max_loras, adapters
        for number in range(1, replicas + 1):
            self.poll(number)
        self.router = Router(self.fleet, "completion", random.Random(1))

    def poll(self, number: int, *in_use: str, **figures: float | tuple[object, ...]) -> None:
        self.fleet.put(self.state(number, *in_use, **figures))

    def state(
        self, number: int, *in_use: str, **figures: float | tuple[object, ...]
    ) -> ReplicaState:
        return state(
            number,
            A10,
            self.clock,
            models=(MODEL, *self.adapters),
            adapters=self.adapters,
            max_loras=self.max_loras,
            adapters_in_use=in_use,
            **figures,
        )

    def decide(self, model: str, tokens: int = 50) -> Decision:
        return decided(self.router, request(model, tokens))

    def send(self, model: str, number: int, tokens: int = 50) -> Ticket:
        return self.fleet.dispatch(replica(number), request(model, tokens))

    def serve(self, model: str, number: int) -> None:
        ticket = self.send(model, number)
        self.clock.advance(2.0)
        self.fleet.release(ticket)

    def extra(self, model: str) -> float:
        """Return the seconds that the adapter adds to the first token on the first replica."""
        return float(self.decide(model).prediction.adapter[0])


def request(model: str, tokens: int = 50) -> RequestProfile:
    return replace(chat(100, tokens), model=model, least_output=tokens)


def test_unloaded_adapter_delays_the_first_token_by_its_load_time() -> None:
    system = AdapterFleet(1, max_loras=2)
    plain, first = system.decide(MODEL), system.decide("a")
    assert first.predicted_ttft == pytest.approx(plain.predicted_ttft + LOAD_S)
    assert first.predicted_completion == pytest.approx(plain.predicted_completion + LOAD_S)
    assert (plain.forecast().adapter_load, first.forecast().adapter_load) == (0.0, LOAD_S)
    system.serve("a", 1)
    assert system.decide("a").predicted_ttft == pytest.approx(plain.predicted_ttft)


def test_max_loras_adapters_stay_loaded() -> None:
    system = AdapterFleet(1, max_loras=2)
    for model in ("a", "b", "a"):
        system.serve(model, 1)
    assert [system.extra(model) for model in ADAPTERS] == [0.0, 0.0, LOAD_S]
    system.serve("c", 1)
    assert [system.extra(model) for model in ADAPTERS] == [0.0, LOAD_S, 0.0]


def test_adapter_is_loaded_under_the_name_of_each_replica() -> None:
    clock = ManualClock()
    names = ModelNames({"sql": ("sql-1", "sql-2"), "latest": ("sql-2",)})
    fleet = Fleet(OutputLengths(), clock, names=names)
    for number in (1, 2):
        name = f"sql-{number}"
        served = {"models": (MODEL, name), "adapters": (name,)}
        fleet.put(state(number, A10, clock, max_loras=1, **served))
    router = Router(fleet, "completion", random.Random(1))

    def loads(model: str) -> list[float]:
        return list(map(float, decided(router, request(model)).prediction.adapter))

    assert loads("sql") == [LOAD_S, LOAD_S]
    fleet.release(fleet.dispatch(replica(2), request("sql")))
    assert (loads("sql"), loads("latest"), loads("sql-1")) == ([LOAD_S, 0.0], [0.0], [LOAD_S])


def test_restarted_replica_has_no_adapter_loaded() -> None:
    system = AdapterFleet(1, max_loras=2)
    system.poll(1, steps=100.0)
    system.serve("a", 1)
    assert system.extra("a") == 0.0
    system.poll(1, steps=3.0)
    assert system.extra("a") == LOAD_S


def test_no_adapter_time_until_a_restarted_replica_reports_adapters() -> None:
    system = AdapterFleet(1, max_loras=1)
    system.poll(1, "b", steps=100.0, running=1)
    assert system.extra("a") > LOAD_S
    system.max_loras = 0
    system.poll(1, steps=0.0)
    assert system.extra("a") == 0.0


def test_page_without_adapters_leaves_their_slots() -> None:
    system = AdapterFleet(1, max_loras=1)
    tickets = [system.send(model, 1) for model in ("a", "b")]
    system.max_loras = 0
    system.poll(1)
    for ticket in tickets:
        system.fleet.release(ticket)
    assert [system.extra(model) for model in ("a", "b")] == [LOAD_S, 0.0]


def test_adapter_used_by_other_clients_is_loaded() -> None:
    system = AdapterFleet(1, max_loras=2)
    system.poll(1, "b")
    assert [system.extra(model) for model in ("a", "b")] == [LOAD_S, 0.0]


def test_no_adapter_time_without_reported_adapters() -> None:
    system = AdapterFleet(2, max_loras=0)
    system.serve("b", 1)
    assert system.decide("a").prediction.adapter.tolist() == [0.0, 0.0]
    assert system.decide(MODEL).prediction.adapter.tolist() == [0.0, 0.0]


def test_adapter_waits_until_the_first_adapter_leaves_a_full_batch() -> None:
    system = AdapterFleet(1, max_loras=2)
    for model, tokens in (("a", 800), ("a", 100), ("b", 300), (MODEL, 2000)):
        system.send(model, 1, tokens)
    system.clock.advance(2.0)
    step = system.decide(MODEL).situation.view.decode_step.item(0)
    assert system.extra("a") == system.extra("b") == system.extra(MODEL) == 0.0
    wait = system.extra("c") - LOAD_S
    left = 300 - 2.0 / step
    assert wait == pytest.approx(left * step, rel=0.15)


def test_poll_of_a_slow_replica_extends_the_wait_for_an_adapter_slot() -> None:
    system = AdapterFleet(1, max_loras=1)
    system.fleet.first_token(system.send("a", 1, 1000))
    system.clock.advance(10.0)
    system.poll(1, "a", running=1, steps=100.0)
    step = system.decide(MODEL).situation.view.decode_step.item(0)
    assert system.extra("b") - LOAD_S == pytest.approx(900 * step, rel=0.02)


def test_adapters_that_wait_already_precede_a_new_adapter() -> None:
    system = AdapterFleet(1, max_loras=1)
    for model, tokens in (("a", 300), ("b", 200)):
        system.send(model, 1, tokens)
    behind_a, behind_both = system.extra("b"), system.extra("c")
    step = system.decide(MODEL).situation.view.decode_step.item(0)
    assert behind_both - behind_a == pytest.approx(200 * step + LOAD_S, rel=0.1)
    assert system.extra("a") == 0.0, "vLLM lets it pass"


def test_poll_decides_which_of_two_adapters_came_first() -> None:
    system = AdapterFleet(1, max_loras=1)
    system.clock.advance(0.1)
    for model in ("a", "b"):
        system.send(model, 1, 200)
    assert system.extra("a") == 0.0 < system.extra("b")
    system.clock.advance(0.2)
    system.poll(1, "b", running=1, waiting=1)
    assert system.extra("a") == 0.0, "the poll may have seen a request that has ended since"
    system.clock.advance(0.2)
    system.poll(1, "b", running=1, waiting=1)
    assert system.extra("b") == 0.0 < system.extra("a")


def test_adapter_of_other_clients_blocks_until_a_poll_no_longer_sees_it() -> None:
    system = AdapterFleet(1, max_loras=1)
    system.poll(1, "b", running=1)
    assert system.extra("a") > LOAD_S
    system.poll(1)
    assert system.extra("a") == LOAD_S


def test_routers_own_last_request_does_not_count_as_of_other_clients() -> None:
    system = AdapterFleet(1, max_loras=1)
    ticket = system.send("b", 1)
    system.clock.advance(1.0)
    seen = system.state(1, "b", running=1)
    system.fleet.release(ticket)
    system.clock.advance(0.05)
    system.fleet.put(seen)
    assert system.extra("a") == LOAD_S, "the poll was on its way when the request ended"
    system.clock.advance(0.2)
    system.poll(1, "b", running=1)
    assert system.extra("a") > LOAD_S, "a request of another router"


def test_load_time_is_learned_from_first_tokens() -> None:
    system = AdapterFleet(1, max_loras=1)
    for _ in range(4):
        for model in ("a", "b"):
            decision = system.decide(model)
            ticket = system.fleet.dispatch(decision.replica, decision.profile)
            ttft = decision.predicted_ttft - decision.forecast().adapter_load + 0.7
            system.clock.advance(ttft + 1.0)
            system.fleet.release(ticket)
            system.router.learn_first_token(decision.forecast(), decision.replica, ttft)
    assert system.extra("a") == pytest.approx(0.7)


def test_adapters_stay_with_their_replicas_and_plain_requests_spread() -> None:
    system = AdapterFleet(2, max_loras=1)
    chosen: dict[str, Counter[str]] = {"a": Counter(), "b": Counter(), MODEL: Counter()}
    for _ in range(20):
        for model in chosen:
            decision = system.decide(model, SHORT)
            chosen[model][decision.replica] += 1
            ticket = system.fleet.dispatch(decision.replica, decision.profile)
            system.clock.advance(0.3)
            system.fleet.release(ticket)
    assert len(chosen["a"]) == len(chosen["b"]) == 1
    assert chosen["a"].keys() != chosen["b"].keys()
    assert len(chosen[MODEL]) == 2


def test_replica_whose_adapter_would_be_evicted_is_avoided() -> None:
    system = AdapterFleet(2, max_loras=1)
    system.serve("b", 1)
    system.clock.advance(10.0)
    decision = system.decide("a", SHORT)
    assert decision.replica == replica(2)
    first, second = decision.prediction.avoidable
    assert first - second == pytest.approx(LOAD_S * 0.85, rel=0.01), "exp(−10 s ÷ 60 s)"


def test_retry_moves_the_adapter_to_the_other_replica() -> None:
    system = AdapterFleet(2, max_loras=1)
    ticket = system.send("a", 1, 400)
    system.fleet.move(ticket, replica(2))
    here, there = system.decide("b").prediction.adapter
    assert here == LOAD_S
    assert there > LOAD_S
    system.fleet.release(ticket)
    assert system.decide("b").prediction.adapter[1] == LOAD_S


def test_reason_names_the_wait_for_an_adapter() -> None:
    system = AdapterFleet(2, max_loras=1)
    system.serve("a", 1)
    assert "there its adapter takes 0.10 s more" in system.decide("a", SHORT).why
    system.send("a", 1, 400)
    assert "there its adapter takes" in system.decide("b").why


def test_number_of_tracked_adapters_is_bounded() -> None:
    system = AdapterFleet(1, max_loras=5_000)
    names = tuple(f"adapter-{number}" for number in range(5_000))
    many = {"models": (MODEL, *names), "adapters": names, "adapters_in_use": names}
    system.fleet.put(structs.replace(system.state(1), **many))
    assert system.extra(names[0]) == 0.0
    assert system.extra(names[255]) == 0.0
    assert system.extra(names[256]) > 0.0


@pytest.mark.parametrize("in_flight", [30, 50])
def test_decision_for_one_of_500_adapters_costs_as_much_as_for_the_base_model(
    in_flight: int,
) -> None:
    system = AdapterFleet(100, max_loras=8, adapters=tuple(f"adapter-{n}" for n in range(500)))
    names = cycle(system.adapters)
    for number in range(1, 101):
        for _ in range(in_flight):
            system.send(next(names), number)
    spent = {model: [0, 0] for model in (MODEL, "adapter-7", "adapter-8")}
    for again in (0, 1):  # the first decision for a model finds its candidates
        for model in spent:
            spent[model][again] = bytecodes(partial(system.decide, model))
    plain, *adapters = (second for _, second in spent.values())
    assert sum(adapters) <= 1.2 * 2 * plain


def test_adapter_that_no_replica_lists_is_forgotten() -> None:
    system = AdapterFleet(2, max_loras=2)
    for number in (1, 2):
        assert system.decide("c").situation.adapter is not None
        fewer = {"models": (MODEL, "a", "b"), "adapters": ("a", "b")}
        system.fleet.put(structs.replace(system.state(number), **fewer))
    assert system.decide("c").situation.adapter is None
    assert system.decide("a").situation.adapter is not None
