"""Commands answer help, mistakes and signals on the terminal."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from extproc import __version__
from extproc.cli import main
from extproc.config import REMOVED
from extproc.ground.version import commit
from extproc.lab.harness.processes import flags
from tests.conftest import Cli
from tests.waiting import PATIENCE_S


def test_version_is_printed(cli: Cli) -> None:
    assert cli("--version") == ([f"extproc {__version__} (commit {commit()})"], [])
    assert re.fullmatch("[0-9a-f]{12}", commit())


def test_help_imports_no_heavy_module() -> None:
    program = (
        "import sys; from extproc.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(sorted({'pydantic', 'grpc', 'aiohttp', 'numpy', 'uvloop'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "[]\n")


def test_interrupt_during_the_imports_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> NoReturn:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr("extproc.cli.import_module", interrupted)
    assert main(["explain"]) == 130


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ch"], ["check"]),
        (["serve", "--route.max"], ["--route.max_ttft_s"]),
        (["replicas", ""], ["drain", "list", "undrain"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
    ],
)
def test_bash_completes_commands_and_options(
    words: list[str], completed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = f"""{capsys.readouterr().out}
        COMP_WORDS=(extproc "$@") COMP_CWORD=$#
        function=$(complete -p extproc | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function extproc "${{@: -1}}" ""
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    run = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True)
    assert (sorted(run.stdout.split()), run.stderr) == (completed, "")


@pytest.mark.parametrize(
    ("argv", "usage", "problem"),
    [
        (["completion"], "extproc completion SHELL", "arguments are required: SHELL"),
        ([], "extproc COMMAND [OPTION]...", "extproc: error: the following arguments are required"),
        (["srve"], "extproc COMMAND [OPTION]...", "invalid choice: 'srve'"),
        (["serve", "--poll.intervall_s=3"], "extproc serve [OPTION]...",
         "unknown argument '--poll.intervall_s'; did you mean '--poll.interval_s'?"),
        (["replicas", "list", "--jsn"], "extproc replicas list [OPTION]...",
         "unknown argument '--jsn'; did you mean '--json'?"),
        (["simulate", "--port", "http"], "extproc simulate", "--port: 'http' is not a whole"),
        (["simulate", "--speed", "0"], "extproc simulate", "--speed: '0' is not a number above 0"),
        (["simulate", "--max-loras", "0"], "extproc simulate", "'0' is not a whole number from 1"),
        (["simulate", "--profile", "abacus"], "extproc simulate", "invalid choice: 'abacus'"),
        (["simulate", "--acceptance", "x"], "extproc simulate", "'x' is not a number from 0 to 1"),
        (["simulate", "--acceptance", "2"], "extproc simulate", "'2' is not a number from 0 to 1"),
        (["explain", "--last", "0"], "extproc explain", "--last: '0' is not a whole number from 1"),
        (["explain", "--last", "5", "id"], "extproc explain", "not allowed with argument --last"),
        (["explain", ""], "extproc explain", "the request id is empty"),
        (["explain", " "], "extproc explain", "the request id is empty"),
        (["replicas"], "extproc replicas", "the following arguments are required"),
        (["replicas", "drian"], "extproc replicas", "invalid choice: 'drian'"),
        (["replicas", "drain"], "extproc replicas drain", "the following arguments are required"),
        (["replicas", "drain", "x", "--wait", "soon"], "extproc replicas drain",
         "'soon' is not a number from 0 on"),
        (["demo", "--rate", "inf"], "extproc demo", "--rate: 'inf' is not a number above 0"),
        (["what-if", "record", "--page", "a.html"], "extproc what-if",
         "removed: --json prints all figures"),
    ],
)  # fmt: skip
def test_wrong_argument_prints_usage_and_problem(
    argv: list[str], usage: str, problem: str, cli: Cli
) -> None:
    _, (first, second) = cli(*argv, status=2)
    assert first.startswith(f"usage: {usage}")
    assert problem in second


