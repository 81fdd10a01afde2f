"""benchmarks.compare: its arguments, its judgement of turns and machine, and a whole comparison."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.samples import Sample

from benchmarks import fleet
from benchmarks.compare import __main__ as compare
from benchmarks.compare.contenders import Fleet, Front
from benchmarks.compare.envoy import EnvoyAlone, weights
from benchmarks.compare.peers import PRODUCTS, Peer, trouble
from benchmarks.compare.play import part, work
from benchmarks.compare.validity import Look, between, hits, ticks, validity
from extproc.lab.harness.processes import ProcessError, free_port

FLEETS = Path("benchmarks/fleets")


def run(name: str, repeat: int, seconds: float, **more: Any) -> dict[str, Any]:
    part = {"mean": seconds, "p99": 2 * seconds}
    summary = {"ttft_s": part, "completion_s": part, "gap_s": None, "hits": 0.5, "imbalance": 1.25}
    cpu = {"cpu_share": 0.2, "cpu_own_share": 0.1, "cpu_busiest_second": 0.5, "doubts": []}
    return {
        "run": {"name": name, "repeat": repeat},
        "summary": summary | {"warnings": []},
        "validity": cpu | {"client_late_p99_s": 0.001, "replicas_late_p99_s": 0.002},
        "complaints": [],
        "requests": [],
        **more,
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nginx", "there is no contender 'nginx'; there are: router, envoy, vllm-router"),
        ("envoy:fastest", "envoy has no policy 'fastest'"),
        ("router:fastest", "router has no policy 'fastest'"),
    ],
)
def test_unknown_contender_fails(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--contenders", f"router,{name}"])
    assert said in capsys.readouterr().err


def test_peers_are_listed_for_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path("benchmarks/compare/peers.txt").read_text().split()
    assert sorted(one.partition("==")[0] for one in listed) == sorted(PRODUCTS)
    monkeypatch.setattr("benchmarks.compare.peers.INSTALLED", tmp_path)
    for name in PRODUCTS:
        with pytest.raises(ValueError, match=f"{name} is not installed: run make peers"):
            compare.contender(name)
        program = tmp_path / name / "bin" / name
        program.parent.mkdir(parents=True)
        program.touch()
        assert compare.contender(f"{name}:cache_aware").about.endswith("policy cache_aware")


def test_events_of_a_fleet_are_not_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--fleet", str(FLEETS / "throttled.yaml"), "--contenders", "envoy"]) == 2
    assert "events" in capsys.readouterr().err


def test_nobody_is_told_which_cards_of_the_mixed_fleet_are_fast() -> None:
    mixed = Fleet(fleet.read(FLEETS / "live-mixed.yaml"))
    assert {*mixed.profiles.values()} == {"llama-3-8b-a100"}
    told = Fleet(fleet.read(FLEETS / "live-mixed-told.yaml"))
    assert told.profiles["h100-0"] == "llama-8b-h100"
    assert told.speeds == mixed.speeds
    assert mixed.speeds["h100-0"] == pytest.approx(4.5 * mixed.speeds["a10-0"], rel=0.1)


def test_each_repeat_sends_the_next_part_of_the_trace() -> None:
    asked = {"speed": 4.0, "skip": 30.0, "duration": 16.0, "stream_share": 0.5, "seed": 7}
    args = Namespace(trace=[Path("a"), Path("b")], fault=None, **asked)
    first, third = (
        dict(zip(words[::2], words[1::2], strict=True)) for words in (part(args, 0), part(args, 2))
    )
    assert first["--trace"] == "a,b"
    assert (first["--from"], first["--duration"], first["--seed"]) == ("30.0", "16.0", "7")
    assert (third["--from"], third["--duration"], third["--seed"]) == ("62.0", "16.0", "9")


def test_an_answer_of_another_length_is_no_equal_work() -> None:
    def answer(asked: int, got: int | None, error: str | None = None) -> dict[str, Any]:
        return {"planned_output_tokens": asked, "output_tokens": got, "error": error}

    assert work([answer(3, 3), answer(5, 5)]) == []
    # Sums would be equal.
    (complaint,) = work([answer(3, 4), answer(5, 4)])
    assert complaint.startswith("2 of 2 requests got another number of tokens than asked for")
    (complaint,) = work([answer(3, 3), answer(5, None)])
    assert complaint.startswith("1 of 2 requests got another number")
    assert work([answer(3, 3), answer(5, 2, "broken stream")]) == ["1 of 2 requests failed"]


def test_retries_and_open_breakers_of_a_peer_are_found() -> None:
    samples = [
        Sample("smg_worker_retries_total", {"endpoint": "chat"}, 2),
        Sample("smg_worker_retries_total", {"endpoint": "completions"}, 0),
        Sample("smg_worker_cb_state", {"worker": "http://a"}, 1),
        Sample("smg_http_requests_total", {}, 7),
    ]
    assert trouble(samples) == [
        'its metrics say smg_worker_retries_total{endpoint="chat"} 2',
        'its metrics say smg_worker_cb_state{worker="http://a"} 1',
    ]


def late(p99: float, lost: float = 0.0) -> dict[str, Any]:
    return {"late_s": {"mean": p99 / 10, "p99": p99, "max": p99}, "lost_s": lost}


def test_a_machine_that_did_not_keep_up_is_doubted() -> None:
    start = Look(0.0, (0, 0, 0))
    said: dict[str, Any] = {"a": late(0.002), "b": late(0.004)}
    good = validity([start, Look(1.0, (100, 30, 25), late=said)], 0.001)
    assert (good["cpu_share"], good["cpu_own_share"]) == (0.3, 0.25)
    assert good["replicas_late_p99_s"] == 0.004
    assert good["doubts"] == []
    said = {"a": late(0.3, 1.5), "b": late(0.004), "c": None}
    bad = validity([start, Look(1.0, (100, 95, 20), late=said)], 0.2)
    assert bad["doubts"] == [
        "CPU 95% busy",
        "something else used 75% of the CPU",
        "the client's p99 was 200 ms late",
        "steps' p99 was 300 ms late",
        "replicas lost 1.5 s",
        "c did not say how late steps were",
    ]
    assert validity([], 0.0)["doubts"] == []


def test_a_machine_is_judged_while_requests_arrive() -> None:
    # The client starts, requests arrive for two seconds, and answers are awaited.
    busy = [10, 10, 100, 190, 190]
    looks = [
        Look(98.0 + n, (100 * n, so_far, so_far), late={"a": late(n / 100)})
        for n, so_far in enumerate(busy)
    ]
    arriving = between(looks, 99.2, 100.7)
    assert [one.at_s for one in arriving] == [99.0, 100.0, 101.0]
    found = validity(arriving, 0.0)
    assert (found["cpu_share"], found["cpu_busiest_second"]) == (0.9, 0.9)
    assert found["replicas_late_p99_s"] == 0.03
    assert between(looks, 0.0, 999.0) == looks


def test_hits_are_those_of_the_turn() -> None:
    seen = [
        Look(at, (0, 0, 0), prompt_tokens=prompt, cached_tokens=cached)
        for at, prompt, cached in ((0.0, 100.0, 90.0), (1.0, 200.0, 90.0), (2.0, 500.0, 290.0))
    ]
    assert hits(seen) == 0.5
    assert hits(seen[:1]) == 0.0


def test_cpu_time_is_the_kernels_and_that_of_all_descendants(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 1 20 60 5 2 2 0 3 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert ticks(tmp_path) == (100, 35, 0)
    assert ticks(tmp_path / "none") == (0, 0, 0)
    family = {1: (0, 100), os.getpid(): (1, 1), 900_001: (os.getpid(), 2), 900_002: (900_001, 4)}
    for pid, (parent, used) in family.items():
        (tmp_path / str(pid)).mkdir()
        fields = ["S", str(parent), *"0" * 9, str(used), "0", "0", "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) name) {' '.join(fields)}\n")
    assert ticks(tmp_path)[2] == 7


def played(
    monkeypatch: pytest.MonkeyPatch, trouble: Mapping[tuple[str, int], BaseException]
) -> list[tuple[str, int]]:
    begun: list[tuple[str, int]] = []

    async def play(contender: Any, fleet: Any, traffic: Any, repeat: int, directory: Path) -> Any:
        begun.append((contender.name, repeat))
        if begun[-1] in trouble:
            raise trouble[begun[-1]]
        return run(contender.name, repeat, 1.0)

    monkeypatch.setattr(compare, "play", play)
    return begun


def test_another_contender_begins_each_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = played(monkeypatch, {})
    compare.main(["--contenders", "router,envoy,envoy:random", "--repeats", "4"])
    names = [name for name, _ in begun]
    assert names[:6] == [
        *("router:completion", "envoy:least_request", "envoy:random"),
        *("envoy:least_request", "envoy:random", "router:completion"),
    ]
    assert names[9:] == names[:3]


@pytest.mark.parametrize(
    ("file", "weighted"), [("live-mixed", True), ("live-mixed-told", True), ("live-equal", False)]
)
def test_envoy_with_weights_is_compared_where_replicas_differ(
    file: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = played(monkeypatch, {})
    assert compare.main(["--quick", "--fleet", str(FLEETS / f"{file}.yaml")]) == 0
    usual = ["router:completion", "envoy:round_robin", "envoy:least_request"]
    more = ["envoy:least_request_weighted"] if weighted else []
    assert [name for name, _ in begun] == [*usual, *more]


@pytest.mark.parametrize("error", [ProcessError("smg died"), aiohttp.ClientError("smg died")])
def test_a_turn_that_fails_does_not_take_the_others_with_it(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, {("envoy:least_request", 0): error})
    file = tmp_path / "made" / "result.json"
    argv = ["--contenders", "router,envoy", "--repeats", "2", "--json", str(file)]
    assert compare.main(argv) == 1
    result = json.loads(file.read_text())
    assert [(one["run"]["name"], one["run"]["repeat"]) for one in result["runs"]] == [
        ("router:completion", 0),
        ("envoy:least_request", 1),
        ("router:completion", 1),
    ]
    assert result["not_run"] == [{"name": "envoy:least_request", "repeat": 0, "why": "smg died"}]


def test_no_turn_at_all_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, {("router:completion", 0): ProcessError("no redis-server found")})
    assert compare.main(["--contenders", "router", "--repeats", "1"]) == 2


def test_ctrl_c_keeps_the_turns_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, {("router:completion", 1): KeyboardInterrupt()})
    file = tmp_path / "result.json"
    argv = ["--contenders", "router", "--repeats", "3", "--json", str(file)]
    assert compare.main(argv) == 130
    (one,) = json.loads(file.read_text())["runs"]
    assert one["run"]["name"] == "router:completion"
    assert "interrupted" in capsys.readouterr().err


def test_complaint_sets_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play(contender: Any, fleet: Any, traffic: Any, repeat: int, directory: Path) -> Any:
        wrong = ["3 requests were not asked about"] if contender.name.startswith("router") else []
        return run(contender.name, repeat, 1.0, complaints=wrong)

    monkeypatch.setattr(compare, "play", play)
    assert compare.main(["--contenders", "router,envoy", "--repeats", "2"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("wrong: 3 requests were not asked about") == 2
    assert "2 did not go as they should" in printed
    assert compare.main(["--contenders", "envoy:random,envoy", "--repeats", "1"]) == 0


def before_nobody(policy: str, directory: Path) -> AbstractAsyncContextManager[Front]:
    simulated = Fleet(fleet.read(FLEETS / "live-equal.yaml"))
    servers = {"gone": f"127.0.0.1:{free_port()}"}
    return EnvoyAlone(policy).running(simulated, servers, directory, 0)


@pytest.mark.process
async def test_an_envoy_that_cannot_reach_a_replica_is_no_fair_contender(tmp_path: Path) -> None:
    async with before_nobody("least_request", tmp_path) as front:
        assert await front.complaints([]) == []
        async with aiohttp.ClientSession() as session, session.get(f"{front.url}/health") as answer:
            assert answer.status == 503
        assert "Envoy counts 2 of upstream_cx_connect_fail" in await front.complaints([])


@pytest.mark.process
async def test_an_envoy_that_does_not_say_what_it_did_is_complained_of(tmp_path: Path) -> None:
    async with before_nobody("round_robin", tmp_path) as front:
        pass
    (complaint,) = await front.complaints([])
    assert "Envoy does not say what it did" in complaint


def test_weights_are_in_proportion_to_speed() -> None:
    simulated = Fleet(fleet.read(FLEETS / "live-mixed.yaml"))
    assert weights(simulated, dict.fromkeys(simulated.speeds, "")) == [100, 100, 22, 22]


SHORT = [
    {
        "timestamp": 100 * number,
        "input_length": 50 + 37 * number % 900,
        "output_length": 5 + 7 * number % 40,
        "max_tokens": None if number % 3 else 64,
    }
    for number in range(30)  # ten a second, whose answers end soon on any replica
]


@pytest.mark.process
@pytest.mark.timeout(300)
def test_quick_on_a_mixed_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace = tmp_path / "new" / "quick.json", tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, SHORT)))
    argv = ["--quick", "--trace", str(trace), "--from", "1", "--speed", "1", "--json", str(file)]
    names = ["router:completion", "envoy:least_request_weighted"]
    status = compare.main([*argv, "--contenders", ",".join(names)])
    said = capsys.readouterr()
    assert status in (0, 1), said
    result = json.loads(file.read_text())
    assert result["not_run"] == []
    runs = {one["run"]["name"]: one for one in result["runs"]}
    assert [*runs] == names
    sent = [
        [(one["at_s"], one["endpoint"], one["prompt_tokens"], one["output_tokens"]) for one in each]
        for each in (one["requests"] for one in runs.values())
    ]
    assert [tokens for *_, tokens in sent[0]] == [one["output_length"] for one in SHORT[10:]]
    assert all(each == sent[0] for each in sent), "the same requests and answers for all"
    for one in runs.values():
        assert one["summary"]["answered"] == one["summary"]["requests"]
        assert 0 <= one["summary"]["hits"] < 1
        assert one["summary"]["imbalance"] >= 1
        assert one["late"].keys() == {"h100-0", "h100-1", "a10-0", "a10-1"}
        assert {request["replica"] for request in one["requests"]} <= one["late"].keys()
        # On a slow machine the router may miss Envoy's deadline.
        late = ("went on without the router's answer", "were not asked about")
        assert [c for c in one["complaints"] if not c.endswith(late)] == []
    ours, *others = runs.values()
    assert any(one["predicted_completion_s"] for one in ours["requests"])
    assert not any(one["predicted_completion_s"] for each in others for one in each["requests"])
    assert "router:completion" in said.out


PEERS = [(name, policy) for name, product in PRODUCTS.items() for policy in product.policies]


@pytest.mark.process
@pytest.mark.parametrize(("name", "policy"), PEERS)
async def test_a_peer_does_its_policy(name: str, policy: str, tmp_path: Path) -> None:
    product = PRODUCTS[name]
    if not product.installed:
        pytest.skip("make peers has not installed it")
    simulated = Fleet(fleet.read(FLEETS / "live-equal.yaml"))
    async with (
        simulated.fresh(tmp_path) as (servers, _),
        Peer(product, policy).running(simulated, servers, tmp_path, 0) as front,
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
        assert "of 9 requests its policies decided" in complaint
