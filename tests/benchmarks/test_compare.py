"""``benchmarks.compare``: its arguments, its verdicts on turns and machine, and a whole run."""

import asyncio
import json
import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.samples import Sample

from benchmarks import fleet
from benchmarks.compare import __main__ as compare
from benchmarks.compare.contenders import RunningServers, SimulatedFleet
from benchmarks.compare.envoy import EnvoyContender, weights
from benchmarks.compare.peers import PROXIES, ProxyContender, metric_complaints
from benchmarks.compare.play import load_arguments, work_complaints
from benchmarks.compare.validity import Observation, around, hits, observing, ticks, validity
from extproc.ground.clock import monotonic
from extproc.lab.harness.processes import ProcessError, free_port
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import ReplicaServer
from tests.benchmarks.conftest import BENCHMARKS, FLEETS


def simulated_fleet(name: str) -> SimulatedFleet:
    return SimulatedFleet(fleet.read(FLEETS / f"{name}.yaml"))


def run(name: str, repeat: int, seconds: float, **more: Any) -> dict[str, Any]:
    times = {"mean": seconds, "p99": 2 * seconds}
    summary = {"ttft_s": times, "completion_s": times, "hits": 0.5, "imbalance": 1.25}
    cpu = {"cpu_share": 0.2, "cpu_own_share": 0.1, "cpu_busiest_second": 0.5, "doubts": []}
    return {
        "run": {"name": name, "repeat": repeat},
        "summary": summary | {"warnings": []},
        "validity": cpu | {"client_late_p99_s": 0.001, "replicas_late_p99_s": 0.002},
        "complaints": [],
        "requests": [],
        **more,
    }


def test_proxy_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (BENCHMARKS / "compare/peers.txt").read_text().split()
    assert sorted(line.partition("==")[0] for line in listed) == sorted(PROXIES)
    monkeypatch.setattr("benchmarks.compare.peers.INSTALLED", tmp_path)
    for name in PROXIES:
        with pytest.raises(ValueError, match=f"{name} is not installed: run make peers"):
            compare.contender_named(name)
        program = tmp_path / name / "bin" / name
        program.parent.mkdir(parents=True)
        program.touch()
        contender = compare.contender_named(f"{name}:cache_aware")
        assert contender.about.endswith("policy cache_aware")


def test_fleet_with_events_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--fleet", str(FLEETS / "throttled.yaml"), "--contenders", "envoy"]) == 2
    assert "events" in capsys.readouterr().err


def test_mixed_fleet_hides_which_cards_are_fast() -> None:
    mixed, known = simulated_fleet("live-mixed"), simulated_fleet("live-mixed-true")
    assert {*mixed.profiles.values()} == {"llama-3-8b-a100"}
    assert known.profiles["h100-0"] == "llama-8b-h100"
    assert known.speeds == mixed.speeds
    assert mixed.speeds["h100-0"] == pytest.approx(4.5 * mixed.speeds["a10-0"], rel=0.1)
    assert weights(mixed, dict.fromkeys(mixed.speeds, "")) == [100, 100, 22, 22]


def test_each_repeat_sends_the_next_part_of_the_trace() -> None:
    options = {"speed": 4.0, "skip": 30.0, "duration": 16.0, "stream_share": 0.5, "seed": 7}
    args = Namespace(trace=[Path("a"), Path("b")], fault=None, **options)
    first, third = (
        dict(zip(words[::2], words[1::2], strict=True))
        for words in (load_arguments(args, 0), load_arguments(args, 2))
    )
    assert first["--trace"] == "a,b"
    assert (first["--from"], first["--duration"], first["--seed"]) == ("30.0", "16.0", "7")
    assert (third["--from"], third["--duration"], third["--seed"]) == ("62.0", "16.0", "9")


def test_answer_of_another_length_is_complained_of() -> None:
    def answer(planned: int, generated: int | None, error: str | None = None) -> dict[str, Any]:
        tokens = {"planned_output_tokens": planned, "output_tokens": generated}
        return tokens | {"error": error}

    wrong_count = "had an answer without a token count, or with another than planned"
    assert work_complaints([answer(3, 3), answer(5, 5)]) == []
    # The sums are equal.
    assert work_complaints([answer(3, 4), answer(5, 4)]) == [f"2 of 2 requests {wrong_count}"]
    assert work_complaints([answer(3, 3), answer(5, None)]) == [f"1 of 2 requests {wrong_count}"]
    failed = answer(5, 2, "broken stream")
    assert work_complaints([answer(3, 3), failed]) == ["1 of 2 requests failed"]


