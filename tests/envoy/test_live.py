"""``extproc check --live`` with a real Redis, pollers, replicas and Envoy."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.envoy import live, live_envoy
from extproc.ground.clock import monotonic
from extproc.lab.harness.envoy_config import Bootstrap, socket_address
from extproc.lab.harness.processes import free_port
from extproc.lab.harness.stack import FLEET, SimulatedReplica
from extproc.observe.admin import serve_admin
from extproc.replica_state import ReplicaState
from extproc.share import assignment
from extproc.share.connection import Keys, connect
from extproc.share.drains import DrainStore
from extproc.share.replicas import StateWriter
from tests.conftest import Cli, RedisServer
from tests.e2e.stack import EdsStack, PatientStack, here, patient
from tests.envoy.members import EnvoyMembers
from tests.envoy.test_check import EditableBootstrap, dump_of
from tests.envoy.watched_files import bootstrap, split
from tests.poll.polling import SOON, config, watching
from tests.poll.replica import ScriptedReplica, hang, models, page, serving, text
from tests.share.servers import Refuse, command, each_refusal
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
    return Config.model_validate({"state": "memory", "replicas": replicas, **more})


@pytest.fixture(autouse=True)
def long_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pollers alive on a busy machine."""
    monkeypatch.setattr(assignment, "LIFE_S", 60.0)


@pytest.fixture
def check(tmp_path: Path, cli: Cli) -> Check:
    async def check(settings: Config | Path, *arguments: str, status: int = 0) -> list[str]:
        """Run ``extproc check`` beside the admin address of a router; return the printed
        findings."""
        if isinstance(settings, Config):
            settings = written(tmp_path / "extproc.yaml", settings)
        argv = ["check", "--config", str(settings), *(arguments or ("--live",))]
        async with serve_admin("127.0.0.1:0", CollectorRegistry()) as admin:
            argv += [] if "--serve.admin" in argv else ["--serve.admin", admin]
            lines, _ = await asyncio.to_thread(cli, *argv, status=status)
        return [line for line in lines if re.match(r"(error|warning|ok) ", line)]

    return check


async def add_router(server: RedisServer) -> None:
    """Write a router's key in Redis, without an expiry, so that the router counts as alive."""
    async with connect(server.url, "default") as redis:
        await redis.set(Keys("default").router + "a", b"its digest")


def bad(lines: list[str]) -> list[str]:
    """Return errors and warnings, but not the one about the long ``message_timeout`` of tests;
    assert that findings are sorted."""
    levels = [line.split()[0] for line in lines]
    assert levels == sorted(levels, key=("error", "warning", "ok").index)
    patience = "message_timeout is 10 s"
    return [line for line in lines if not line.startswith("ok ") and patience not in line]


async def test_healthy_system_has_only_ok_findings(redis_server: RedisServer, check: Check) -> None:
    async with serving() as replica:
        settings = config(redis_server, replica)
        async with watching(settings) as seen:
            await seen.until(lambda states: set(states) == {replica.id})
            await add_router(redis_server)
            redis_line, replica_line = await check(settings)
    assert re.fullmatch(
        r"ok +redis 127\.0\.0\.1:\d+: answers in [\d.]+ ms; "
        r"pool default: 1 routers and 1 pollers alive, 1 replicas",
        redis_line,
    )
    assert re.fullmatch(
        rf"ok +replica {replica.id}: scraped in \d+ ms; serves tiny, adapter", replica_line
    )


async def test_missing_router_and_poller_are_errors(
    redis_server: RedisServer, check: Check
) -> None:
    async with serving() as replica:
        router, poller = bad(await check(config(redis_server, replica), status=1))
    assert "no router of the pool 'default' is alive" in router
    assert "no poller of the pool 'default' is alive" in poller
    async with connect(redis_server.url, "default") as redis:
        assert await redis.keys("*") == [], "the check writes nothing"


async def test_replica_that_no_poller_scrapes_is_error(
    redis_server: RedisServer, check: Check
) -> None:
    polled = ScriptedReplica()
    async with serving() as other, watching(config(redis_server, polled)) as seen:
        await seen.until(lambda states: set(states) == {polled.id})
        await add_router(redis_server)
        _, line = bad(await check(config(redis_server, other), status=1))
    assert f"replica {other.id}: no poller scrapes it: it gets no requests" in line


async def test_replica_that_only_pollers_reach_is_no_error(
    redis_server: RedisServer, check: Check
) -> None:
    far = ReplicaState(id=f"127.0.0.1:{free_port()}", models=("tiny",), life_s=60.0)
    async with connect(redis_server.url, "default") as redis:
        await StateWriter(redis, "default", far.life_s).put([far])
    await add_router(redis_server)
    settings = config(redis_server, route={"models": {"chat": "tiny"}})
    no_poller, line = bad(await check(settings, status=1))
    assert "no poller" in no_poller
    refused = "cannot connect: connection refused. Pollers reach it: run this command on"
    assert line.startswith(f"warning  replica {far.id}: {refused}")


