import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import pytest
from msgspec import structs

from extproc.config import Config
from extproc.lab.harness.processes import answers
from extproc.poll.into_redis import run_poller
from extproc.poll.metrics_text import EngineFigures, read_metrics
from extproc.predict.step import DEFAULT_PROFILE, PROFILES
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.lists import Put
from extproc.share.replicas import StateReader, StateWriter
from tests.conftest import Logged, RedisServer, wait_for_redis
from tests.poll.polling import SOON, Seen, config, polling, watching
from tests.poll.replica import (
    Handler,
    Held,
    Once,
    Replica,
    hang,
    late,
    models,
    page,
    serving,
    text,
)
from tests.waiting import PATIENCE_S, until, until_read

pytestmark = pytest.mark.process

MODELS = ("tiny", "adapter")  # that the replica lists


async def published(settings: Config, *states: ReplicaState) -> None:
    """Puts states of an earlier poller into Redis."""
    async with connect(settings.redis, settings.pool) as redis:
        await StateWriter(redis, settings.pool, ttl_s=10).put(states)


async def metrics_of(settings: Config) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{settings.poll.admin}/metrics") as response,
    ):
        return await response.text()


async def test_a_routers_view_of_a_replica(redis_server: RedisServer, replica: Replica) -> None:
    source = {"url": replica.id, "name": "one", "profile": "llama-8b-a10"}
    async with watching(config(redis_server, replicas=[source])) as seen:
        state = await seen.replica(replica, lambda state: state.max_model_len is not None)
        assert state.scrape_seconds > 0
        assert state.scraped_at > 1.7e9
        assert state.learned is not None  # nothing is known better yet than the profile
        assert state.learned.c0 == pytest.approx(PROFILES["llama-8b-a10"].step.c0)
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
        await seen.replica(replica, running=9)


async def test_poller_knows_what_the_one_before_learned(
    redis_server: RedisServer, replica: Replica
) -> None:
    learned = PROFILES["llama-8b-a10"].step.slowed(1.5)
    settings = config(redis_server, replica)
    known: dict[str, Any] = {"learned": learned, "measured": True, "running": 7}
    await published(settings, ReplicaState(id=replica.id, profile=DEFAULT_PROFILE, **known))
    async with watching(settings) as seen:
        state = await seen.replica(replica, running=2)
        assert state.learned is not None
        assert state.learned.c0 == pytest.approx(learned.c0, rel=0.01)


async def test_limit_of_sequences_outlives_the_poller_and_ends_with_the_process(
    redis_server: RedisServer,
) -> None:
    def learned(limit: int, steps: int, state: ReplicaState) -> bool:
        return (state.max_num_seqs, state.steps) == (limit, steps)

    async with serving() as replica:
        settings = config(redis_server, replica)
        async with watching(settings) as seen:
            await seen.replica(replica, partial(learned, 0, 100))
            replica.answers["/metrics"] = text(page(steps=200, generated=200))
            await seen.replica(replica, partial(learned, 2, 200))
        replica.answers["/metrics"] = text(page(running=1, waiting=0, steps=300, generated=250))
        async with watching(settings) as seen:
            await seen.replica(replica, partial(learned, 2, 300))
            replica.answers["/metrics"] = text(page(steps=3))
            await seen.replica(replica, partial(learned, 0, 3))