def test_retries_and_open_breakers_of_a_proxy_are_complained_of() -> None:
    samples = [
        Sample("smg_worker_retries_total", {"endpoint": "chat"}, 2),
        Sample("smg_worker_retries_total", {"endpoint": "completions"}, 0),
        Sample("smg_worker_cb_state", {"worker": "http://a"}, 1),
        Sample("smg_http_requests_total", {}, 7),
    ]
    assert metric_complaints(samples) == [
        'its metrics count smg_worker_retries_total{endpoint="chat"} 2',
        'its metrics count smg_worker_cb_state{worker="http://a"} 1',
    ]


# -- running servers ------------------------------------------------------------------------


async def test_running_servers_lose_their_cached_prefixes_before_a_turn(tmp_path: Path) -> None:
    reset: list[str] = []

    async def forget(request: web.Request) -> web.Response:
        reset.append(request.host)
        return web.Response(status=200 if len(reset) < 3 else 404)

    app = web.Application()
    app.router.add_post("/reset_prefix_cache", forget)
    async with TestServer(app) as server:
        address = f"127.0.0.1:{server.port}"
        servers = RunningServers([address, address], "m", "llama-8b-a10", [2.0, 1.0])
        async with servers.fresh(tmp_path / "turn") as (names, processes):
            assert (names, processes) == ({"vllm-1": address, "vllm-2": address}, {})
            assert servers.profiles == dict.fromkeys(names, "llama-8b-a10")
        assert len(reset) == 2
        assert weights(servers, names) == [100, 50]
        with pytest.raises(ProcessError, match=r"answers 404 .*VLLM_SERVER_DEV_MODE=1"):
            async with servers.fresh(tmp_path / "turn"):
                pass


# -- the machine ----------------------------------------------------------------------------


def late(p99: float, lost: float = 0.0) -> dict[str, Any]:
    return {"late_s": {"mean": p99 / 10, "p99": p99, "max": p99}, "lost_s": lost}


def test_busy_machine_is_doubted() -> None:
    start = Observation(0.0, (0, 0, 0))
    replicas: dict[str, Any] = {"a": late(0.002), "b": late(0.004)}
    good = validity([start, Observation(1.0, (100, 30, 25), late=replicas)], 0.001)
    assert (good["cpu_share"], good["cpu_own_share"]) == (0.3, 0.25)
    assert good["replicas_late_p99_s"] == 0.004
    assert good["doubts"] == []
    replicas = {"a": late(0.3, 1.5), "b": late(0.004), "c": None}
    bad = validity([start, Observation(1.0, (100, 95, 20), late=replicas)], 0.2)
    assert bad["doubts"] == [
        "CPU 95% busy",
        "other processes used 75% of the CPU",
        "the client sent 200 ms late at p99",
        "steps were 300 ms late at p99",
        "replicas lost 1.5 s",
        "c did not answer how late its steps were",
    ]
    assert validity([], 0.0)["doubts"] == []
    # Running servers are other processes, and tell no lateness.
    assert validity([start, Observation(1.0, (100, 80, 10))], 0.001)["doubts"] == []


def test_machine_is_judged_while_requests_arrive() -> None:
    # The client starts, requests arrive for two seconds, and answers are awaited.
    busy = [10, 10, 100, 190, 190]
    observed = [
        Observation(98.0 + n, (100 * n, so_far, so_far), late={"a": late(n / 100)})
        for n, so_far in enumerate(busy)
    ]
    arriving = around(observed, 99.2, 100.7)
    assert [moment.at_s for moment in arriving] == [99.0, 100.0, 101.0]
    found = validity(arriving, 0.0)
    assert (found["cpu_share"], found["cpu_busiest_second"]) == (0.9, 0.9)
    assert found["replicas_late_p99_s"] == 0.03
    assert around(observed, 0.0, 999.0) == observed


def test_hits_are_those_of_the_turn() -> None:
    observed = [
        Observation(at, (0, 0, 0), prompt_tokens=prompt, cached_tokens=cached)
        for at, prompt, cached in ((0.0, 100.0, 90.0), (1.0, 200.0, 90.0), (2.0, 500.0, 290.0))
    ]
    assert hits(observed) == 0.5
    assert hits(observed[:1]) == 0.0