@pytest.mark.parametrize(
    "command", ["serve", "poll", "eds", "check", "explain", "top", "replicas list"]
)
def test_each_configuration_error_is_one_line(
    command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTPROC_POLL__INTERVAL_S", "soon")
    monkeypatch.setenv("EXTPROC_POLICY", "lmetric")
    _, (unknown, wrong) = cli(*command.split(), status=2)
    name = command.split()[0]
    assert unknown.startswith(f"extproc {name}: variable EXTPROC_POLICY: unknown key 'policy'")
    assert wrong.startswith(f"extproc {name}: variable EXTPROC_POLL__INTERVAL_S: poll.interval_s: ")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("poll --route.policy nonsense", "--route.policy: "),  # a setting of another command
        ("serve --state memory", "no replicas to poll"),
        ('serve --request.tokenizers {"m":"/nope"}',
         "request.tokenizers: the tokenizer of model 'm'"),
        ("serve --serve.admin 127.0.0.1:0 --serve.tls_cert /nope --serve.tls_key /nope",
         "serve.tls_cert: /nope"),
        ("check --serve.tls_cert /nope --serve.tls_key /nope", "serve.tls_cert: /nope"),
        ("check --envoy /nope", "/nope: cannot be read: No such file"),
        ('check --request.tokenizers {"m":"/nope/tokenizer.json"}',
         "request.tokenizers: the tokenizer of model 'm' cannot be read: /nope/"),
        ("replicas list --redis.url nonsense", "not an address of Redis"),
        ("eds --state memory", "state is 'memory'"),
        ("poll --state memory --replicas [a:1]", "the router polls its replicas itself"),
        ("simulate --max-model-len 9000 --kv-tokens 8000", "max_model_len 9000 is more"),
        ("simulate --max-num-seqs 100000", "token budget"),
        ("demo --json file", "--json needs --once"),
    ],
)  # fmt: skip
def test_impossible_setting_exits_with_one_line(argv: str, reason: str, cli: Cli) -> None:
    _, (line,) = cli(*argv.split(), status=2)
    assert line.startswith(f"extproc {argv.split()[0]}: ")
    assert reason in line


def test_check_reports_an_empty_file_however_it_is_named(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "extproc.yaml"
    file.write_text("# nothing yet")
    by_flag, _ = cli("check", "--config", file, status=1)
    monkeypatch.setenv("EXTPROC_CONFIG", str(file))
    assert cli("check", status=1) == (by_flag, [])
    assert by_flag[1].startswith(f"error    {file}: empty: every setting has its default")


def test_replicas_command_refuses_memory_state(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_STATE", "memory")
    _, (line,) = cli("replicas", "list", status=2)
    assert "state is 'memory'" in line


@pytest.mark.parametrize("content", [None, "[10.0.0.1]", "a: ["])
def test_check_reports_unusable_replicas_file(
    content: str | None, tmp_path: Path, cli: Cli
) -> None:
    file, config = tmp_path / "replicas.yaml", tmp_path / "extproc.yaml"
    config.write_text(f"pools: {{batch: {{replicas_file: {file}}}}}")
    if content is not None:
        file.write_text(content)
    (*_, finding), _ = cli("check", "--config", config, status=1)
    assert finding.startswith(f"error    replicas_file {file}: unusable: ")
    file.write_text("[10.0.0.1:8000]")
    cli("check", "--config", config)


_TRACES = ("--traces.endpoint", "http://collector:4318")
_PODS = ("--replicas", "[{kubernetes: {service: vllm, port: 8000}}]")


@pytest.mark.parametrize(
    ("command", "options", "module", "extra"),
    [
        ("check", _TRACES, "opentelemetry.sdk.trace", "traces"),
        ("serve --state memory --replicas [a:1]", _TRACES, "opentelemetry.sdk.trace", "traces"),
        ("check", _PODS, "lightkube", "kubernetes"),
        ("poll", _PODS, "lightkube", "kubernetes"),
        ("serve --state memory", _PODS, "lightkube", "kubernetes"),
    ],
)
def test_missing_extra_is_named_before_anything_runs(
    command: str,
    options: tuple[str, ...],
    module: str,
    extra: str,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    _, (line,) = cli(*command.split(), *options, status=2)
    assert line.endswith(f" not installed: pip install 'extproc[{extra}]'")


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("replica", "use 'extproc simulate'"),
        ("xds", "use 'extproc eds'"),
        ("replicas add 10.0.0.7:8000",
         "edit the file that 'replicas_file' names: pollers follow its changes; to undo a "
         "drain, use 'extproc replicas undrain'"),
        ("replicas remove gpu-7",
         "edit the file that 'replicas_file' names: pollers follow its changes"),
    ],
)  # fmt: skip
def test_removed_command_names_its_replacement(command: str, instead: str, cli: Cli) -> None:
    name = " ".join(command.split()[:2])
    assert cli(*command.split(), status=2) == ([], [f"extproc {name} was removed: {instead}"])


@pytest.mark.parametrize("option", [*map("--{}".format, REMOVED), "--workers"])
def test_removed_option_names_its_replacement(option: str, cli: Cli) -> None:
    _, (_, line) = cli("serve", f"{option}=1", status=2)
    key = option.removeprefix("--")
    assert line.endswith(f"was removed: {REMOVED.get(key) or REMOVED[f'serve.{key}']}")


def start(*argv: str, redirect: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "extproc", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("EXTPROC_")},
    )