async def test_poller_knows_whether_list_was_read_before(redis_server: RedisServer) -> None:
    async with serving() as secret, serving() as told:
        secret.answers["/v1/models"] = text("", 401)
        told.answers["/v1/models"] = hang
        settings = config(redis_server, secret, told)
        await published(
            settings,
            ReplicaState(id=secret.id, models=("tiny",)),
            ReplicaState(id=told.id, models=MODELS, listed=True),
        )
        async with watching(settings) as seen:
            state = await seen.replica(secret, running=2)
            assert (state.models, state.listed) == (("tiny",), False)
            state = await seen.replica(told, running=2)
            assert (state.models, state.listed) == (MODELS, True)


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/health", text("", 503), "/health answered 503"),
        ("/metrics", hang, "/metrics did not answer in full in 2.4 s"),
    ],
)
async def test_a_sick_replica_is_told_of_and_comes_back(
    redis_server: RedisServer, logged: Logged, path: str, answer: Handler, problem: str
) -> None:
    async with serving() as sick, serving() as well:
        async with watching(config(redis_server, sick, well, poll=SOON)) as seen:
            await seen.replica(sick, models=MODELS)
            good = sick.answers[path]
            sick.answers[path] = answer
            state = await seen.replica(sick, healthy=False)
            assert problem in state.problem
            assert (state.running, state.models) == (2, MODELS)  # last known figures
            assert (await seen.replica(well, healthy=True)).problem == ""
            sick.answers[path] = good
            assert (await seen.replica(sick, healthy=True)).problem == ""
        (line,) = logged.lines("replica became unhealthy: routers avoid it until a scrape succeeds")
        assert line["replica"] == sick.id
        assert problem in str(line["problem"])
        assert [line["replica"] for line in logged.lines("replica became healthy")].count(
            sick.id
        ) == 2