def test_cpu_time_includes_all_descendants(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 1 20 60 5 2 2 0 3 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert ticks(tmp_path) == (100, 35, 0)
    assert ticks(tmp_path / "none") == (0, 0, 0)
    family = {1: (0, 100), os.getpid(): (1, 1), 900_001: (os.getpid(), 2), 900_002: (900_001, 4)}
    for pid, (parent, used) in family.items():
        (tmp_path / str(pid)).mkdir()
        fields = ["S", str(parent), *"0" * 9, str(used), "0", "0", "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) name) {' '.join(fields)}\n")
    assert ticks(tmp_path)[2] == 7


# -- turns ----------------------------------------------------------------------------------


def fake_turns(
    monkeypatch: pytest.MonkeyPatch,
    errors: Mapping[tuple[str, int], BaseException] | None = None,
    complaints: Mapping[str, list[str]] | None = None,
) -> list[tuple[str, int]]:
    """Replaces turns by fakes; returns the name and repeat of each turn that begins."""
    begun: list[tuple[str, int]] = []

    async def play(contender: Any, fleet: Any, traffic: Any, repeat: int, directory: Path) -> Any:
        begun.append((contender.name, repeat))
        if error := (errors or {}).get(begun[-1]):
            raise error
        return run(*begun[-1], 1.0, complaints=(complaints or {}).get(contender.name, []))

    monkeypatch.setattr(compare, "play", play)
    return begun


def test_another_contender_begins_each_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = fake_turns(monkeypatch)
    compare.main(["--contenders", "router,envoy,envoy:random", "--repeats", "4"])
    names = [name for name, _ in begun]
    assert names[:6] == [
        *("router:completion", "envoy:least_request", "envoy:random"),
        *("envoy:least_request", "envoy:random", "router:completion"),
    ]
    assert names[9:] == names[:3]


@pytest.mark.parametrize(
    ("file", "weighted"), [("live-mixed", True), ("live-mixed-true", True), ("live-equal", False)]
)
def test_weighted_envoy_is_compared_where_replicas_differ(
    file: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = fake_turns(monkeypatch)
    assert compare.main(["--quick", "--fleet", str(FLEETS / f"{file}.yaml")]) == 0
    usual = ["router:completion", "envoy:round_robin", "envoy:least_request"]
    more = ["envoy:least_request_weighted"] if weighted else []
    assert [name for name, _ in begun] == [*usual, *more]


@pytest.mark.parametrize("error", [ProcessError("smg died"), aiohttp.ClientError("smg died")])
def test_other_turns_run_after_a_failed_turn(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_turns(monkeypatch, {("envoy:least_request", 0): error})
    file = tmp_path / "made" / "result.json"
    argv = ["--contenders", "router,envoy", "--repeats", "2", "--json", str(file)]
    assert compare.main(argv) == 1
    result = json.loads(file.read_text())
    assert [(each["run"]["name"], each["run"]["repeat"]) for each in result["runs"]] == [
        ("router:completion", 0),
        ("envoy:least_request", 1),
        ("router:completion", 1),
    ]
    assert result["not_run"] == [{"name": "envoy:least_request", "repeat": 0, "why": "smg died"}]


def test_comparison_without_any_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_turns(monkeypatch, {("router:completion", 0): ProcessError("no redis-server found")})
    assert compare.main(["--contenders", "router", "--repeats", "1"]) == 2


def test_interrupted_comparison_keeps_finished_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_turns(monkeypatch, {("router:completion", 1): KeyboardInterrupt()})
    file = tmp_path / "result.json"
    argv = ["--contenders", "router", "--repeats", "3", "--json", str(file)]
    assert compare.main(argv) == 130
    (turn,) = json.loads(file.read_text())["runs"]
    assert turn["run"]["name"] == "router:completion"
    assert "interrupted" in capsys.readouterr().err


def test_complaint_sets_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_turns(monkeypatch, complaints={"router:completion": ["3 requests bypassed the router"]})
    assert compare.main(["--contenders", "router,envoy", "--repeats", "2"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("wrong: 3 requests bypassed the router") == 2
    assert "2 went wrong" in printed
    assert compare.main(["--contenders", "envoy:random,envoy", "--repeats", "1"]) == 0


# -- real processes -------------------------------------------------------------------------


@pytest.mark.process
async def test_envoy_without_reachable_replica_is_complained_of(tmp_path: Path) -> None:
    servers = {"gone": f"127.0.0.1:{free_port()}"}
    contender = EnvoyContender("least_request")
    async with contender.running(simulated_fleet("live-equal"), servers, tmp_path, 0) as front:
        assert await front.complaints([]) == []
        async with aiohttp.ClientSession() as session, session.get(f"{front.url}/health") as answer:
            assert answer.status == 503
        assert "Envoy counts 2 upstream_cx_connect_fail" in await front.complaints([])
    (complaint,) = await front.complaints([])
    assert "Envoy's statistics are missing" in complaint


MIXED = """replicas:
- {name: h100, profile: llama-8b-h100, believed: llama-3-8b-a100}
- {name: a10, profile: llama-8b-a10, believed: llama-3-8b-a100}
"""
SHORT = [
    {
        "timestamp": 100 * number,
        "input_length": 50 + 37 * number % 900,
        "output_length": 5 + 7 * number % 40,
        "max_tokens": None if number % 3 else 64,
    }
    for number in range(30)  # ten a second, whose answers end soon on any replica
]


def quick_runs(directory: Path, contenders: str, *options: str) -> dict[str, Any]:
    """Compares contenders by the requests after the first second; returns their runs by name."""
    file, trace = directory / "new" / "quick.json", directory / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, SHORT)))
    argv = ["--quick", "--trace", str(trace), "--from", "1", "--speed", "1", "--json", str(file)]
    assert compare.main([*argv, "--contenders", contenders, *options]) in (0, 1)
    result = json.loads(file.read_text())
    assert result["not_run"] == []
    return {each["run"]["name"]: each for each in result["runs"]}


async def test_server_that_does_not_answer_adds_no_tokens() -> None:
    gone = {"gone": f"127.0.0.1:{free_port()}"}
    async with observing(gone, monotonic, simulated=False) as observed:
        pass
    assert [each.prompt_tokens for each in observed] == [0.0] * len(observed)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_quick_comparison_on_a_mixed_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(MIXED)
    names = ["router:completion", "observed:least_request", "envoy:least_request_weighted"]
    runs = quick_runs(tmp_path, ",".join(names), "--fleet", str(mixed))
    assert [*runs] == names
    assert "router:completion" in capsys.readouterr().out
    fields = ("at_s", "endpoint", "prompt_tokens", "output_tokens")
    sent = [[[request[key] for key in fields] for request in runs[n]["requests"]] for n in names]
    assert [tokens for *_, tokens in sent[0]] == [line["output_length"] for line in SHORT[10:]]
    assert sent[1] == sent[2] == sent[0], "the same requests and answers for all"
    for turn in runs.values():
        assert turn["summary"]["answered"] == turn["summary"]["requests"]
        assert 0 <= turn["summary"]["hits"] < 1
        assert turn["summary"]["imbalance"] >= 1
        assert turn["late"].keys() == {"h100-0", "a10-0"}
        assert {request["replica"] for request in turn["requests"]} <= turn["late"].keys()
        # On a slow machine the router may miss Envoy's deadline.
        missed = ("without the router's answer", "bypassed the router", "were not observed")
        assert [text for text in turn["complaints"] if not text.endswith(missed)] == []
    predicted = [
        any(request["predicted_completion_s"] for request in turn["requests"])
        for turn in runs.values()
    ]
    assert predicted == [True, True, False]


async def forget(request: web.Request) -> web.Response:
    return web.Response()


@pytest.mark.process
@pytest.mark.timeout(300)
async def test_quick_comparison_on_running_servers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        addresses = []
        for _ in range(2):
            server = ReplicaServer(Replica(ReplicaSettings(model="m")), Random(0))
            app = server.app()
            app.router.add_post("/reset_prefix_cache", forget)
            running = await stack.enter_async_context(TestServer(app))
            addresses.append(f"127.0.0.1:{running.port}")
        names, servers = "router,envoy:least_request", ("--servers", *addresses)
        runs = await asyncio.to_thread(quick_runs, tmp_path, names, *servers, "--model", "m")
    assert list(runs) == ["router:completion", "envoy:least_request"]
    for turn in runs.values():
        assert turn["run"]["known_lengths"]
        assert turn["summary"]["answered"] == turn["summary"]["requests"] == len(SHORT) - 10
        assert all(
            request["max_tokens"] == request["output_tokens"] for request in turn["requests"]
        )
        assert {request["replica"] for request in turn["requests"]} <= {"vllm-1", "vllm-2"}
        assert (turn["late"], turn["summary"]["imbalance"]) == ({}, None)
        assert not [doubt for doubt in turn["validity"]["doubts"] if "other processes" in doubt]


PEERS = [(name, policy) for name, proxy in PROXIES.items() for policy in proxy.policies]


@pytest.mark.process
@pytest.mark.parametrize(("name", "policy"), PEERS)
async def test_proxy_applies_its_policy(name: str, policy: str, tmp_path: Path) -> None:
    product = PROXIES[name]
    if not product.installed:
        pytest.skip("make peers has not installed it")
    simulated = simulated_fleet("live-equal")
    async with (
        simulated.fresh(tmp_path) as (servers, _),
        ProxyContender(product, policy).running(simulated, servers, tmp_path, 0) as front,
        aiohttp.ClientSession() as session,
    ):
        served = set()
        for number in range(8):
            body = {"model": simulated.model, "prompt": f"number {number}", "max_tokens": 2}
            async with session.post(f"{front.url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                served.add(answer.headers["x-served-by"])
        assert served <= {*servers.values()}
        assert policy != "round_robin" or served == {*servers.values()}
        assert await front.complaints([{}] * 8) == []
        (complaint,) = await front.complaints([{}] * 9)
        assert "of 9 requests, its policies decided" in complaint
