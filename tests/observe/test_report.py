"""``extproc report`` collects what a bug report needs, and no secret."""

import asyncio
import json
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from extproc.config import Config
from extproc.lab.harness.processes import free_port
from extproc.proxy.services import Services
from tests.conftest import Cli
from tests.observe.conftest import Run, decide
from tests.proxy.conftest import router_of

Report = Callable[..., Awaitable[dict[str, str]]]
SECRETS = "hunter2", "swordfish"
REDIS = "redis://{}@127.0.0.1:1/0"


@pytest.fixture
def services() -> Services:
    return router_of(Config())


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXTPROC_REDIS__URL", REDIS.format(SECRETS[0]))
    monkeypatch.setenv("EXTPROC_REDIS__SENTINEL_PASSWORD", SECRETS[1])
    (tmp_path / "uninstalled_in_part-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "report.tar.gz"


@pytest.fixture
def report(bundle: Path, cli: Cli) -> Report:
    async def report(router: str, *arguments: str) -> dict[str, str]:
        words = "report", "--router", router, "--output", bundle, *arguments
        await asyncio.to_thread(cli, *words)
        return unpacked(bundle)

    return report


def unpacked(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        files = [(entry.name, archive.extractfile(entry)) for entry in archive.getmembers()]
        return {Path(name).name: file.read().decode() for name, file in files if file}


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        (REDIS, "router:hunter2"),
        (REDIS, "router:an@hunter2"),
        ("redis://127.0.0.1:1/0?password={}&protocol=3", "hunter2"),
        ("redis://127.0.0.1:1/0?password={}", "an@hunter2"),
    ],
)
async def test_report_has_what_runs_and_no_password(
    services: Services,
    router: str,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    secret: str,
) -> None:
    monkeypatch.setenv("EXTPROC_REDIS__URL", url.format(secret))
    decided = decide(services)
    files = await report(router)
    assert "\npytest " in files["versions.txt"]
    assert yaml.safe_load(files["configuration.yaml"])["redis"]["url"] == url.format("***")
    assert len(json.loads(files["fleet.json"])["replicas"]) == len(services.fleet.members)
    [record] = json.loads(files["decisions.json"])
    assert record["number"] == decided.number
    assert "# TYPE" in files["metrics.txt"] or files["metrics.txt"] == ""
    assert "Redis" in files["findings.txt"]
    [warning] = files["warnings.txt"].splitlines()
    assert warning.startswith("Redis does not answer: this router knows only the last polls")
    assert not any(secret in text for text in files.values() for secret in SECRETS)


async def test_report_without_a_router_says_so(report: Report) -> None:
    address = f"127.0.0.1:{free_port()}"
    files = await report(address)
    assert f"no router answers at http://{address}" in files["router.txt"]
    assert "fleet.json" not in files


async def test_report_has_no_password_of_an_address_on_the_command_line(report: Report) -> None:
    router, envoy = (f"http://ops:{secret}@127.0.0.1:1" for secret in SECRETS)
    files = await report(router, "--envoy-admin", envoy)
    assert "no router answers at http://***@127.0.0.1:1" in files["router.txt"]
    assert "Envoy http://***@127.0.0.1:1: " in files["findings.txt"]


async def test_report_that_cannot_be_written_names_the_file(run: Run, bundle: Path) -> None:
    missing = bundle.parent / "missing" / "report.tar.gz"
    [line] = await run("report", "--output", str(missing), status=1)
    assert line == f"extproc report: cannot write {missing}: No such file or directory"


@pytest.mark.process
def test_report_on_stdout_is_an_archive_and_nothing_else(bundle: Path) -> None:
    """A container with a read-only file system has no other way out."""
    argv = [sys.executable, "-m", "extproc", "report", "--output", "/dev/stdout"]
    with bundle.open("wb") as file:
        subprocess.run(argv, stdout=file, stderr=subprocess.DEVNULL, check=True)
    assert "versions.txt" in unpacked(bundle)