async def test_late_replica_stays_in(
    redis_server: RedisServer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(redis_server, replica, poll={"timeout_s": 0.5})
    monkeypatch.setattr("extproc.config._TIMEOUTS", 30)  # none is too late on a busy machine
    monkeypatch.setattr("extproc.poll.replica.MODELS_EVERY_S", 600.0)
    async with watching(settings) as seen:
        await seen.replica(replica, models=MODELS)
        for running in (7, 8):  # one after the other, and each counts when it comes
            replica.answers["/metrics"] = late(settings.poll.timeout_s, page(running=running))
            await seen.replica(replica, running=running)
        assert all(state.healthy for state in seen.history)
        assert all(state.models == MODELS for state in seen.history[-2:])
        assert replica.asked.count("/v1/models") == 1
        metrics = await metrics_of(settings)
    assert 'extproc_poll_scrapes_total{result="late"}' in metrics
    assert 'extproc_poll_scrapes_total{result="failed"} 0.0' in metrics


async def test_single_failed_scrape_does_not_make_unhealthy(
    redis_server: RedisServer, replica: Replica
) -> None:
    async with watching(config(redis_server, replica, poll=SOON)) as seen:
        await seen.replica(replica, models=MODELS)
        for _ in range(2):
            silent = Once(hang, text(page(running=7)))
            replica.answers["/metrics"] = silent
            await silent.over.wait()
            await seen.replica(replica, running=7)
            replica.answers["/metrics"] = text(page(running=2))
            await seen.replica(replica, running=2)
        assert all(state.healthy for state in seen.history)


async def test_stalls_are_not_told(
    replica: Replica, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.poll.replica.STALL_S", 10.0)  # far more, on a busy machine
    await seen.replica(replica, healthy=True)
    replica.answers |= {"/metrics": late(0.5, page(running=7)), "/health": late(0.5, "")}
    await seen.replica(replica, running=7)
    await replica.asked_for("/health", replica.asked.count("/health") + 4)
    assert all(state.healthy and not state.unanswered_s for state in seen.history)


async def test_state_says_that_replica_refuses_connections(replica: Replica, seen: Seen) -> None:
    await seen.replica(replica, healthy=True)
    replica.answers["/health"] = text("", 503)
    assert not (await seen.replica(replica, healthy=False)).refuses
    await replica.stop()
    state = await seen.replica(replica, refuses=True)
    assert not state.healthy
    replica.answers["/health"] = text("")
    await replica.start()
    assert not (await seen.replica(replica, healthy=True)).refuses


async def test_seconds_without_answer_are_told_meanwhile(replica: Replica, seen: Seen) -> None:
    await seen.replica(replica, models=MODELS)
    replica.answers |= {"/metrics": hang, "/health": hang}
    state = await seen.replica(replica, lambda state: state.unanswered_s > 0.2)
    assert (state.healthy, state.running) == (True, 2)  # last known figures
    last = (await seen.replica(replica, healthy=False)).unanswered_s
    await seen.replica(replica, lambda state: state.unanswered_s > last)
    replica.answers |= {"/metrics": text(page(running=7)), "/health": text("")}
    state = await seen.replica(replica, running=7)
    assert (state.healthy, state.unanswered_s) == (True, 0.0)


async def test_a_replica_that_is_gone_owes_no_answer(replica: Replica, seen: Seen) -> None:
    await seen.replica(replica, healthy=True)
    replica.answers |= {"/metrics": hang, "/health": hang}
    await seen.replica(replica, lambda state: state.unanswered_s > 0.0)
    await replica.stop()
    state = await seen.replica(replica, lambda state: "refused" in state.problem)
    assert state.unanswered_s == 0.0


@pytest.mark.parametrize("late", ["/metrics", "/health"])
async def test_a_replica_that_answers_one_of_two_is_not_silent(
    replica: Replica, seen: Seen, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    # Longer than a busy machine takes.
    monkeypatch.setattr("extproc.poll.replica.SILENCE_STEP_S", 0.5)
    await seen.replica(replica, healthy=True)
    replica.answers[late] = hang
    await replica.asked_for("/health", replica.asked.count("/health") + 3)
    assert not any(state.unanswered_s for state in seen.history)


async def test_an_error_nobody_foresaw_is_one_replicas_alone(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as odd, serving() as well:

        def read(page: bytes) -> EngineFigures:
            figures = read_metrics(page)
            return figures if figures.running != 13 else replace(figures, kv_usage=inf)

        monkeypatch.setattr("extproc.poll.scrape.read_metrics", read)
        async with watching(config(redis_server, odd, well)) as seen:
            await seen.until(lambda states: len(states) == 2)
            odd.answers["/metrics"] = text(page(running=13))
            state = await seen.replica(odd, healthy=False)
            assert "led to an error: ValidationError" in state.problem
            odd.asked.clear()
            await odd.asked_for("/metrics", times=5)  # again and again
            well.answers["/metrics"] = text(page(running=7))
            await seen.replica(well, running=7)
            odd.answers["/metrics"] = text(page(running=8))
            state = await seen.replica(odd, healthy=True)
            assert (state.running, state.problem) == (8, "")
    (line,) = [line for line in caplog.records if line.levelname == "ERROR"]
    assert line.exc_info
    assert vars(line)["replica"] == odd.id


async def test_replica_that_dns_names_now_and_then_stays_while_it_answers(
    redis_server: RedisServer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_of_dns, answer = cycle(["127.0.0.1", "127.0.0.2"]), socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        return answer(next(answers_of_dns) if host == "vllm" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    other = f"127.0.0.2:{replica.port}"  # nobody is there
    async with watching(config(redis_server, replicas=[{"dns": f"vllm:{replica.port}"}])) as seen:
        await seen.until(lambda _: seen.removed.count(other) == 3)
        assert {*seen.removed} == {other}
        await replica.stop()
        await seen.until(lambda _: replica.id in seen.removed)


class Phase(NamedTuple):
    """Answers of a replica, and fields of the first state with them, which has others, too."""

    answers: Mapping[str, Handler]
    first: Mapping[str, object]
    others: Mapping[str, object] = {}


KNOWN = Phase({}, {"models": MODELS, "max_model_len": 4096})
LARGE = {"/v1/models": models("large", max_model_len=131_072)}
OTHER = {"/v1/models": models("tiny", adapters=("other",))}
DOWN, UP = {"/health": text("", 503)}, {"/health": text("")}


def told(**figures: Any) -> dict[str, Handler]:
    return {"/metrics": text(page(**figures))}


LIVES = {
    f"restarts as another model, steps from 100 to {steps}": [
        KNOWN,
        Phase(LARGE | told(steps=steps, model="large"), {"steps": steps}, {"models": ("large",)}),
        Phase({}, {"max_model_len": 131_072}),
    ]
    for steps in (3, 1000)
} | {
    "restarts, more steps, and says when": [
        KNOWN,
        Phase(told(started_at=1.7e9), {"started_at": 1.7e9}),
        Phase(OTHER | told(steps=1000, started_at=1.8e9), {"models": ("tiny", "other")}),
    ],
    "counts nothing in one answer, and is the same process": [
        KNOWN,
        Phase(told(started_at=1.7e9), {"started_at": 1.7e9, "models": MODELS}),
        Phase(
            {"/v1/models": hang} | told(steps=0, started_at=1.7e9), {"steps": 0, "models": MODELS}
        ),
    ],
    "hangs and still has its adapters": [
        KNOWN,
        Phase({"/metrics": hang, "/v1/models": hang}, {"healthy": False}),
        Phase(told(steps=101), {"healthy": True}, {"models": MODELS}),
    ],
    "returns with another model": [
        KNOWN,
        Phase(DOWN, {"healthy": False}),
        Phase(
            UP | told(steps=1000, model="large") | {"/v1/models": hang},
            {"healthy": True},
            {"models": ("large",), "max_model_len": None, "listed": False},
        ),
    ],
    "sleeps": [Phase(told(asleep=how), {"asleep": how}) for how in (False, True, False)],
}


@pytest.mark.parametrize("phases", LIVES.values(), ids=LIVES)
async def test_state_follows_what_the_replica_becomes(
    redis_server: RedisServer,
    replica: Replica,
    monkeypatch: pytest.MonkeyPatch,
    phases: list[Phase],
) -> None:
    monkeypatch.setattr("extproc.poll.replica.MODELS_EVERY_S", 600.0)
    async with watching(config(redis_server, replica, poll=SOON)) as seen:
        for answers_now, first, others in phases:
            replica.answers |= answers_now
            state = structs.asdict(await seen.replica(replica, **first))
            assert others.items() <= state.items()


async def test_answer_of_earlier_process_is_not_believed(
    redis_server: RedisServer, replica: Replica
) -> None:
    replica.answers["/v1/models"] = listed = Held(replica.answers["/v1/models"])
    async with watching(config(redis_server, replica)) as seen:
        await listed.asked.wait()
        replica.answers |= LARGE | {"/metrics": text(page(steps=3, model="large"))}
        await seen.replica(replica, max_model_len=131_072)
        listed.released.set()
        replica.answers["/metrics"] = text(page(steps=4, model="large"))
        state = await seen.replica(replica, steps=4)
        assert (state.models, state.max_model_len) == (("large",), 131_072)


async def test_slow_models_hold_back_no_figures(
    redis_server: RedisServer, replica: Replica
) -> None:
    replica.answers["/v1/models"] = listed = Held(replica.answers["/v1/models"])
    async with watching(config(redis_server, replica)) as seen:
        await seen.replica(replica, healthy=True)
        replica.answers["/metrics"] = text(page(steps=101))
        state = await seen.replica(replica, steps=101)
        assert (state.models, state.max_model_len) == (("tiny",), None)
        listed.released.set()
        await seen.replica(replica, models=MODELS)


async def test_replica_keeps_models_secret(
    redis_server: RedisServer, replica: Replica, logged: Logged
) -> None:
    replica.answers["/v1/models"] = text("", 401)
    async with watching(config(redis_server, replica)) as seen:
        state = await seen.replica(replica, healthy=True)
        assert (state.models, state.max_model_len) == (("tiny",), None)  # the label in /metrics
        assert not state.listed, "it may serve others, too"
        line = await logged.line(
            "replica does not list its models: using the model names in its metrics"
        )
        assert line["error"] == "/v1/models answered 401"


@pytest.mark.parametrize("version", ["0.10.2", "0.32.0"])
async def test_pool_sets_priority_scheduling(
    redis_server: RedisServer, replica: Replica, version: str
) -> None:
    replica.answers["/version"] = text(f'{{"version": "{version}"}}')
    async with watching(config(redis_server, replica, priority_scheduling=True)) as seen:
        assert (await seen.replica(replica, takes_priority=True)).by_priority


async def test_replicas_come_and_go_with_file(redis_server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "replicas.yaml"
    async with serving() as one, serving() as two:
        file.write_text(f"['{one.id}']")
        async with watching(config(redis_server, replicas_file=file)) as seen:
            await seen.until(lambda states: set(states) == {one.id})
            file.write_text(f"['{one.id}', '{two.id}']")
            await seen.until(lambda states: set(states) == {one.id, two.id})
            file.write_text(f"[{{url: '{two.id}', name: renamed}}]")
            await seen.until(
                lambda states: [state.name for state in states.values()] == ["renamed"]
            )
        async with connect(redis_server.url, "default") as redis:
            assert await redis.keys("*:replica:*") == [f"{{default}}:replica:{two.id}".encode()]


async def test_a_replica_that_leaves_while_redis_hangs(
    redis_server: RedisServer, tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_redis(monkeypatch, 1.0)
    file = tmp_path / "replicas.yaml"
    async with serving() as one, serving() as two:
        file.write_text(f"['{one.id}', '{two.id}']")
        async with watching(config(redis_server, replicas_file=file)) as seen:
            await seen.until(lambda states: len(states) == 2)
            os.kill(redis_server.pid, signal.SIGSTOP)
            await logged.line("redis is lost, retrying")
            file.write_text(f"['{two.id}']")
            await logged.line("replica left the pool")
            os.kill(redis_server.pid, signal.SIGCONT)
            await seen.until(lambda states: set(states) == {two.id})


async def test_poller_goes_on_without_redis_and_fills_it_again(
    redis_server: RedisServer, replica: Replica, logged: Logged
) -> None:
    dead = Replica()
    settings = config(redis_server, replica, dead)
    async with watching(settings) as seen:
        ready = await logged.line("poller started")
        await seen.until(lambda states: len(states) == 2)
        await redis_server.kill()
        await logged.line("redis is lost, retrying", times=2)  # the reader's and the poller's
        replica.asked.clear()
        await replica.asked_for("/metrics", times=20)
        await until(answers(f"http://{ready['admin']}/healthz"))
        metrics = await metrics_of(settings)
        replica.answers["/metrics"] = text(page(running=77))
        await redis_server.start()
        await seen.replica(replica, running=77)
        await seen.until(lambda states: set(states) == {replica.id, dead.id})
        async with connect(redis_server.url, "default") as redis:
            assert len(await redis.keys("*:replica:*")) == 2
    assert len(logged.lines("redis is lost, retrying")) == len(logged.lines("redis is back")) == 2
    assert 'extproc_poll_replicas{pool="default"} 2.0' in metrics
    assert 'extproc_poll_replicas_healthy{pool="default"} 1.0' in metrics
    assert 'extproc_poll_scrapes_total{result="failed"}' in metrics
    assert "extproc_poll_scrape_seconds_count" in metrics


async def test_every_pool_of_the_configuration_is_polled(redis_server: RedisServer) -> None:
    async with serving() as one, serving() as two:
        settings = config(redis_server, one, pools={"second": {"replicas": [two.id]}})
        async with watching(settings) as seen, connect(redis_server.url, "default") as redis:
            await seen.until(lambda states: set(states) == {one.id})
            pools = {"default": one, "second": two}
            keys = {f"{{{pool}}}:replica:{of.id}".encode() for pool, of in pools.items()}
            keys_now = partial(redis.keys, "*:replica:*")
            await until_read(keys_now, lambda now: {*now} == keys)


async def test_poller_without_replicas_says_so(redis_server: RedisServer, logged: Logged) -> None:
    async with polling(config(redis_server)):
        await logged.line(
            "no replicas are configured: set replicas or replicas_file, else nothing is polled"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_stops_poller(
    redis_server: RedisServer, replica: Replica, number: signal.Signals
) -> None:
    settings = config(redis_server, replica)
    async with connect(redis_server.url, "default") as redis:
        task = asyncio.create_task(run_poller(settings))
        async with asyncio.timeout(PATIENCE_S):
            async for change in StateReader(redis, settings.pool, Random(1)).changes():
                if isinstance(change, Put):
                    break
            os.kill(os.getpid(), number)
            await task
        assert not await redis.keys("*poller*")