async def test_many_replicas_are_scraped_a_few_at_a_time(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, most = 0, 0

    async def metrics(request: web.Request) -> web.StreamResponse:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0.02)  # so that scrapes overlap
        asked -= 1
        return await text(page())(request)

    monkeypatch.setattr(live, "_AT_ONCE", 2)
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(serving()) for _ in range(6)]
        for replica in replicas:
            replica.answers["/metrics"] = metrics
        assert bad(await check(alone(*(replica.id for replica in replicas)))) == []
    assert most == 2


async def test_missing_router_without_redis_is_error(check: Check) -> None:
    async with serving() as replica:
        admin = f"127.0.0.1:{free_port()}"
        lines = bad(await check(alone(replica.id), "--live", "--serve.admin", admin, status=1))
    assert lines == [
        f"error    router {admin}: no router answers there: Envoy's fallback policy serves all "
        "requests. Run 'extproc serve', or correct serve.admin"
    ]


async def test_unreachable_redis_is_error(stopped_redis: RedisServer, check: Check) -> None:
    async with serving() as replica:
        error, *_ = bad(await check(config(stopped_redis, replica), status=1))
    assert f"redis 127.0.0.1:{stopped_redis.port}: " in error
    assert "Start it, or correct redis.url; a single router needs no Redis" in error


@pytest.mark.parametrize(
    "rule", ["resetkeys ~{other}:*", "resetchannels", "-@write", "-@scripting", "-@pubsub"]
)
async def test_missing_right_in_redis_is_error(
    redis_server: RedisServer, check: Check, rule: str
) -> None:
    async with connect(redis_server.url, "default") as redis:
        await command(redis, "ACL", "SETUSER", "default", *rule.split())
    async with serving() as replica:
        error, *_ = bad(await check(config(redis_server, replica), status=1))
    assert "refuses a command of routers and pollers: " in error


@each_refusal
async def test_redis_that_stores_nothing_is_error(
    redis_server: RedisServer, check: Check, refuse: Refuse
) -> None:
    async with connect(redis_server.url, "default") as redis, serving() as replica:
        await refuse(redis)
        error, *_ = bad(await check(config(redis_server, replica), status=1))
    assert " stores nothing: " in error
    assert "Read its log, or give it more memory" in error


async def test_documented_rights_suffice(redis_server: RedisServer, check: Check) -> None:
    text = (Path(__file__).parents[2] / "docs/operations/secure.md").read_text()
    found = re.search(r"^ACL SETUSER extproc on >PASSWORD (.*)$", text, re.MULTILINE)
    assert found
    async with connect(redis_server.url, "default") as redis:
        await command(redis, "ACL", "SETUSER", "extproc", "on", ">secret", *found[1].split())
    url = redis_server.url.replace("//", "//extproc:secret@")
    settings = Config.model_validate({"redis": {"url": url}})
    lines = await check(settings, status=1)  # no poller runs, and no replica is known
    assert any("0 pollers alive" in line for line in lines)
    assert not any("refuses" in line for line in lines)


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/health", text("", 503), "error .*: /health answered 503: it gets no requests. Start it"),
        ("/metrics", text("up 1\n"), "error .*num_requests_running: is this vLLM"),
        ("/metrics", hang, "error .*: /metrics did not answer within 2.4 s: it gets no"),
        ("/metrics", text(LACKING), "warning .*: lacks the size of its KV cache"),
        ("/metrics", text(WORKED.replace("iteration", "-")), "warning .*: lacks the number of"),
        ("/metrics", text(page(asleep=True)), "warning .*: its engine sleeps: it gets no requests"),
        ("/v1/models", text("{}"), "warning .*: /v1/models is not a list of models"),
    ],
)
async def test_unhealthy_or_incomplete_replica_is_reported(
    redis_server: RedisServer, check: Check, path: str, answer: Any, problem: str
) -> None:
    async with serving() as replica:
        replica.answers[path] = answer
        settings = config(redis_server, replica, poll=SOON)
        async with watching(settings) as seen:
            await seen.until(lambda states: set(states) == {replica.id})
            await add_router(redis_server)
            (line,) = bad(await check(settings, status=int(problem.startswith("error"))))
    assert re.match(problem, re.sub(" +", " ", line))


