"""``extproc check --live`` against a real Redis, pollers, replicas and Envoy."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.cli import main
from extproc.config import Config
from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.processes import free_port
from extproc.lab.harness.stack import FLEET, SimulatedReplica
from extproc.share import assignment
from extproc.share.connection import connect
from tests.conftest import RedisServer
from tests.e2e.stack import EdsStack, Stack, patient
from tests.envoy.watched_files import bootstrap, split
from tests.poll.polling import SOON, config, watching
from tests.poll.replica import hang, models, page, serving, text
from tests.share.servers import command
from tests.waiting import until

pytestmark = pytest.mark.process

Check = Callable[..., Awaitable[list[str]]]
WORKED = page() + "vllm:generation_tokens_total 9.0\nvllm:request_success_total 1.0\n"
LACKING = WORKED.replace("cache_config_info", "-")
PAIR = [SimulatedReplica(name, FLEET[0].profile) for name in ("one", "two")]


def written(file: Path, settings: Config) -> Path:
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True)))
    return file


def alone(*replicas: object, **more: object) -> Config:
    """Settings of a router without Redis."""
    return Config.model_validate({"state": "memory", "replicas": replicas, **more})


@pytest.fixture(autouse=True)
def heartbeats_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps pollers alive on a busy machine."""
    monkeypatch.setattr(assignment, "LIFE_S", 60.0)


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    async def check(settings: Config | Path, *arguments: str, status: int = 0) -> list[str]:
        """The findings it prints."""
        if isinstance(settings, Config):
            settings = written(tmp_path / "extproc.yaml", settings)
        argv = ["check", "--config", str(settings), *(arguments or ("--live",))]
        capsys.readouterr()
        assert await asyncio.to_thread(main, argv) == status
        output = capsys.readouterr()
        lines = output.out.splitlines()
        return [one for one in lines if re.match(r"(error|warning|ok) ", one)]

    return check


def bad(lines: list[str]) -> list[str]:
    """Errors and warnings, which stand in this order."""
    levels = [line.split()[0] for line in lines]
    assert levels == sorted(levels, key=("error", "warning", "ok").index)
    return [line for line in lines if not line.startswith("ok ")]


async def test_nothing_is_wrong(redis_server: RedisServer, check: Check) -> None:
    async with serving() as one:
        settings = config(redis_server, one)
        async with watching(settings) as seen:
            await seen.until(lambda states: set(states) == {one.id})
            redis, replica = await check(settings)
    assert re.fullmatch(
        r"ok +redis 127\.0\.0\.1:\d+: answers in [\d.]+ ms; "
        r"pool default: 1 pollers alive, 1 replicas",
        redis,
    )
    assert re.fullmatch(rf"ok +replica {one.id}: scraped in \d+ ms; serves tiny, adapter", replica)


async def test_it_changes_nothing(redis_server: RedisServer, check: Check) -> None:
    async with serving() as one:
        await check(config(redis_server, one), status=1)
    async with connect(redis_server.url, "default") as redis:
        assert await redis.keys("*") == []


async def test_no_poller_is_alive(redis_server: RedisServer, check: Check) -> None:
    async with serving() as one:
        lines = bad(await check(config(redis_server, one), status=1))
    assert "no poller of the pool 'default' is alive" in lines[0]
    assert f"replica {one.id}: no poller scrapes it" in lines[1]


async def test_redis_is_away(stopped_redis: RedisServer, check: Check) -> None:
    async with serving() as one:
        error, *_ = bad(await check(config(stopped_redis, one), status=1))
    assert f"redis 127.0.0.1:{stopped_redis.port}: " in error
    assert "Start it, or correct redis.url; a single router needs no Redis" in error


@pytest.mark.parametrize(
    "rule", ["resetkeys ~{other}:*", "resetchannels", "-@write", "-@scripting", "-@pubsub"]
)
async def test_redis_refuses_what_is_needed(
    redis_server: RedisServer, check: Check, rule: str
) -> None:
    async with connect(redis_server.url, "default") as redis:
        await command(redis, "ACL", "SETUSER", "default", *rule.split())
    async with serving() as one:
        error, *_ = bad(await check(config(redis_server, one), status=1))
    assert "refuses a command of routers and pollers: " in error


