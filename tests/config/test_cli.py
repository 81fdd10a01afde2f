import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from extproc import __version__
from extproc.cli import main
from tests.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]


def exit_status(argv: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["--version"]) == 0
    assert capsys.readouterr().out == f"extproc {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("serve", "poll", "xds", "replica", "check", "demo"))


def test_help_loads_none_of_the_commands() -> None:
    program = (
        "import sys; from extproc.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(sorted({'pydantic', 'grpc', 'aiohttp', 'numpy', 'uvloop'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "[]\n")


@pytest.mark.parametrize("command", ["serve", "poll", "xds", "check"])
def test_help_of_a_command_lists_the_configuration(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"extproc {command}" in text
    assert "--poll.interval_s VALUE" in text
    assert "(default: 0.2)" in text


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_an_unknown_flag_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["serve", "--poll.intervall_s=3"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'--poll.intervall_s'; did you mean '--poll.interval_s'?" in error


def test_a_wrong_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--poll.interval_s", "soon"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flag --poll.interval_s: poll.interval_s: ")


def start(*argv: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "extproc", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("EXTPROC_")},
    )


@pytest.mark.process
def test_a_missing_tokenizer_is_one_line() -> None:
    with start("serve", "--request.tokenizers", '{"m": "/nowhere/tokenizer.json"}') as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    (line,) = errors.splitlines()
    assert process.returncode == 1
    assert line.startswith("extproc serve: the tokenizer configured for model 'm' does not exist")


@pytest.mark.process
@pytest.mark.parametrize("flag", ["--serve.listen", "--serve.admin"])
def test_an_address_in_use_is_one_line(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        addresses = {"--serve.listen": "127.0.0.1:0", "--serve.admin": "127.0.0.1:0"}
        addresses[flag] = f"127.0.0.1:{port}"
        argv = [word for pair in addresses.items() for word in pair]
        with start("serve", *argv, "--log.level", "error") as process:
            _, errors = process.communicate(timeout=PATIENCE_S)
    (line,) = errors.splitlines()
    assert process.returncode == 1
    assert line.startswith("extproc serve: ")
    assert port in line


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_stops_quietly_when_told(number: signal.Signals) -> None:
    argv = ["--serve.listen", "127.0.0.1:0", "--serve.admin", "127.0.0.1:0"]
    with start("serve", *argv, "--redis.url", "redis://127.0.0.1:1") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("router ready" in line for line in lines)
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in rest