async def test_unhealthy_and_draining_states_of_pollers_are_reported(
    redis_server: RedisServer, check: Check
) -> None:
    async with serving() as replica, serving() as drained:
        settings = config(redis_server, replica, drained)
        async with connect(redis_server.url, "default") as redis, watching(settings) as seen:
            await seen.until(lambda states: len(states) == 2)
            replica.answers["/health"] = text("", 503)
            await seen.replica(replica, healthy=False)
            await DrainStore(redis, "default").write({drained.id: True})
            await seen.replica(drained, draining=True)
        replica.answers["/health"] = text("")
        lines = bad(await check(settings, status=1))
    assert any("but pollers report: /health answered 503" in line for line in lines)
    assert any(f"replica {drained.id}: draining: it gets no new" in line for line in lines)


LLAMA = {
    "llama": ["gpu-1", "gpu-2"],
    "gpt-4o": "llama",
    "chat": {"llama": 95, "next": 5, "later": 0},
    "beta": {"beta": 95, "next": 5},
}


@pytest.mark.parametrize(
    ("served", "unserved"),
    [
        ("gpu-1 gpu-2 next beta", {}),
        ("gpu-1 next beta", {"gpu-2: other": {"llama", "gpt-4o", "chat"}}),
        ("gpu-1 gpu-2 beta", {"next: other": {"chat", "beta"}}),
        ("next beta",
         {f"{gpu}: 404": {"llama", "gpt-4o"} for gpu in ("gpu-1", "gpu-2")}
         | {f"{gpu}: other": {"chat"} for gpu in ("gpu-1", "gpu-2")}),
    ],
)  # fmt: skip
async def test_each_model_name_leads_to_served_model(
    check: Check, served: str, unserved: dict[str, set[str]]
) -> None:
    async with serving() as replica:
        replica.answers["/v1/models"] = models(*served.split())
        settings = alone(replica.id, route={"models": LLAMA})
        lines = bad(await check(settings, status=int(bool(unserved))))
    found: dict[str, set[str]] = {}
    for line in lines:
        match = re.search(r" model (\S+:) .* requests for (\S+) .*\b(404|other)\b", line)
        assert match, line
        found.setdefault(f"{match[1]} {match[3]}", set()).add(match[2])
    assert found == unserved


async def test_unresolvable_replica_and_missing_file_are_errors(check: Check) -> None:
    settings = alone("nowhere.invalid:8000", replicas_file="/nope.yaml")
    text = "\n".join(bad(await check(settings, status=1)))
    reason = r"\((the name has no address|\[Errno .+)\)"  # with and without a name server
    assert re.search(rf"replica nowhere.invalid: has no address {reason}: ", text)
    assert "replicas_file /nope.yaml: unusable: " in text
    assert text.count("/nope.yaml") == 1
    assert "no replica is known: requests wait for one, or Envoy's fallback policy" in text


async def test_service_that_cannot_be_read_is_an_error_with_the_reason(check: Check) -> None:
    """This test runs in no pod, so it has no service account."""
    settings = alone({"kubernetes": {"service": "vllm", "port": 8000}})
    text = "\n".join(bad(await check(settings, status=1)))
    reason = r"\(.+: give the pod a service account.+\)"
    assert re.search(rf"replica Service vllm, port 8000: has no address {reason}: ", text)


@pytest.mark.parametrize(("problem", "status"), [("", 0), ("refused", 1)])
async def test_source_that_pollers_read_is_only_a_warning(
    redis_server: RedisServer, check: Check, problem: str, status: int
) -> None:
    source = "Service vllm, port 8000"
    problems = [f"{source}: {problem}"] if problem else []
    async with serving() as replica:
        state = ReplicaState(id=replica.id, models=("tiny",), life_s=60.0)
        async with connect(redis_server.url, "default") as redis:
            await StateWriter(redis, "default", state.life_s).put([state])
            poller = assignment.Assigner(redis, "default", "host:1:0a", monotonic)
            await poller.beat([replica.id], problems)
        await add_router(redis_server)
        settings = config(redis_server).model_dump(mode="json", exclude_unset=True)
        settings["replicas"] = [{"kubernetes": {"service": "vllm", "port": 8000}}]
        (line,) = bad(await check(Config.model_validate(settings), status=status))
    level = "error   " if problem else "warning "
    assert line.startswith(f"{level} replica {source}: has no address")
    assert line.endswith("on the machine of a poller") == (not problem)


class WatchingStack(EdsStack):
    """A stack whose Envoy has listeners and clusters from watched files."""

    def _bootstrap(self) -> Bootstrap:
        whole = yaml.safe_load(patient(yaml.safe_dump(super()._bootstrap())))
        live = self.directory / "live"
        split(whole, live)
        return bootstrap(whole, live)