async def test_the_rights_that_the_docs_list_suffice(
    redis_server: RedisServer, check: Check
) -> None:
    text = (Path(__file__).parents[2] / "docs/operations/secure.md").read_text()
    found = re.search(r"^ACL SETUSER extproc on >PASSWORD (.*)$", text, re.MULTILINE)
    assert found
    async with connect(redis_server.url, "default") as redis:
        await command(redis, "ACL", "SETUSER", "extproc", "on", ">secret", *found[1].split())
    url = redis_server.url.replace("//", "//extproc:secret@")
    settings = Config.model_validate({"redis": {"url": url}})
    lines = await check(settings, status=1)  # there is neither poller nor replica
    assert any("0 pollers alive" in line for line in lines)
    assert not any("refuses" in line for line in lines)


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/health", text("", 503), "error .*: /health answered 503: it gets no requests. Start it"),
        ("/metrics", text("up 1\n"), "error .*num_requests_running: is this vLLM"),
        ("/metrics", hang, "error .*: /metrics did not answer in full in 2.4 s: it gets no"),
        ("/metrics", text(LACKING), "warning .*: lacks the size of its KV cache"),
        ("/metrics", text(WORKED.replace("iteration", "-")), "warning .*: lacks the number of"),
        ("/v1/models", text("{}"), "warning .*: /v1/models is not a list of models"),
    ],
)
async def test_what_a_replica_lacks_is_told(
    redis_server: RedisServer, check: Check, path: str, answer: Any, problem: str
) -> None:
    async with serving() as one:
        one.answers[path] = answer
        settings = config(redis_server, one, poll=SOON)
        async with watching(settings) as seen:
            await seen.until(lambda states: set(states) == {one.id})
            (line,) = bad(await check(settings, status=int(problem.startswith("error"))))
    assert re.match(problem, re.sub(" +", " ", line))


async def test_what_pollers_see_otherwise_is_told(redis_server: RedisServer, check: Check) -> None:
    async with serving() as one:
        settings = config(redis_server, one)
        async with watching(settings) as seen:
            await seen.until(lambda states: set(states) == {one.id})
            one.answers["/health"] = text("", 503)
            await seen.replica(one, healthy=False)
        one.answers["/health"] = text("")
        lines = bad(await check(settings, status=1))
    assert any("but not to the pollers: /health answered 503" in line for line in lines)


async def test_models_that_nothing_serves_are_told(check: Check) -> None:
    async with serving() as one:
        for names, status in ((["tiny"], 0), (["tiny", "large"], 1)):
            settings = alone(one.id, route={"models": {"chat": names}})
            lines = bad(await check(settings, status=status))
            missing = "model large: no reachable replica lists this model"
            assert any(missing in line for line in lines) is (status == 1)


LLAMA = {
    "llama": ["gpu-1", "gpu-2"],
    "gpt-4o": "llama",
    "chat": {"llama": 95, "next": 5, "later": 0},
    "beta": {"beta": 95, "next": 5},
}


@pytest.mark.parametrize(
    ("served", "told"),
    [
        ("gpu-1 gpu-2 next beta", {}),
        ("gpu-1 next beta", {"gpu-2: other": {"llama", "gpt-4o", "chat"}}),
        ("gpu-1 gpu-2 beta", {"next: other": {"chat", "beta"}}),
        ("next beta",
         {f"{gpu}: 404": {"llama", "gpt-4o"} for gpu in ("gpu-1", "gpu-2")}
         | {f"{gpu}: other": {"chat"} for gpu in ("gpu-1", "gpu-2")}),
    ],
)  # fmt: skip
async def test_names_lead_to_what_replicas_serve(
    check: Check, served: str, told: dict[str, set[str]]
) -> None:
    async with serving() as one:
        one.answers["/v1/models"] = models(*served.split())
        settings = alone(one.id, route={"models": LLAMA})
        lines = bad(await check(settings, status=int(bool(told))))
    found: dict[str, set[str]] = {}
    for line in lines:
        said = re.search(r" model (\S+:) .* requests for (\S+) .*\b(404|other)\b", line)
        assert said, line
        found.setdefault(f"{said[1]} {said[3]}", set()).add(said[2])
    assert found == told


