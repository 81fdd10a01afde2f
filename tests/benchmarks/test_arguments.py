"""Every command refuses senseless values in one line before it begins."""

from pathlib import Path

import pytest

from benchmarks import real_vllm, simulate
from benchmarks.compare import __main__ as compare
from benchmarks.fit import __main__ as fit
from benchmarks.load import __main__ as load
from tests.benchmarks.conftest import complaint_of

COMMANDS = {
    "simulate": (simulate.main, ["--trace", "a", "--fleet", "b"]),
    "load": (load.main, ["--trace", "a", "--url", "http://127.0.0.1:9"]),
    "compare": (compare.main, []),
    "fit": (fit.main, []),
    "real_vllm": (real_vllm.main, ["127.0.0.1:1"]),
}
POSITIVE = ("0", "-1", "inf", "nan", "1e999", "fast", "")
TIME = ("-1", "inf", "nan")
COUNT = ("0", "-1", "1.5", "many")
VALUES = {
    **{f"simulate {name}": POSITIVE for name in ("--speed", "--poll-interval", "--duration")},
    **{f"simulate {name}": TIME for name in ("--share-lag", "--skip")},
    "simulate --until": ("nan", "0"),
    "simulate --routers": COUNT,
    "load --from": TIME,
    "load --stream-share": ("-0.1", "1.1", "nan", "half"),
    "load --context": COUNT,
    "load --url": ("127.0.0.1:8080", "ftp://a", "http://", "", "http://a:99999"),
    "compare --repeats": COUNT,
    "fit --speed": ("0", "nan"),
    "fit --max-num-seqs": COUNT,
    "real_vllm --warm-up": ("-1", "many"),
}
NAMES = {
    "simulate --policy": "completion, ",
    "simulate --know": "lengths, coefficients",
    "load --endpoint": "chat, completions",
    "real_vllm --policy": "completion, ",
}
SERVER = "compare --servers 127.0.0.1:8101"
REFUSED = {
    "compare --contenders router,nginx": (
        "no contender is called 'nginx'; known: router, envoy, observed, vllm-router"
    ),
    "compare --contenders router,envoy:fastest": "envoy has no policy 'fastest'",
    "compare --contenders router,router:fastest": "router has no policy 'fastest'",
    f"{SERVER} --fleet a.yaml": "either --servers or --fleet",
    f"{SERVER} --speeds 1 2": "--speeds needs a speed for each server",
    "compare --model m": "--model and --profile describe running servers",
    "compare --profile llama-8b-h100": "--model and --profile describe running servers",
    f"{SERVER} --contenders envoy:least_request_weighted": "needs the speeds of the servers",
    f"{SERVER} --fault replica-slow": "servers that run already cannot fail",
    "compare --fault router-killed": "--fault",
    "compare --at 3": "--at needs --fault",
    "compare --fault redis-killed --at 16 --duration 16": "must be less than --duration",
    "real_vllm": "required",
    "real_vllm 127.0.0.1": "host:port",
    "real_vllm localhost:8000": "not an IP",
}


@pytest.mark.parametrize("line", REFUSED)
def test_contradicting_arguments_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *given = line.split()
    assert REFUSED[line] in complaint_of(COMMANDS[command][0], capsys, *given)


@pytest.mark.parametrize("argument", VALUES)
def test_senseless_value_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, option = argument.split()
    main, given = COMMANDS[command]
    for value in VALUES[argument]:
        line = complaint_of(main, capsys, *given, f"{option}={value}")
        assert f"argument {option}: {value!r} is not" in line


@pytest.mark.parametrize("argument", NAMES)
def test_unknown_name_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, option = argument.split()
    main, given = COMMANDS[command]
    line = complaint_of(main, capsys, *given, option, "nonsense")
    assert f"argument {option}: 'nonsense' is none of {NAMES[argument]}" in line


@pytest.mark.parametrize("command", ["simulate", "load", "compare"])
def test_unwritable_output_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    main, given = COMMANDS[command]
    file = tmp_path / "file"
    file.touch()
    for option, path in (("--json", tmp_path), ("--report", file), ("--report", file / "report")):
        assert main([*given, option, str(path)]) == 2
        assert str(file if option == "--report" else path) in capsys.readouterr().err
