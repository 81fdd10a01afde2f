"""Times a routing decision for fleets of several sizes, and the parsing of a request before the
decision.

    python -m benchmarks.decision --json decision.json

A decision turns a request's profile into a ``Decision``: it updates the fleet, predicts the request
on each replica, and chooses. Further columns time the request's entry and release in the ledger,
and the poll of a replica. Learning from answers is not timed. A second table has the time from the
body of a chat to its profile, and the part of it that computes prefix keys. A third table has the
time of the arrival and of the end of a request, by the number of queued requests. With LoRA
adapters, the adapter of each request is drawn at random.
"""

import gc
import json
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from itertools import cycle, product
from random import Random
from statistics import median, quantiles
from time import perf_counter
from timeit import repeat
from typing import Any

from benchmarks import arguments
from extproc.config import HoldSettings, RequestSettings
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.lab.replay.routers import VirtualClock
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState
from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.prefix import prefix_of
from extproc.request.profile import RequestProfile
from extproc.request.prompt import read
from extproc.request.tokens import TokenCounter
from extproc.route.decision import Decision
from extproc.route.queue import Queue
from extproc.route.router import Router
from extproc.route.waiting import Waiting

POLICIES = ("completion", "least_request")
REPLICAS = (8, 100, 1000)
_IN_FLIGHT = 30  # requests per replica
_ADAPTERS = 500
_MAX_LORAS = 8  # adapters in a batch
LOADED = ((100, 30), (100, 50))  # (replicas, requests per replica) of lines with adapters
_RATE = 300.0  # requests per second, for any size of the fleet
_POLL_INTERVAL = 0.2  # seconds between two polls of a replica
_MODEL = "model"
_PROMPT_TOKENS = 300.0  # median; log-normal, like the lengths of answers
_SHARED_PROMPTS = 8  # system prompts; each prompt begins with a system prompt
_SHARED_TOKENS = 200
_BYTES_PER_TOKEN = 4
_OUTPUT_TOKENS = 200.0
_BOUNDS = (256, 512, 1024, 2048, None)
_HARDWARE = "llama-8b-h100"
_STEP = 0.01  # seconds of a step, on every replica
_KV_USAGE = 0.02
_FULL = 1.0
_CHATS = (1_000, 10_000, 100_000)  # bytes of text
_MESSAGES = 4
_REPEATS = 20
QUEUED = (10, 1_000, 10_000)
TENANTS = (1, 1_000)
_QUEUE_REPLICAS = 8
_KV_TOKENS = 42_000
_LARGE = 24_000  # prompt tokens: two such requests do not fit into one KV cache