@pytest.mark.parametrize("kind", [PatientStack, WatchingStack])
async def test_running_envoy_is_checked_like_its_file(
    check: Check, tmp_path: Path, kind: Callable[..., PatientStack]
) -> None:
    async with kind(tmp_path, here(PAIR)) as stack:
        names = {stack.address(name): name for name in ("one", "two")}
        await EnvoyMembers(stack.envoy_admin, names).have(one="HEALTHY", two="HEALTHY")
        arguments = stack.config_file, "--envoy-admin", stack.envoy_admin
        lines = await check(*arguments)
        assert bad(lines) == []
        ok = [line for line in lines if line.startswith("ok ")]
        assert any("The replicas' cluster can obey the router" in line for line in ok)
        dump = tmp_path / "dump.json"
        async with aiohttp.request("GET", f"{stack.envoy_admin}/config_dump") as response:
            dump.write_bytes(await response.read())
        judged = bad(await check(stack.config_file, "--envoy", str(dump)))
        assert judged == []
        await stack.process("router").kill()
        await until(lambda: _unhealthy(stack.envoy_admin))
        # Once the router's presence in Redis has expired, that is an error of its own.
        errors = "\n".join(bad(await check(*arguments, status=1)))
        assert "cluster 'router' has no healthy member (127.0.0.1:" in errors
        errors = "\n".join(bad(await check(*arguments, "--serve.listen", "127.0.0.1:1", status=1)))
        assert "and the router listens at 1 (serve.listen)" in errors
        assert "no healthy member" not in errors


async def _unhealthy(envoy_admin: str) -> bool:
    async with aiohttp.request("GET", f"{envoy_admin}/clusters") as response:
        return "failed_active_hc" in await response.text()


async def test_members_known_to_one_side_are_reported_beside_another_mistake(check: Check) -> None:
    whole = EditableBootstrap().address_router("127.0.0.1").list_replicas("10.0.0.9")
    batch = whole.replicas | {"name": "batch", "type": "EDS", "load_assignment": None}
    clusters = [*whole.clusters, batch]
    async with serving() as replica, serving() as chosen:
        members: dict[str, dict[str, dict[str, bool]]] = {
            "router": {"127.0.0.1:50051": {}},
            "replicas": {"10.0.0.9:8000": {}},
            "batch": {replica.id: {"failed_outlier_check": True}, "10.0.0.8:8000": {}},
        }
        answer_as_envoy(replica, whole.tree, clusters, members)
        arguments = alone(replica.id, chosen.id), "--envoy-admin", f"http://{replica.id}"
        lacking, disjoint, *warnings = bad(await check(*arguments, status=1))
    assert "cluster 'replicas' lists 10.0.0.9:8000, and none of the replicas" in disjoint
    assert f"no cluster has the member {chosen.id}, which routers choose" in lacking
    assert [line.partition(": cluster 'batch'")[2] for line in warnings] == [
        f": {replica.id} is unhealthy (failed_outlier_check): Envoy's fallback policy "
        "sends no requests there",
        " has the member 10.0.0.8:8000, which no poller knows: only Envoy's fallback policy sends "
        "requests there. Add it to replicas, or remove it from the cluster",
    ]


def answer_as_envoy(
    replica: ScriptedReplica,
    bootstrap: Mapping[str, Any],
    clusters: Sequence[Mapping[str, Any]],
    members: Mapping[str, Mapping[str, object]],
) -> None:
    """Let the replica also answer as the admin address of an Envoy.

    ``members``: health of each member, by cluster and ``host:port``.
    """
    statuses = [
        {
            "name": name,
            "host_statuses": [
                {"address": socket_address(host), "health_status": health}
                for host, health in hosts.items()
            ],
        }
        for name, hosts in members.items()
    ]
    replica.answers["/config_dump"] = text(json.dumps(dump_of(bootstrap, clusters)))
    replica.answers["/clusters"] = text(json.dumps({"cluster_statuses": statuses}))


@pytest.mark.parametrize("answer", ["nothing", "something else"])
async def test_other_server_at_envoy_admin_is_error(check: Check, answer: str) -> None:
    async with serving() as replica:
        replica.answers |= {"/config_dump": text("[]"), "/clusters": text("{}")}
        url = f"http://{replica.id}" if answer != "nothing" else f"http://127.0.0.1:{free_port()}"
        error, *_ = bad(await check(alone(replica.id), "--envoy-admin", url, status=1))
    assert f"Envoy {url}: " in error
    assert "is this its admin address?" in error


async def test_silent_envoy_is_error_with_the_time_waited(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_envoy, "_PATIENCE", aiohttp.ClientTimeout(total=0.2))
    async with serving() as replica:
        replica.answers["/config_dump"] = hang
        url = f"http://{replica.id}"
        error, *_ = bad(await check(alone(replica.id), "--envoy-admin", url, status=1))
    assert f"Envoy {url}: no answer within 0.2 s: is Envoy running" in error
