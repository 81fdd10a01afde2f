"""A poller's states follow what a replica answers, through restarts and outages."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import pytest
import zmq.asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.ground.clock import monotonic
from extproc.ground.runtime import started
from extproc.poll.destination import Destination
from extproc.poll.discovery import Target
from extproc.poll.into_redis import run_poller
from extproc.poll.metrics_text import PageFigures, ScrapeError, read_metrics
from extproc.poll.replica import PollContext, PolledReplica
from extproc.poll.scrape import PollMetrics
from extproc.predict.step import PROFILES
from extproc.replica_state import ReplicaState
from extproc.share.assignment import known_pollers
from extproc.share.connection import connect
from extproc.share.drains import DrainStore
from extproc.share.envelope import Skips
from extproc.share.replicas import Put, StateReader, StateWriter
from tests.conftest import Logged, RedisServer, wait_for_redis
from tests.poll.conftest import Watch
from tests.poll.polling import SOON, PolledView, config, metrics_of, poller_of, polling, watching
from tests.poll.replica import (
    FirstAnswer,
    Handler,
    HeldAnswer,
    ScriptedReplica,
    hang,
    late,
    models,
    page,
    serving,
    text,
)
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

MODELS = ("tiny", "adapter")  # listed by the replica


async def test_state_has_every_field_that_a_scrape_reads(
    watch: Watch, replica: ScriptedReplica
) -> None:
    source = {"url": replica.id, "name": "one", "profile": "llama-8b-a10"}
    async with watch(replicas=[source]) as router:
        state = await router.replica(replica, lambda state: state.max_model_len is not None)
        assert state.scrape_seconds > 0
        assert state.scraped_at > 1.7e9
        assert state.learned is not None
        times = {"scraped_at": 0.0, "scrape_seconds": 0.0, "learned": None}
        assert structs.replace(state, **times) == ReplicaState(
            id=replica.id,
            name="one",
            profile="llama-8b-a10",
            models=MODELS,
            adapters=("adapter",),
            listed=True,
            max_model_len=4096,
            takes_priority=True,
            running=2,
            most_running=2,
            waiting=1,
            kv_usage=0.5,
            kv_tokens=1600,
            steps=100,
            life_s=100.0,
        )
        replica.answers["/metrics"] = text(page(running=9, steps=101))
        await router.replica(replica, running=9)


@pytest.mark.parametrize(("blocks", "slower"), [(10_500 // 16, 2.0), (168_000 // 16, 0.5)])
async def test_size_of_kv_cache_tells_speed_of_a_replica_before_its_first_work(
    watch: Watch, replica: ScriptedReplica, blocks: int, slower: float
) -> None:
    """The profile has 42,000 KV tokens."""
    profile, source = "llama-8b-a10", {"url": replica.id, "profile": "llama-8b-a10"}
    replica.answers["/metrics"] = text(page(kv_blocks=blocks))
    async with watch(replicas=[source]) as router:
        state = await router.replica(replica, running=2)
        assert state.learned is not None
        assert state.learned.c0 == pytest.approx(slower * PROFILES[profile].step.c0, rel=0.01)
        assert not state.speeds  # not measured


async def test_learned_batch_limit_outlives_the_poller_and_ends_with_the_engine(
    redis_server: RedisServer,
) -> None:
    def learned(limit: int, steps: int, state: ReplicaState) -> bool:
        return (state.max_num_seqs, state.steps) == (limit, steps)

    async with serving() as replica:
        settings = config(redis_server, replica)
        async with watching(settings) as router:
            await router.replica(replica, partial(learned, 0, 100))
            replica.answers["/metrics"] = text(page(steps=200, generated=200))
            await router.replica(replica, partial(learned, 2, 200))
        replica.answers["/metrics"] = text(page(running=1, waiting=0, steps=300, generated=250))
        async with watching(settings) as router:
            await router.replica(replica, partial(learned, 2, 300))
            replica.answers["/metrics"] = text(page(steps=3))
            await router.replica(replica, partial(learned, 0, 3))


async def test_poller_continues_from_models_listed_before(redis_server: RedisServer) -> None:
    async with serving() as unlisted, serving() as listed:
        unlisted.answers["/v1/models"] = text("", 401)
        listed.answers["/v1/models"] = hang
        settings = config(redis_server, unlisted, listed)
        before = (
            ReplicaState(id=unlisted.id, models=("tiny",)),
            ReplicaState(id=listed.id, models=MODELS, listed=True),
        )
        async with connect(settings.redis, settings.pool) as redis:
            await StateWriter(redis, settings.pool, ttl_s=10).put(before)
        async with watching(settings) as router:
            state = await router.replica(unlisted, running=2)
            assert (state.models, state.listed) == (("tiny",), False)
            state = await router.replica(listed, running=2)
            assert (state.models, state.listed) == (MODELS, True)


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/health", text("", 503), "/health answered 503"),
        ("/metrics", hang, "/metrics did not answer within 2.4 s"),
    ],
)
async def test_failing_replica_becomes_unhealthy_and_recovers(
    watch: Watch, logged: Logged, path: str, answer: Handler, problem: str
) -> None:
    async with serving() as sick, serving() as well:
        async with watch(sick, well, poll=SOON) as router:
            await router.replica(sick, models=MODELS)
            good = sick.answers[path]
            sick.answers[path] = answer
            state = await router.replica(sick, healthy=False)
            assert problem in state.problem
            assert (state.running, state.models) == (2, MODELS)  # last known figures
            assert (await router.replica(well, healthy=True)).problem == ""
            sick.answers[path] = good
            assert (await router.replica(sick, healthy=True)).problem == ""
        (line,) = logged.lines("replica became unhealthy: routers avoid it until a scrape succeeds")
        assert line["replica"] == sick.id
        assert problem in str(line["problem"])
        assert [line["replica"] for line in logged.lines("replica became healthy")].count(
            sick.id
        ) == 2


async def test_late_answers_keep_the_replica_healthy(
    redis_server: RedisServer, replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(redis_server, replica, poll={"timeout_s": 0.5})
    # A busy machine must not exceed the timeout.
    monkeypatch.setattr("extproc.config._TIMEOUTS", 30)
    monkeypatch.setattr("extproc.poll.models.MODELS_EVERY_S", 600.0)
    async with watching(settings) as router:
        await router.replica(replica, models=MODELS)
        for running in (7, 8):
            replica.answers["/metrics"] = late(settings.poll.timeout_s, page(running=running))
            await router.replica(replica, running=running)
        assert all(state.healthy for state in router.history)
        assert all(state.models == MODELS for state in router.history[-2:])
        assert replica.paths.count("/v1/models") == 1
        page_of_poller = await metrics_of(settings)
    assert 'extproc_poll_scrapes_total{result="late"}' in page_of_poller
    assert 'extproc_poll_scrapes_total{result="failed"} 0.0' in page_of_poller


async def test_single_silent_scrape_keeps_the_replica_healthy(
    watch: Watch, replica: ScriptedReplica
) -> None:
    async with watch(replica, poll=SOON) as router:
        await router.replica(replica, models=MODELS)
        for _ in range(2):
            silent = FirstAnswer(hang, text(page(running=7)))
            replica.answers["/metrics"] = silent
            await silent.over.wait()
            await router.replica(replica, running=7)
            replica.answers["/metrics"] = text(page(running=2))
            await router.replica(replica, running=2)
        assert all(state.healthy for state in router.history)


async def test_stall_shorter_than_the_limit_is_not_published(
    replica: ScriptedReplica, router: PolledView, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far above the delays of a busy machine.
    monkeypatch.setattr("extproc.poll.replica.STALL_S", 10.0)
    await router.replica(replica, healthy=True)
    replica.answers |= {"/metrics": late(0.5, page(running=7)), "/health": late(0.5, "")}
    await router.replica(replica, running=7)
    await replica.requested("/health", more=4)
    assert all(state.healthy and not state.unanswered_s for state in router.history)


async def test_refused_connections_end_the_silence_of_a_replica(
    replica: ScriptedReplica, router: PolledView
) -> None:
    await router.replica(replica, healthy=True)
    replica.answers["/health"] = text("", 503)
    assert not (await router.replica(replica, healthy=False)).refuses
    replica.answers |= {"/metrics": hang, "/health": hang}
    await router.replica(replica, lambda state: state.unanswered_s > 0.0)
    await replica.stop()
    state = await router.replica(replica, refuses=True)
    assert (state.healthy, state.unanswered_s) == (False, 0.0)
    replica.answers |= {"/metrics": text(page()), "/health": text("")}
    await replica.start()
    assert not (await router.replica(replica, healthy=True)).refuses


async def test_seconds_without_answer_are_published_while_a_replica_hangs(
    watch: Watch, replica: ScriptedReplica
) -> None:
    async with watch(replica, poll=SOON) as router:
        await router.replica(replica, models=MODELS)
        replica.answers |= {"/metrics": hang, "/health": hang}
        state = await router.replica(replica, lambda state: state.unanswered_s > 0.2)
        assert (state.healthy, state.running) == (True, 2)  # last known figures
        hung = await router.replica(replica, healthy=False)
        assert hung.problem == (
            "hangs: accepts connections, but answers neither /metrics nor /health"
        )
        await router.replica(replica, lambda state: state.unanswered_s > hung.unanswered_s)
        replica.answers |= {"/metrics": text(page(running=7)), "/health": text("")}
        state = await router.replica(replica, running=7)
        assert (state.healthy, state.unanswered_s) == (True, 0.0)


@pytest.mark.parametrize("late", ["/metrics", "/health"])
async def test_replica_that_answers_metrics_or_health_is_not_silent(
    replica: ScriptedReplica, router: PolledView, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    # Longer than an answer takes on a busy machine.
    monkeypatch.setattr("extproc.poll.replica.SILENCE_STEP_S", 0.5)
    await router.replica(replica, healthy=True)
    replica.answers[late] = hang
    await replica.requested("/health", more=3)
    assert not any(state.unanswered_s for state in router.history)


async def test_unexpected_error_makes_only_its_replica_unhealthy(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as odd, serving() as well:

        def read(page: bytes) -> PageFigures:
            figures = read_metrics(page)
            return figures if figures.running != 13 else structs.replace(figures, kv_usage=inf)

        monkeypatch.setattr("extproc.poll.scrape.read_metrics", read)
        async with watch(odd, well) as router:
            await router.until(lambda states: len(states) == 2)
            odd.answers["/metrics"] = text(page(running=13))
            state = await router.replica(odd, healthy=False)
            assert "led to an error: ValidationError" in state.problem
            await odd.requested("/metrics", more=5)
            well.answers["/metrics"] = text(page(running=7))
            await router.replica(well, running=7)
            odd.answers["/metrics"] = text(page(running=8))
            state = await router.replica(odd, healthy=True)
            assert (state.running, state.problem) == (8, "")
    (line,) = [line for line in caplog.records if line.levelname == "ERROR"]
    assert line.exc_info
    assert vars(line)["replica"] == odd.id


async def test_replica_that_left_publishes_no_answer_that_comes_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def scrape(*_: object) -> PageFigures:
        asked.set()
        await answer
        return read_metrics(page().encode())

    monkeypatch.setattr("extproc.poll.replica.scrape", scrape)
    target, states = Target("127.0.0.1:8000", "one", "llama-8b-a10"), list[ReplicaState]()
    into = Destination()
    monkeypatch.setattr(into, "put", states.append)
    async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as session:
        metrics = PollMetrics(CollectorRegistry())
        context = PollContext(
            Config(), into, metrics, Random(1), tasks, session, zmq.asyncio.Context.instance()
        )
        replica = PolledReplica(target, None, context)
        await asked.wait()
        answer.set_result(None)
        replica.stop()
    assert not states


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses of the host ``vllm``: each answer names one of them, in turn."""
    answer, addresses, turns = socket.getaddrinfo, ["127.0.0.1"], count()

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host == "vllm":
            host = addresses[next(turns) % len(addresses)]
        return answer(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return addresses


async def test_replica_that_dns_names_at_times_stays_while_it_answers(
    watch: Watch, replica: ScriptedReplica, dns: list[str]
) -> None:
    dns.append("127.0.0.2")
    other = f"127.0.0.2:{replica.port}"  # no process listens
    async with watch(replicas=[{"dns": f"vllm:{replica.port}"}]) as router:
        await router.until(lambda _: router.removed.count(other) == 2)
        assert {*router.removed} == {other}
        await replica.stop()
        await router.until(lambda _: replica.id in router.removed)


async def test_replica_that_hangs_and_that_dns_drops_stays_until_routers_end_its_requests(
    redis_server: RedisServer,
    replica: ScriptedReplica,
    dns: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.poll.poller.STALE_AFTER_S", 0.5)
    sources, hung_s = [{"dns": f"vllm:{replica.port}"}], 4.0
    settings = config(
        redis_server, replicas=sources, poll={"timeout_s": 0.5}, serve={"hung_s": hung_s}
    )
    async with watching(settings) as router:
        await router.replica(replica, healthy=True)
        replica.answers |= {"/metrics": hang, "/health": hang}
        dns[:] = ["127.0.0.2"]
        await router.replica(replica, lambda state: state.unanswered_s > hung_s)
        await router.until(lambda _: replica.id in router.removed)


class Phase(NamedTuple):
    """Answers of a replica, and fields of the first state that results."""

    answers: Mapping[str, Handler]
    awaited: Mapping[str, object]
    others: Mapping[str, object] = {}


KNOWN = Phase({}, {"models": MODELS, "max_model_len": 4096})
LARGE = {"/v1/models": models("large", max_model_len=131_072)}
OTHER = {"/v1/models": models("tiny", adapters=("other",))}
DOWN, UP = {"/health": text("", 503)}, {"/health": text("")}


def metrics(**figures: Any) -> dict[str, Handler]:
    return {"/metrics": text(page(**figures))}


LIVES = {
    f"restarts as another model, steps from 100 to {steps}": [
        KNOWN,
        Phase(
            LARGE | metrics(steps=steps, model="large"), {"steps": steps}, {"models": ("large",)}
        ),
        Phase({}, {"max_model_len": 131_072}),
    ]
    for steps in (3, 1000)
} | {
    "restarts, more steps, and says when": [
        KNOWN,
        Phase(metrics(started_at=1.7e9), {"started_at": 1.7e9}),
        Phase(OTHER | metrics(steps=1000, started_at=1.8e9), {"models": ("tiny", "other")}),
    ],
    "counts nothing in an answer, and is the same process": [
        KNOWN,
        Phase(metrics(started_at=1.7e9), {"started_at": 1.7e9, "models": MODELS}),
        Phase(
            {"/v1/models": hang} | metrics(steps=0, started_at=1.7e9),
            {"steps": 0, "models": MODELS},
        ),
    ],
    "hangs and still has its adapters": [
        KNOWN,
        Phase({"/metrics": hang, "/v1/models": hang}, {"healthy": False}),
        Phase(metrics(steps=101), {"healthy": True}, {"models": MODELS}),
    ],
    "returns with another model": [
        KNOWN,
        Phase(DOWN, {"healthy": False}),
        Phase(
            UP | metrics(steps=1000, model="large") | {"/v1/models": hang},
            {"healthy": True, "steps": 1000},  # a scrape may have got the metrics before
            {"models": ("large",), "max_model_len": None, "listed": False},
        ),
    ],
    "sleeps": [Phase(metrics(asleep=how), {"asleep": how}) for how in (False, True, False)],
}


@pytest.mark.parametrize("phases", LIVES.values(), ids=LIVES)
async def test_state_follows_the_life_of_a_replica(
    watch: Watch, replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch, phases: list[Phase]
) -> None:
    monkeypatch.setattr("extproc.poll.models.MODELS_EVERY_S", 600.0)
    async with watch(replica, poll=SOON) as router:
        for answers_now, awaited, others in phases:
            replica.answers |= answers_now
            state = structs.asdict(await router.replica(replica, **awaited))
            assert others.items() <= state.items()


async def test_model_list_of_an_earlier_process_is_dropped(
    watch: Watch, replica: ScriptedReplica
) -> None:
    replica.answers["/v1/models"] = listed = HeldAnswer(replica.answers["/v1/models"])
    async with watch(replica) as router:
        await listed.requested.wait()
        replica.answers |= LARGE | {"/metrics": text(page(steps=3, model="large"))}
        await router.replica(replica, max_model_len=131_072)
        listed.released.set()
        replica.answers["/metrics"] = text(page(steps=4, model="large"))
        state = await router.replica(replica, steps=4)
        assert (state.models, state.max_model_len) == (("large",), 131_072)


async def test_replica_that_refuses_its_model_list_is_known_by_its_metrics(
    watch: Watch, replica: ScriptedReplica, logged: Logged
) -> None:
    replica.answers["/v1/models"] = text("", 401)
    async with watch(replica) as router:
        state = await router.replica(replica, takes_priority=True)
        assert (state.models, state.max_model_len) == (("tiny",), None)  # the label in /metrics
        assert not state.listed
        line = await logged.line(
            "replica does not list its models: using the model names in its metrics"
        )
        assert line["error"] == "/v1/models answered 401"
        replica.answers["/metrics"] = text(page(steps=102))
        assert (await router.replica(replica, steps=102)).takes_priority


@pytest.mark.parametrize("version", ["0.10.2", "0.32.0"])
async def test_priority_scheduling_of_the_pool_overrides_the_version(
    watch: Watch, replica: ScriptedReplica, version: str
) -> None:
    replica.answers["/version"] = text(f'{{"version": "{version}"}}')
    async with watch(replica, priority_scheduling=True) as router:
        assert (await router.replica(replica, takes_priority=True)).by_priority


async def test_replicas_file_renames_a_replica_and_removes_another_while_redis_hangs(
    redis_server: RedisServer,
    watch: Watch,
    tmp_path: Path,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for_redis(monkeypatch, 1.0)
    file = tmp_path / "replicas.yaml"
    async with serving() as first, serving() as second:
        renamed = f"{{url: '{second.id}', name: renamed}}"
        file.write_text(f"['{first.id}', '{second.id}']")
        async with watch(replicas_file=file) as router:
            await router.until(lambda states: len(states) == 2)
            file.write_text(f"['{first.id}', {renamed}]")
            await router.replica(second, name="renamed")
            os.kill(redis_server.pid, signal.SIGSTOP)
            await logged.line("redis is lost, retrying")
            file.write_text(f"[{renamed}]")
            await logged.line("replica left the pool")
            os.kill(redis_server.pid, signal.SIGCONT)
            await router.until(lambda states: set(states) == {second.id})


async def test_poller_counts_healthy_replicas_that_neither_sleep_nor_drain(
    redis_server: RedisServer, replica: ScriptedReplica
) -> None:
    async with serving() as sleeping, serving() as drained:
        sleeping.answers["/metrics"] = text(page(asleep=True))
        settings = config(redis_server, replica, sleeping, drained, ScriptedReplica())
        async with connect(redis_server.url, "default") as redis, watching(settings) as router:
            await DrainStore(redis, "default").write({drained.id: True})
            await router.replica(drained, draining=True)
            await router.until(lambda states: len(states) == 4)
            assert 'replicas_healthy{pool="default"} 1.0' in await metrics_of(settings)


async def test_first_scrapes_of_many_replicas_are_spread_over_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds at once would hold up the heartbeats of the poller."""
    begun: dict[str, float] = {}

    async def scrape(_: object, replica: str, __: bool) -> PageFigures:
        begun.setdefault(replica, monotonic())
        raise ScrapeError("down")

    monkeypatch.setattr("extproc.poll.replica.scrape", scrape)
    ids = [f"127.0.0.{number}:9" for number in range(1, 101)]
    settings = Config.model_validate({"replicas": ids, "poll": {"interval_s": 1.0}})
    async with started(poller_of(settings).run()):
        await until(lambda: len(begun) == len(ids))
    assert max(begun.values()) - min(begun.values()) > 0.3


async def test_poller_without_replicas_logs_a_warning(
    redis_server: RedisServer, logged: Logged
) -> None:
    async with polling(config(redis_server)):
        await logged.line(
            "no replicas are configured: set replicas or replicas_file, else nothing is polled"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_stops_the_poller_and_its_heartbeat(
    redis_server: RedisServer, replica: ScriptedReplica, number: signal.Signals
) -> None:
    settings = config(redis_server, replica)
    async with connect(redis_server.url, "default") as redis:
        task = asyncio.create_task(run_poller(settings))
        async with asyncio.timeout(PATIENCE_S):
            async for change in StateReader(redis, settings.pool).changes():
                if isinstance(change, Put):
                    break
            os.kill(os.getpid(), number)
            await task
        alive, stopped = await known_pollers(redis, settings.pool, Skips())
        assert (alive, len(stopped)) == ({}, 1)