@pytest.mark.process
def test_check_logs_nothing_beside_its_findings() -> None:
    argv = ("check", "--live", "--state", "memory", "--replicas", "nowhere.invalid:8000")
    with start(*argv) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (1, "")


@pytest.mark.process
def test_output_that_fits_on_no_disk_is_an_error_of_one_line() -> None:
    with start("completion", "bash", redirect=">/dev/full") as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors == "extproc: cannot write the output: No space left on device\n"


@pytest.mark.process
def test_service_without_standard_input_and_output_stops_in_order() -> None:
    """The event loop would use their numbers for files of its own, and abort when it closes one."""
    with start("eds", *elsewhere(), redirect="<&- >&-") as process:
        assert process.stderr is not None
        assert any("redis is lost" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert "Assertion" not in process.stderr.read()
    assert process.returncode == 0


@pytest.mark.process
def test_command_handles_sigterm_before_its_service_runs(tmp_path: Path) -> None:
    """The first process of a container gets only signals that it handles."""
    os.mkfifo(config := tmp_path / "extproc.yaml")
    with start("eds", "--config", str(config)) as process, config.open("w"):  # opened by both
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (143, "")


@pytest.mark.process
def test_sigterm_during_a_callback_ends_the_command() -> None:
    """Imports run callbacks of weak references, whose exceptions Python only prints."""
    program = """
import signal, weakref
from extproc import cli

def run(_):
    thing = {0}
    seen = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    return 0

cli._run = run
cli.main()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 143


ADDRESSES = ("serve.listen", "serve.admin", "poll.admin", "eds.listen")


def elsewhere(**addresses: str) -> list[str]:
    """Returns flags of a service without Redis: ``addresses``, and free ports for all others."""
    free = dict.fromkeys(ADDRESSES, "127.0.0.1:0")
    return flags({"redis.url": "redis://127.0.0.1:1", **free, **addresses})


@pytest.mark.parametrize("setting", ADDRESSES)
def test_address_in_use_exits_with_one_line(setting: str, cli: Cli) -> None:
    command = setting.partition(".")[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        argv = command, "--log.level=error", *elsewhere(**{setting: address})
        _, (line,) = cli(*argv, status=1)
    assert line.startswith(f"extproc {command}: cannot listen ")
    assert f"on {address} ({setting}): " in line


@pytest.mark.parametrize("command", ["serve", "eds"])
def test_address_of_another_machine_exits_with_the_reason(command: str, cli: Cli) -> None:
    setting, address = f"{command}.listen", "192.0.2.1:50051"
    argv = command, "--log.level=error", *elsewhere(**{setting: address})
    _, (line,) = cli(*argv, status=1)
    assert line.endswith(f"on {address} ({setting}): Cannot assign requested address")


def test_every_command_may_open_many_files() -> None:
    """With few files, a poller or ``check --live`` would find some of a thousand replicas dead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        assert main(["check"]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "number"),
    [("serve", signal.SIGINT), ("poll", signal.SIGTERM), ("eds", signal.SIGTERM)],
)
def test_service_stops_at_a_signal_without_traceback(command: str, number: signal.Signals) -> None:
    with start(command, *elsewhere()) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("redis is lost" in line for line in lines)  # now the signal is awaited
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in rest