Line = dict[str, Any]  # settings and times of a line of the output; times end in ``_us``


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("decision", __doc__)
    parser.add_argument("--decisions", type=int, default=3000, help="decisions timed for each line")
    arguments.add_json(parser)
    args = parser.parse_args(argv)
    print(
        f"{'policy':<14}{'replicas':>9}{'':<6}{'in flight':>10}{'adapters':>10}"
        f"{'decision':>12}{'p99':>12}{'its ledger':>12}{'a poll':>12}"
    )
    fleets = [(policy, size, False, 0, _IN_FLIGHT) for policy in POLICIES for size in REPLICAS]
    fleets += [("completion", size, True, 0, _IN_FLIGHT) for size in REPLICAS]
    fleets += [
        ("completion", size, False, adapters, in_flight)
        for size, in_flight in LOADED
        for adapters in (0, _ADAPTERS)
    ]
    runs = []
    for policy, replicas, full, adapters, in_flight in fleets:
        run = measure(policy, replicas, args.decisions, full, adapters, in_flight)
        line = f"{policy:<14}{replicas:>9}{' full' if full else '':<6}"
        print(f"{line}{run['in_flight']:>10}{adapters:>10}{_times(run)}", flush=True)
        runs.append(run)
    times = max(args.decisions // _REPEATS, 1)
    print(f"{'a chat of':<14}{'profile':>12}{'its keys':>12}")
    chats = []
    for text_bytes in _CHATS:
        chats.append(measure_chat(text_bytes, times))
        print(f"{text_bytes // 1000:>7} kB    {_times(chats[-1])}")
    print(f"{'queued':<14}{'tenants':>9}{'':<6}{'an arrival':>12}{'an end':>12}")
    queues = []
    for tenants, queued in product(TENANTS, QUEUED):
        queues.append(measure_queue(queued, tenants, times))
        print(f"{queued:<14}{tenants:>9}{'':<6}{_times(queues[-1])}", flush=True)
    arguments.keep(args, {"runs": runs, "chats": chats, "queues": queues})
    return 0


def _times(line: Line) -> str:
    return "".join(f"{us:>9.1f} µs" for name, us in line.items() if name.endswith("_us"))


def measure(
    policy: str,
    replicas: int,
    decisions: int,
    full: bool = False,
    adapters: int = 0,
    in_flight: int = _IN_FLIGHT,
) -> Line:
    """Times ``decisions`` decisions, after a tenth of that number as a warm-up.

    ``full``: no KV cache has room for another prompt. ``adapters``: number of LoRA adapters.
    """
    load = SteadyRouter(policy, replicas, _FULL if full else _KV_USAGE, adapters, in_flight)
    for _ in range(decisions // 10):
        load.step()
    for seconds in (load.decisions, load.ledger, load.polls):
        seconds.clear()
    gc.collect()
    gc.freeze()
    for _ in range(decisions):
        load.step()
    gc.unfreeze()
    return {
        "policy": policy,
        "replicas": replicas,
        "full": full,
        "adapters": adapters,
        "in_flight": replicas * in_flight,
        "median_us": median(load.decisions) * 1e6,
        "p99_us": quantiles(load.decisions, n=100)[-1] * 1e6,
        "ledger_us": median(load.ledger) * 1e6,  # entry and release of a request together
        "poll_us": median(load.polls) * 1e6,
    }


def measure_chat(text_bytes: int, times: int) -> Line:
    """Times the parsing of a chat of a few messages. Of several repeats the shortest counts, as
    ``timeit`` advises."""
    text = ("some words " * text_bytes)[: text_bytes // _MESSAGES]
    roles = ("user", "assistant") * (_MESSAGES // 2)
    messages = [{"role": role, "content": text} for role in roles]
    fields: dict[str, object] = {"model": _MODEL, "messages": messages}
    body, settings = json.dumps(fields).encode(), RequestSettings()
    counter = TokenCounter(settings.bytes_per_token, settings.image_tokens, settings.tokenizers)
    [(prompt, _)] = read(Endpoint.CHAT, fields).pieces
    tokens = prompt.count(counter, _MODEL)
    profile = repeat(lambda: inspect(Endpoint.CHAT, body, counter), repeat=_REPEATS, number=times)
    prefix = repeat(lambda: prompt.prefix(tokens, 0), repeat=_REPEATS, number=times)
    per_chat_us = 1e6 / times
    return {
        "text_bytes": text_bytes,
        "profile_us": min(profile) * per_chat_us,
        "prefix_us": min(prefix) * per_chat_us,
    }


def measure_queue(queued: int, tenants: int, times: int) -> Line:
    """Times arrivals and ends of requests in alternation, so that the number of queued requests
    stays the same.

    An arrival is the decision of a request that must wait, and its entry into the queue. An end is
    the release of a request, and the decision and dispatch of a queued request.
    """
    queue = _FullRouter(tenants)
    while len(queue) < queued:
        queue.arrive()
    arrivals, ends = [], []
    gc.collect()
    gc.freeze()
    for _ in range(times):
        start = perf_counter()
        queue.arrive()
        arrived = perf_counter()
        queue.end()
        arrivals.append(arrived - start)
        ends.append(perf_counter() - arrived)
    gc.unfreeze()
    medians_us = {"arrival_us": median(arrivals) * 1e6, "end_us": median(ends) * 1e6}
    return {"queued": queued, "tenants": tenants, **medians_us}


class _FullRouter:
    """Router with a queue, in front of full replicas."""

    def __init__(self, tenants: int) -> None:
        self._tenants = cycle(map(str, range(tenants)))
        self._clock = VirtualClock()
        self._fleet = Fleet(OutputLengths(), self._clock)
        self._queue = Queue(self._fleet, HoldSettings(most=2 * max(QUEUED)))
        self._router = Router(self._fleet, "completion", Random(0), backlog=self._queue.backlog)
        self._sent: deque[tuple[str, Ticket]] = deque()
        for number in range(_QUEUE_REPLICAS):
            self._fleet.put(
                ReplicaState(
                    id=f"10.0.0.{number}:8000",
                    profile=_HARDWARE,
                    measured=True,
                    models=(_MODEL,),
                    max_model_len=_KV_TOKENS,
                    running=1,
                    kv_tokens=_KV_TOKENS,
                )
            )

    def __len__(self) -> int:
        return len(self._queue)

    def arrive(self) -> None:
        profile = RequestProfile(
            *(Endpoint.CHAT, _MODEL, _LARGE, _LARGE * _BYTES_PER_TOKEN, 100),
            tenant=next(self._tenants),
        )
        self._clock.time += 1e-6
        decision = self._router.decide(profile)
        assert decision is not None
        if not self._queue.admit(decision):
            decide = partial(self._router.decide, profile)
            since = self._clock()
            waits = Waiting(profile, decision, since, lambda place: decide(place=place), self._send)
            self._queue.enter(waits)
        else:
            self._send(decision)

    def end(self) -> None:
        replica, ticket = self._sent.popleft()
        self._fleet.release(ticket)
        self._queue.request_ended(replica)

    def _send(self, decision: Decision | Exception | None) -> None:
        if not isinstance(decision, Decision):
            raise TypeError(f"not dispatched: {decision}")
        ticket = self._fleet.dispatch(decision.replica, decision.profile)
        self._sent.append((decision.replica, ticket))


class SteadyRouter:
    """Router under a virtual clock and constant load: after each arrival another request ends."""

    def __init__(
        self, policy: str, replicas: int, kv_usage: float, adapters: int, in_flight: int
    ) -> None:
        self.decisions: list[float] = []  # seconds
        self.ledger: list[float] = []  # seconds, for the entry and the release of a request
        self.polls: list[float] = []  # seconds
        self._kv_usage = kv_usage
        self._random = Random(0)
        self._clock = VirtualClock()
        self._fleet = Fleet(OutputLengths(), self._clock)
        self._router = Router(self._fleet, policy, self._random)
        size = _SHARED_TOKENS * _BYTES_PER_TOKEN
        self._shared = [self._random.randbytes(size) for _ in range(_SHARED_PROMPTS)]
        self._adapters = tuple(f"adapter-{number}" for number in range(adapters))
        self._served = (_MODEL, *self._adapters)  # one object for all states, as from Redis
        names = [f"10.0.{number >> 8}.{number & 255}:8000" for number in range(replicas)]
        self._models: dict[str, Counter[str]] = {name: Counter() for name in names}
        for name in names:
            self._fleet.put(self._state(name))
        self._to_poll = cycle(names)
        self._polled_at = 0.0
        self._pause = _POLL_INTERVAL / replicas
        self._in_flight: list[tuple[Ticket, str, str]] = []
        for name in (name for name in names for _ in range(in_flight)):
            self._wait()
            request = self._request()
            self._enter(self._fleet.dispatch(name, request), name, request.model)

    def step(self) -> None:
        self._wait()
        request = self._request()
        start = perf_counter()
        decision = self._router.decide(request)
        assert decision is not None
        decided = perf_counter()
        ticket = self._fleet.dispatch(decision.replica, request, decision.cached)
        entered = perf_counter()
        self.decisions.append(decided - start)
        self._enter(ticket, decision.replica, request.model)
        self._wait()
        at = self._random.randrange(len(self._in_flight))
        ended, replica, model = self._in_flight.pop(at)
        self._models[replica] -= Counter((model,))
        start = perf_counter()
        self._fleet.release(ended)
        self.ledger.append(perf_counter() - start + entered - decided)
        tokens = int(self._random.lognormvariate(0.0, 1.0) * _OUTPUT_TOKENS) + 1
        self._fleet.lengths.observe(request, min(tokens, request.output_bound or tokens))

    def _enter(self, ticket: Ticket, replica: str, model: str) -> None:
        self._in_flight.append((ticket, replica, model))
        self._models[replica][model] += 1

    def _wait(self) -> None:
        """Advances the clock by half the time between two requests, drawn at random, and makes the
        polls that are due."""
        until = self._clock.time + self._random.expovariate(2 * _RATE)
        while self._polled_at + self._pause <= until:
            self._polled_at = self._clock.time = self._polled_at + self._pause
            state = self._state(next(self._to_poll))
            start = perf_counter()
            self._fleet.put(state)
            self.polls.append(perf_counter() - start)
        self._clock.time = until

    def _request(self) -> RequestProfile:
        prompt = int(self._random.lognormvariate(0.0, 1.0) * _PROMPT_TOKENS)
        bound = self._random.choice(_BOUNDS)
        stream = self._random.random() < 0.5
        size, shared = prompt * _BYTES_PER_TOKEN, self._random.choice(self._shared)
        text = (shared + self._random.randbytes(max(size - len(shared), 0)))[:size]
        return RequestProfile(
            Endpoint.CHAT,
            self._random.choice(self._adapters) if self._adapters else _MODEL,
            *(prompt, size, bound),
            stream=stream,
            prefix=prefix_of(text, prompt, 0),
        )

    def _state(self, name: str) -> ReplicaState:
        now, in_use = self._clock(), tuple(self._models[name])[:_MAX_LORAS]
        return ReplicaState(
            id=name,
            profile=_HARDWARE,
            models=self._served,
            adapters=self._adapters,
            max_loras=_MAX_LORAS,
            adapters_in_use=in_use if self._adapters else (),
            max_model_len=16_384,
            running=self._fleet.in_flight_on(name),
            kv_usage=self._kv_usage,
            steps=now / _STEP,
            scraped_at=now,
        )


if __name__ == "__main__":
    raise SystemExit(main())
