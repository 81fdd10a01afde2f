"""Other endpoint pickers: their command lines, their Envoy files, and checks of their decisions."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from benchmarks.compare import __main__ as compare
from benchmarks.compare.envoy import start_envoy
from benchmarks.compare.pickers import PickerAccount, PickerContender
from benchmarks.compare.products import AIBrix, LlmD
from extproc.lab.harness.pages import samples_of
from extproc.lab.harness.processes import pick_ports

SERVERS = {"a-0": "127.0.0.1:1", "a-1": "127.0.0.1:2"}
PORTS = {"grpc": 11, "health": 12, "http": 13}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name in ("epp", "gateway-plugins"):
        (tmp_path / name).touch(0o755)
    return tmp_path


def test_picker_without_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        compare.main(["--contenders", "llm-d"])
    assert "llm-d needs the program epp" in capsys.readouterr().err


def test_picker_is_found_and_has_a_usual_policy(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare.contender_named("llm-d", programs).name == "llm-d:scorers"
    monkeypatch.setenv("PATH", str(programs))
    assert compare.contender_named("aibrix").name == "aibrix:least-request"
    with pytest.raises(ValueError, match="aibrix has no policy 'pd'"):
        compare.contender_named("aibrix:pd")


def test_llm_d_is_configured_with_replicas_and_policy(tmp_path: Path) -> None:
    words, _ = LlmD().command("affinity", "m", SERVERS, PORTS, tmp_path)
    assert {"--grpc-port=11", "--grpc-health-port=12", "--metrics-port=13"} <= {*words}
    config = yaml.safe_load((tmp_path / "epp.yaml").read_text())
    (discovery,) = (plugin for plugin in config["plugins"] if plugin["type"] == "file-discovery")
    endpoints = yaml.safe_load(Path(discovery["parameters"]["path"]).read_text())["endpoints"]
    assert endpoints[1] == {"name": "a-1", "address": "127.0.0.1", "port": "2"}
    (profile,) = config["schedulingProfiles"]
    assert profile["plugins"] == [
        {"pluginRef": "prefix-cache-affinity-filter"},
        {"pluginRef": "token-load-scorer", "weight": 1},
    ]


def test_aibrix_is_configured_with_replicas_and_policy(tmp_path: Path) -> None:
    words, environment = AIBrix().command("prefix-cache", "m", SERVERS, PORTS, tmp_path)
    assert {"--grpc-bind-address=127.0.0.1:11", "--http-bind-address=127.0.0.1:13"} <= {*words}
    assert environment["ROUTING_ALGORITHM"] == "prefix-cache"
    (model,) = yaml.safe_load((tmp_path / "endpoints.yaml").read_text())["models"]
    assert (model["name"], model["endpoints"]) == ("m", [*SERVERS.values()])


LLM_D_METRICS = """
# TYPE llm_d_epp_ready_endpoints gauge
llm_d_epp_ready_endpoints{name="compare"} 2
# TYPE llm_d_epp_scheduler_attempts_total counter
llm_d_epp_scheduler_attempts_total{status="failure",endpoint_name="",port=""} 4
llm_d_epp_scheduler_attempts_total{status="success",endpoint_name="a-0",port="1"} 3
llm_d_epp_scheduler_attempts_total{status="success",endpoint_name="a-1",port="1"} 5
# TYPE llm_d_epp_plugin_duration_seconds histogram
llm_d_epp_plugin_duration_seconds_count{extension_point="Picker",plugin_type="max-score-picker"} 8
llm_d_epp_plugin_duration_seconds_count{extension_point="Scorer",plugin_type="random-scorer"} 8
llm_d_epp_plugin_duration_seconds_count{extension_point="Filter",plugin_type="unused-filter"} 0
"""


def test_llm_d_is_judged_by_its_metrics() -> None:
    account = LlmD().account("active", samples_of(LLM_D_METRICS), "", SERVERS)
    decided = Counter({"127.0.0.1:1": 3, "127.0.0.1:2": 5})
    assert account == PickerAccount(
        {"active-request-scorer"}, {"random-scorer"}, decided, replicas=2, failed=4
    )


AIBRIX_METRICS = """
# TYPE gateway_request_model_fail_total counter
gateway_request_model_fail_total{status_code="499"} 7
gateway_request_model_fail_total{status_code="503"} 2
"""
AIBRIX_LOG = 'I1122 "request_start" routing_strategy="{}" target_pod="p" target_pod_ip="{}" n=0\n'


def test_aibrix_is_judged_by_its_log_and_server_errors() -> None:
    log = AIBRIX_LOG.format("random", "127.0.0.1:1") * 3
    account = AIBrix().account("least-latency", samples_of(AIBRIX_METRICS), log, SERVERS)
    decided = Counter({"127.0.0.1:1": 3})
    assert account == PickerAccount({"least-latency"}, {"random"}, decided, None, failed=2)


@pytest.mark.parametrize(
    ("account", "complaints"),
    [
        (PickerAccount({"p"}, {"p"}, Counter({"127.0.0.1:1": 2}), 2, 0), []),
        (PickerAccount({"p"}, {"p"}, Counter({"127.0.0.1:1": 9}), None, 0), []),
        (
            PickerAccount({"p"}, {"p", "q"}, Counter({"127.0.0.1:1": 1, "127.0.0.1:2": 1}), 1, 3),
            [
                "the picker decided by ['p', 'q'], not by ['p']",
                "the picker uses 1 of 2 replicas",
                "the picker counts 3 failures",
                "1 requests went to other replicas than the picker chose",
            ],
        ),
    ],
)
def test_picker_decisions_are_compared_with_served_requests(
    account: PickerAccount, complaints: list[str]
) -> None:
    requests = [{"replica": name} for name in ("127.0.0.1:1", "127.0.0.1:1", None)]
    assert account.complaints(requests, SERVERS) == complaints


@pytest.mark.process
@pytest.mark.parametrize("product", [LlmD(), AIBrix()])
async def test_envoy_takes_the_file_of_a_picker(product: LlmD | AIBrix, tmp_path: Path) -> None:
    ports = pick_ports(dict.fromkeys(("envoy", "admin", "grpc", "health", "http"), 0))
    contender = PickerContender(product, product.policies[0], tmp_path)
    bootstrap = contender.bootstrap(ports, SERVERS)
    async with await start_envoy(bootstrap, f"http://127.0.0.1:{ports['admin']}", tmp_path):
        pass