async def test_names_that_lead_nowhere_are_told(check: Check) -> None:
    settings = alone("nowhere.invalid:8000", replicas_file="/nope.yaml")
    text = "\n".join(bad(await check(settings, status=1)))
    reason = r"\((the name has no address|\[Errno .+)\)"  # as a name server answers, or none does
    assert re.search(rf"replica nowhere.invalid:8000: has no address {reason}: ", text)
    assert "replicas_file /nope.yaml: unusable: " in text
    assert "no replica is known" in text


async def test_why_kubernetes_does_not_tell_is_told(check: Check) -> None:
    source = {"kubernetes": {"service": "vllm", "namespace": "gpu", "port": 8000}}
    error, _ = bad(await check(alone(source), status=1))
    assert "Service gpu/vllm, port 8000: has no address (" in error
    assert "a pod has it that has a service account" in error  # this is none


class WatchingStack(EdsStack):
    """A system whose Envoy has listeners and clusters from files, too."""

    def _bootstrap(self) -> Bootstrap:
        whole = yaml.safe_load(patient(yaml.safe_dump(super()._bootstrap())))
        live = self.directory / "live"
        split(whole, live)
        return bootstrap(whole, live)


@pytest.mark.parametrize("kind", [Stack, WatchingStack])
async def test_an_envoy_that_runs_is_judged_as_its_file_is(
    check: Check, tmp_path: Path, kind: Callable[..., Stack]
) -> None:
    async with kind(tmp_path, PAIR) as stack:
        asked = stack.config_file, "--envoy-admin", stack.envoy_admin
        lines = await check(*asked)
        assert all("message_timeout is 10 s" in one for one in bad(lines))  # tests are patient
        ok = [line for line in lines if line.startswith("ok ")]
        assert any("Requests go where the router says" in line for line in ok)
        await stack.process("router").kill()
        await until(lambda: _ill(stack.envoy_admin))
        error, *_ = bad(await check(*asked, status=1))
        assert "cluster 'router' has no healthy member" in error


async def _ill(envoy_admin: str) -> bool:
    async with aiohttp.request("GET", f"{envoy_admin}/clusters") as response:
        return "failed_active_hc" in await response.text()


async def test_members_that_only_one_side_has_are_told(check: Check, tmp_path: Path) -> None:
    async with Stack(tmp_path, PAIR) as stack, serving() as three:
        other = yaml.safe_load(stack.config_file.read_text())
        other |= {"state": "memory", "replicas": [stack.address("one"), three.id]}
        file = written(tmp_path / "other.yaml", Config.model_validate(other))
        error, *warnings = bad(await check(file, "--envoy-admin", stack.envoy_admin, status=1))
    assert f"no cluster has the member {three.id}, which routers choose" in error
    stranger = f"cluster 'replicas' has the member {stack.address('two')}, which no poller knows"
    assert any(stranger in one for one in warnings)


@pytest.mark.parametrize("answer", ["nothing", "something else"])
async def test_what_is_no_envoy_is_told(check: Check, answer: str) -> None:
    async with serving() as one:
        one.answers |= {"/config_dump": text("[]"), "/clusters": text("{}")}
        url = f"http://{one.id}" if answer != "nothing" else f"http://127.0.0.1:{free_port()}"
        error, *_ = bad(await check(alone(one.id), "--envoy-admin", url, status=1))
    assert f"Envoy {url}: " in error
    assert "is this its admin address?" in error


async def test_what_envoy_refused_is_told(check: Check) -> None:
    types = "type.googleapis.com/envoy.admin.v3."
    state = {"details": "duplicate address 0.0.0.0:8080"}
    listeners = [{"name": "openai", "error_state": state}]
    dump = [
        {"@type": f"{types}BootstrapConfigDump", "bootstrap": {"static_resources": {}}},
        {"@type": f"{types}ListenersConfigDump", "dynamic_listeners": listeners},
    ]
    async with serving() as one:
        one.answers["/config_dump"] = text(json.dumps({"configs": dump}))
        one.answers["/clusters"] = text('{"cluster_statuses": []}')
        errors = bad(await check(alone(one.id), "--envoy-admin", f"http://{one.id}", status=1))
    assert any("Envoy refused an update" in error for error in errors)
    assert any("duplicate address 0.0.0.0:8080" in error for error in errors)
