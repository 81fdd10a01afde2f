"""Arguments of the commands: senseless values and wrong files are refused in one line before a
command begins, and results have the origin of their figures."""

import gzip
import re
from pathlib import Path
from subprocess import check_call

import pytest

from benchmarks import real_vllm, simulate
from benchmarks.arguments import about
from benchmarks.compare import __main__ as compare
from benchmarks.fit import __main__ as fit
from benchmarks.load import __main__ as load
from tests.benchmarks.conftest import CONVERSATION, MIXED, complaint_of

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
SERVER = "compare --servers 127.0.0.1:8101"
REFUSED = {
    "simulate --policy nonsense": "argument --policy: 'nonsense' is none of completion, ",
    "simulate --know nonsense": "argument --know: 'nonsense' is none of lengths, coefficients",
    "load --endpoint nonsense": "argument --endpoint: 'nonsense' is none of chat, completions",
    "real_vllm --policy nonsense": "argument --policy: 'nonsense' is none of completion, ",
    "simulate --trace a --fleet b --from 9 --until 5": "--until 5 is not after --from 9",
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


@pytest.fixture(autouse=True)
def _nothing_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(*_: object) -> None:
        raise AssertionError("the simulation began")

    monkeypatch.setattr("benchmarks.simulate._play", play)


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


def complaint(capsys: pytest.CaptureFixture[str], *given: str | Path) -> str:
    return complaint_of(simulate.main, capsys, "--trace", CONVERSATION, "--fleet", MIXED, *given)


REQUEST = '{"timestamp": 0, "input_length": 5, "output_length": 3}\n'
FIELDS = ('"hash_ids": 5', '"hash_ids": "12"', '"hash_ids": [[1]]', '"max_tokens": "many"')
LINES = (
    *("5", "[1]", "null", "{", '{"timestamp": 0}'),
    *(REQUEST.replace("}", f", {field}}}") for field in FIELDS),
    *(REQUEST.replace(": 0", f": {at}", 1) for at in ("NaN", "Infinity", "-1")),
)


@pytest.mark.parametrize("line", LINES)
def test_line_without_request_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(REQUEST + line.strip() + "\n")
    assert f"{trace}:2 is no request of a trace" in complaint(capsys, "--trace", trace)


def test_unreadable_trace_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cut, plain, binary = (tmp_path / name for name in ("cut.gz", "plain.gz", "binary.jsonl"))
    cut.write_bytes(gzip.compress(REQUEST.encode() * 1000)[:-20])
    plain.write_text(REQUEST)
    binary.write_bytes(b"\xff\xfe\xfd")
    for trace in (cut, plain, binary, tmp_path / "none.jsonl"):
        assert str(trace) in complaint(capsys, "--trace", trace)

    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert f"{empty} has no requests" in complaint(capsys, "--trace", empty)


GROUP = "{name: a, profile: llama-8b-a10}"
FLEETS = {
    f"replicas: [{GROUP}, {GROUP}]": "'a'",
    "replicas: [{name: a, profile: llama-8b-a1}]": "did you mean 'llama-8b-a10'?",
    "replicas: [{name: a, profile: llama-8b-a10, count: 0}]": "replicas.0.count: ",
    "replicas: [{name: a, profile: llama-8b-a10, size: 3}]": "replicas.0.size: ",
    "replicas: [{name: a, profile: llama-8b-a10, draft_tokens: 8}]": "token budget 2048",
    "replicas: []": "replicas: ",
    "[": "line 1",
    "": "dictionary",
    **{
        f"replicas: [{GROUP}]\nevents: [{{replica: a-0, {event}}}]": "events.0"
        for event in (
            *("at: .inf, down", "at: .nan, down", "at: 1, slow: .inf", "at: 1, slow: 0"),
            *("at: 1", "at: 1, slow: 2, down"),
        )
    },
    f"replicas: [{GROUP}]\nevents: [{{at: 1, replica: b-0, down}}]": "no replica is called 'b-0'",
}


@pytest.mark.parametrize(("text", "wrong"), FLEETS.items())
def test_wrong_fleet_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, wrong: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    line = complaint(capsys, "--fleet", file)
    assert str(file) in line
    assert wrong in line


def test_result_has_command_and_versions() -> None:
    made = about("benchmarks.load", ["--url", "http://a b"])
    assert made["command"] == "python -m benchmarks.load --url 'http://a b'"
    assert {"python", "extproc", "grpcio", "numpy"} <= made["versions"].keys()


def test_result_has_commit_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.arguments._ROOT", tmp_path)
    assert about("benchmarks.load", [])["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("as committed")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        check_call([*git, *command])
    commit = about("benchmarks.load", [])["commit"]
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "file").write_text("changed")
    assert about("benchmarks.load", [])["commit"] == f"{commit}-dirty"
