"""benchmarks.compare: what it makes of runs, what it refuses, and the whole of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import fleet
from benchmarks.compare import __main__ as compare
from benchmarks.compare.envoy import EnvoyAlone
from benchmarks.compare.fleets import Simulated
from benchmarks.compare.peers import PRODUCTS, Peer, trouble
from benchmarks.compare.validity import Ticks, Watched, ticks, validity

FLEETS = Path("benchmarks/fleets")
FLEET = """
replicas:
- {name: fast, profile: llama-8b-h100}
- {name: slow, profile: llama-8b-a10, believed: llama-8b-h100}
"""


def run(name: str, repeat: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A turn in which everything took so long."""
    part = {"mean": seconds, "p99": 2 * seconds}
    machine = {
        "cpu_share": 0.2,
        "cpu_own_share": 0.1,
        "cpu_busiest_second": 0.5,
        "client_late_p99_s": 0.001,
        "replicas_late_p99_s": 0.002,
        "doubts": [],
    }
    return {
        "run": {"name": name, "repeat": repeat},
        "summary": {"ttft_s": part, "completion_s": part, "gap_s": None, "warnings": []},
        "validity": machine,
        "complaints": [],
        "requests": [],
        "load": [],
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
def test_a_contender_that_there_is_not_is_refused(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--contenders", f"router,{name}"])
    assert said in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.peers.INSTALLED", tmp_path)
    with pytest.raises(ValueError, match="smg is not installed: run make peers"):
        compare.contender("smg")


def test_a_kind_alone_is_its_usual_policy() -> None:
    assert compare.contender("router").name == "router:completion"
    assert compare.contender("envoy").name == "envoy:least_request"


def test_peers_that_can_be_installed_are_those_that_are_known() -> None:
    listed = Path("benchmarks/compare/peers.txt").read_text().split()
    assert sorted(one.partition("==")[0] for one in listed) == sorted(PRODUCTS)


def test_events_of_a_fleet_are_not_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--fleet", str(FLEETS / "throttled.yaml"), "--contenders", "envoy"]) == 2
    assert "events" in capsys.readouterr().err


def test_a_router_is_told_what_the_file_believes(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    simulated = Simulated(fleet.read(file))
    assert simulated.profiles == {"fast-0": "llama-8b-h100", "slow-0": "llama-8b-h100"}
    assert simulated.context == 32_768


def test_retries_and_open_breakers_of_a_peer_are_found() -> None:
    page = """
# TYPE smg_worker_retries counter
smg_worker_retries_total{endpoint="chat"} 2
smg_worker_retries_total{endpoint="completions"} 0
# TYPE smg_worker_cb_state gauge
smg_worker_cb_state{worker="http://a"} 1
# TYPE smg_http_requests counter
smg_http_requests_total 7
"""
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    assert trouble(samples) == [
        'its metrics say smg_worker_retries_total{endpoint="chat"} 2',
        'its metrics say smg_worker_cb_state{worker="http://a"} 1',
    ]


def test_a_machine_that_did_not_keep_up_is_doubted() -> None:
    def late(p99: float, lost: float) -> dict[str, Any]:
        return {"late_s": {"mean": p99 / 10, "p99": p99, "max": p99}, "lost_s": lost}

    idle, busy = Watched(Ticks(100, 30, 20)), Watched(Ticks(100, 95, 20))
    good = validity(idle, 0.001, {"a": late(0.002, 0.0), "b": late(0.004, 0.0)})
    assert (good.cpu_share, good.cpu_own_share, good.replicas_late_p99_s) == (0.3, 0.2, 0.004)
    assert good.doubts == []
    bad = validity(busy, 0.2, {"a": late(0.3, 1.5), "b": late(0.004, 0.0)})
    assert bad.doubts == [
        "CPU 95% busy",
        "the client's p99 was 200 ms late",
        "steps' p99 was 300 ms late",
        "replicas lost 1.5 s",
    ]


def test_load_is_told_from_the_clients_first_second_on() -> None:
    seen = [{"at_s": 99.0, "a": {"running": 1}}, {"at_s": 101.5, "a": {"running": 2}}]
    watched = Watched(Ticks(0, 0, 0), load=seen)
    assert watched.load_since(100.0) == [{"at_s": 1.5, "a": {"running": 2}}]


def test_cpu_time_is_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 1 20 60 5 2 2 0 3 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert ticks(tmp_path) == Ticks(total=100, busy=35, own=0)
    assert ticks(tmp_path / "none") == Ticks(0, 0, 0)


def test_what_went_wrong_is_the_exit_status(
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


@pytest.mark.process
async def test_an_envoy_that_cannot_reach_a_replica_is_no_fair_contender(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    simulated = Simulated(fleet.read(FLEETS / "live-equal.yaml"))
    servers = {"gone": f"127.0.0.1:{unused_tcp_port}"}
    async with EnvoyAlone("least_request").running(simulated, servers, tmp_path, 0) as front:
        assert await front.complaints([]) == []
        async with aiohttp.ClientSession() as session, session.get(f"{front.url}/health") as answer:
            assert answer.status == 503
        assert "Envoy counts 2 of upstream_cx_connect_fail" in await front.complaints([])


@pytest.mark.process
@pytest.mark.timeout(300)
def test_quick_on_a_mixed_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quick.json"
    assert compare.main(["--quick", "--json", str(file)]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    result = json.loads(file.read_text())
    runs = {one["run"]["name"]: one for one in result["runs"]}
    assert [*runs] == ["router:completion", "envoy:round_robin", "envoy:least_request"]
    ours, in_turn, least = runs.values()
    sent = [
        [(one["at_s"], one["planned_output_tokens"]) for one in r["requests"]]
        for r in (ours, in_turn, least)
    ]
    assert sent[0] == sent[1] == sent[2]
    for one in runs.values():
        assert one["summary"]["answered"] == one["summary"]["requests"] > 20
        assert one["load"], "replicas were looked at"
        assert one["late"].keys() == {"h100-0", "h100-1", "a10-0", "a10-1"}
    assert all(one["predicted_completion_s"] > 0 for one in ours["requests"])
    assert all(one["predicted_completion_s"] is None for one in in_turn["requests"])
    # What goes where depends little on how busy this machine is, nor does the order of what comes
    # of it: for the same answer an A10 takes four times as long as an H100.
    assert on_fast(ours) > 0.7
    assert on_fast(in_turn) == pytest.approx(0.5, abs=0.05)
    means = [one["summary"]["completion_s"]["mean"] for one in (ours, in_turn)]
    assert means[0] < means[1]
    assert "Completion, mean: router:completion is" in printed


def on_fast(one: Mapping[str, Any]) -> float:
    """Share of the requests that the fast replicas served."""
    replicas: list[str] = [request["replica"] for request in one["requests"]]
    return sum(name.startswith("h100") for name in replicas) / len(replicas)


@pytest.mark.process
@pytest.mark.parametrize("name", PRODUCTS)
async def test_a_peer_serves_every_replica(name: str, tmp_path: Path) -> None:
    product = PRODUCTS[name]
    if not product.installed:
        pytest.skip("make peers has not installed it")
    simulated = Simulated(fleet.read(FLEETS / "live-equal.yaml"))
    async with (
        simulated.fresh(tmp_path) as servers,
        Peer(product, "round_robin").running(simulated, servers, tmp_path, 0) as front,
        aiohttp.ClientSession() as session,
    ):
        served = set()
        for number in range(8):
            body = {"model": simulated.model, "prompt": f"number {number}", "max_tokens": 2}
            async with session.post(f"{front.url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                served.add(answer.headers["x-served-by"])
        assert served == {*servers.values()}
        assert await front.complaints([{}] * 8) == []
        (complaint,) = await front.complaints([{}] * 9)
        assert "of 9 requests its policies decided" in complaint
