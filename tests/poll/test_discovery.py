import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.config import ReplicaSource
from extproc.poll.discovery import Discovery, Target
from extproc.poll.resolve import resolve_host
from extproc.predict.step import DEFAULT_PROFILE
from tests.conftest import Logged
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S


class Names:
    """A name server whose zone a test writes."""

    def __init__(self, **zone: Sequence[str]) -> None:
        self.zone = zone

    async def resolve(self, host: str) -> Sequence[str]:
        if host == "slow":
            await asyncio.Event().wait()
        if host not in self.zone:
            raise OSError("Name or service not known")
        return self.zone[host]


def discovery(
    *sources: ReplicaSource, file: Path | None = None, names: Names | None = None, **more: Any
) -> Discovery:
    return Discovery(sources, file, timeout_s=0.05, resolve=(names or Names()).resolve, **more)


async def ids(found: Discovery) -> list[str]:
    return [target.id for target in await found.targets()]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("[::1]:8000", "[::1]:8000"),
        ("http://[2001:DB8::0:1]:80", "[2001:db8::1]:80"),
        ("gpu:8000", "10.0.0.7:8000"),
    ],
)
async def test_addresses_become_what_envoy_knows_the_member_by(url: str, address: str) -> None:
    found = discovery(ReplicaSource(url=url), names=Names(gpu=["10.0.0.7"]))
    assert await found.targets() == (Target(address, address, DEFAULT_PROFILE),)


async def test_a_dns_name_is_as_many_replicas_as_it_has_addresses() -> None:
    names = Names(vllm=["10.0.0.2", "10.0.0.1", "10.0.0.2"])
    found = discovery(ReplicaSource(dns="vllm:80", name="fast"), names=names)
    first, second = await found.targets()
    assert (first.id, first.name) == ("10.0.0.1:80", "fast/10.0.0.1:80")
    assert second.id == "10.0.0.2:80"
    names.zone = {"vllm": ["10.0.0.2", "10.0.0.3"]}
    assert await ids(found) == ["10.0.0.2:80", "10.0.0.3:80"]


async def test_address_that_partial_answers_leave_out_stays_while_it_answers() -> None:
    twelve, random = [f"10.0.0.{number}" for number in range(12)], Random(1)
    names, clock, dead = Names(vllm=twelve), ManualClock(), {"10.0.0.3:80"}
    found = discovery(
        ReplicaSource(dns="vllm:80"), names=names, answers=lambda id_: id_ not in dead, clock=clock
    )
    everyone = set(await ids(found))
    for _ in range(100):
        clock.advance(2.0)
        names.zone = {"vllm": random.sample(twelve[:3] + twelve[4:], 8)}
        targets = await found.targets()
        assert {target.id for target in targets} == everyone - dead
        assert sum(target.draining for target in targets) <= 1


async def test_address_that_no_answer_names_any_more_drains_and_leaves() -> None:
    names, clock, dead = Names(vllm=["10.0.0.1", "10.0.0.2"]), ManualClock(), set[str]()
    found = discovery(
        ReplicaSource(dns="vllm:80"), names=names, answers=lambda id_: id_ not in dead, clock=clock
    )
    await found.targets()
    names.zone = {"vllm": ["10.0.0.2"]}
    clock.advance(9.0)
    assert not any(target.draining for target in await found.targets())
    clock.advance(2.0)
    targets = await found.targets()
    assert [target.id for target in targets if target.draining] == ["10.0.0.1:80"]
    dead.add("10.0.0.1:80")
    assert await ids(found) == ["10.0.0.2:80"]
    dead.clear()
    assert await ids(found) == ["10.0.0.2:80"]


@pytest.mark.parametrize("source", [{"dns": "vllm:80"}, {"url": "vllm:80"}])
async def test_name_without_addresses_keeps_some(source: dict[str, Any], logged: Logged) -> None:
    names, clock = Names(vllm=["10.0.0.1"]), ManualClock()
    answer = {"10.0.0.1:80"}
    found = discovery(
        ReplicaSource(**source), names=names, answers=answer.__contains__, clock=clock
    )
    await found.targets()
    names.zone = {"vllm": []}
    for _ in range(10):
        clock.advance(60)
        (target,) = await found.targets()
        assert not target.draining
    assert found.problems() == ["the name has no address"]
    answer.clear()
    assert await ids(found) == []
    assert logged.lines()[0]["error"] == "the name has no address"


async def test_url_whose_name_gets_another_address_is_one_replica() -> None:
    names = Names(gpu=["10.0.0.1"])
    found = discovery(ReplicaSource(url="gpu:80"), names=names, answers=lambda _: True)
    assert await ids(found) == ["10.0.0.1:80"]
    names.zone = {"gpu": ["10.0.0.2"]}
    assert await ids(found) == ["10.0.0.2:80"]


async def test_a_replica_with_two_families_counts_once() -> None:
    names = Names(vllm=["::2", "10.0.0.1"], six=["::2"])
    assert await ids(discovery(ReplicaSource(dns="vllm:80"), names=names)) == ["10.0.0.1:80"]
    assert await ids(discovery(ReplicaSource(dns="six:80"), names=names)) == ["[::2]:80"]


async def test_an_address_named_twice_counts_once() -> None:
    names = Names(gpu=["10.0.0.1", "10.0.0.2"])
    found = discovery(
        ReplicaSource(url="10.0.0.1:80", name="mine"), ReplicaSource(dns="gpu:80"), names=names
    )
    assert [target.name for target in await found.targets()] == ["mine", "10.0.0.2:80"]


async def test_a_name_that_does_not_resolve_is_one_line_and_comes_back(logged: Logged) -> None:
    names = Names()
    found = discovery(ReplicaSource(url="gpu:80"), ReplicaSource(url="10.0.0.9:80"), names=names)
    assert await ids(found) == ["10.0.0.9:80"]
    assert await ids(found) == ["10.0.0.9:80"]
    (line,) = logged.lines()
    assert (line["host"], line["error"]) == ("gpu", "Name or service not known")
    names.zone = {"gpu": ["10.0.0.1"]}
    assert await ids(found) == ["10.0.0.1:80", "10.0.0.9:80"]
    names.zone = {}
    assert await ids(found) == ["10.0.0.1:80", "10.0.0.9:80"]  # the last answer stays
    assert len(logged.lines("replica's host resolves again")) == 1


async def test_a_name_server_that_hangs_holds_nobody_up(logged: Logged) -> None:
    found = discovery(ReplicaSource(dns="slow:80"), ReplicaSource(url="10.0.0.9:80"))
    assert await ids(found) == ["10.0.0.9:80"]
    assert logged.lines()[0]["error"] == "no answer within 0.05 s"


async def test_an_answer_that_comes_late_is_used_when_it_comes() -> None:
    names, answered = Names(slow=["10.0.0.1"]), asyncio.Event()

    async def resolve(host: str) -> Sequence[str]:
        await answered.wait()
        return names.zone[host]

    found = Discovery([ReplicaSource(dns="slow:80")], None, timeout_s=0.01, resolve=resolve)
    assert await ids(found) == []
    answered.set()
    assert await ids(found) == ["10.0.0.1:80"]


async def test_a_lookup_that_hangs_is_not_asked_again_and_takes_no_thread_of_the_loops(
    monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    asked, released = [], threading.Event()
    answer = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host == "hangs":
            asked.append(host)
            released.wait()
            raise OSError("Temporary failure in name resolution")
        return answer(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    sources = [ReplicaSource(dns="hangs:80"), ReplicaSource(url="10.0.0.9:80")]
    found = Discovery(sources, None, timeout_s=0.001)
    try:
        for _ in range(50):  # more than the loop has threads
            assert await ids(found) == ["10.0.0.9:80"]
        assert asked == ["hangs"]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(int)
    finally:
        released.set()
    assert len(logged.lines()) == 1


@pytest.mark.process
def test_a_lookup_that_hangs_keeps_no_program_from_its_end() -> None:
    program = (
        "import asyncio, socket, time\n"
        "from extproc.config import ReplicaSource\n"
        "from extproc.poll.discovery import Discovery\n"
        "socket.getaddrinfo = lambda *_, **__: time.sleep(600)\n"
        "found = Discovery([ReplicaSource(dns='hangs:80')], None, timeout_s=0.01)\n"
        "print(asyncio.run(found.targets()))\n"
    )
    argv = [sys.executable, "-c", program]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout) == (0, "()\n")
    assert "Traceback" not in run.stderr


async def test_host_that_is_not_configured_is_forgotten(tmp_path: Path, logged: Logged) -> None:
    file, names = tmp_path / "replicas.yaml", Names(gpu=["10.0.0.1"])
    found = discovery(file=file, names=names)
    for content, expected in [("[gpu:80]", ["10.0.0.1:80"]), ("[]", []), ("[ 'gpu:80' ]", [])]:
        file.write_text(content)
        assert await ids(found) == expected
        names.zone = {}
    assert [
        line["host"]
        for line in logged.lines(
            "replica's host does not resolve: keeping its last addresses and retrying"
        )
    ] == ["gpu"]


async def test_the_systems_resolver() -> None:
    found = Discovery([ReplicaSource(url="localhost:80")], None, timeout_s=10)
    assert (await ids(found))[0] in ("127.0.0.1:80", "[::1]:80")
    with suppress(OSError):  # raised where no name server is reached
        assert await resolve_host("no-such-host.invalid") == []


async def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "replicas.yaml"
    file.write_text("[10.0.0.1:80]")
    found = discovery(ReplicaSource(url="10.0.0.9:80"), file=file)
    assert await ids(found) == ["10.0.0.9:80", "10.0.0.1:80"]
    file.write_text("- {url: '10.0.0.2:80', name: fast, profile: llama-8b-a10}\n- 10.0.0.3:80\n")
    _, second, third = await found.targets()
    assert second == Target("10.0.0.2:80", "fast", "llama-8b-a10")
    assert third.id == "10.0.0.3:80"
    file.write_text("[]")
    assert await ids(found) == ["10.0.0.9:80"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "not a YAML list"),
        (b"replicas: []", "not a YAML list"),
        (b"[10.0.0.1:80", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"- {uri: x:80}", "replicas.0"),
        (b"- {url: x:80, profile: abacus}", "abacus"),
        (b"- 7", "replicas.0"),
        (b"- no-port", "host:port"),
        (b"- https://x:80", "host:port"),
        (b"- 2024-13-45", "line 1, column 3: not a valid timestamp"),
        (b"[" * 3000, "nested too deeply"),
        (b"&a [*a]", "recursive"),
        (b"[{kubernetes: {service: vllm, port: 80}}]", "pip install 'extproc[kubernetes]'"),
        (None, "No such file"),
    ],
)
async def test_a_broken_file_keeps_the_last_list(
    tmp_path: Path,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    error: str,
) -> None:
    monkeypatch.setitem(sys.modules, "lightkube", None)
    file = tmp_path / "replicas.yaml"
    file.write_text("[10.0.0.1:80]")
    found = discovery(file=file)
    assert await ids(found) == ["10.0.0.1:80"]
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    for _ in range(3):
        assert await ids(found) == ["10.0.0.1:80"]
    (line,) = logged.lines()
    assert error in str(line["error"])
    assert "\n" not in str(line["error"])
    file.write_text("[10.0.0.2:80, 10.0.0.3:80]")
    assert await ids(found) == ["10.0.0.2:80", "10.0.0.3:80"]
    assert len(logged.lines("replicas file can be used again")) == 1


async def test_file_that_is_yet_to_come_has_no_content(tmp_path: Path, logged: Logged) -> None:
    file = tmp_path / "replicas.yaml"
    found = discovery(file=file)
    assert await ids(found) == await ids(found) == []
    file.write_text("[10.0.0.1:80]")
    assert await ids(found) == ["10.0.0.1:80"]
    told = [
        "replicas file cannot be used: keeping the last usable content, if any, and retrying",
        "replicas file can be used again",
    ]
    assert [line["msg"] for line in logged.lines()] == told


async def test_file_that_is_back_unchanged_is_usable_again(tmp_path: Path, logged: Logged) -> None:
    file, aside = tmp_path / "replicas.yaml", tmp_path / "aside"
    file.write_text("[10.0.0.1:80]")
    found = discovery(file=file)
    for count in (1, 2):
        assert await ids(found) == ["10.0.0.1:80"]
        file.rename(aside)
        assert await ids(found) == ["10.0.0.1:80"]
        aside.rename(file)
        assert await ids(found) == ["10.0.0.1:80"]
        problem = (
            "replicas file cannot be used: keeping the last usable content, if any, and retrying"
        )
        assert len(logged.lines(problem)) == count
        assert len(logged.lines("replicas file can be used again")) == count


async def test_file_of_same_size_and_time_replaces_another(tmp_path: Path) -> None:
    file, other = tmp_path / "replicas.yaml", tmp_path / "other.yaml"
    file.write_text("[10.0.0.1:80]")
    other.write_text("[10.0.0.2:80]")
    for path in (file, other):
        os.utime(path, ns=(0, 0))
    found = discovery(file=file)
    assert await ids(found) == ["10.0.0.1:80"]
    other.replace(file)
    assert await ids(found) == ["10.0.0.2:80"]


async def test_a_config_map_update_adds_and_removes_replicas(tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap as links into a folder, and replaces the link to that."""
    data, file = tmp_path / "..data", tmp_path / "replicas.yaml"
    file.symlink_to("..data/replicas.yaml")

    def update(version: str, content: str) -> None:
        (tmp_path / version).mkdir()
        (tmp_path / version / "replicas.yaml").write_text(content)
        (tmp_path / "..data_tmp").symlink_to(version)
        (tmp_path / "..data_tmp").replace(data)

    update("..1", "[10.0.0.1:80, 10.0.0.2:80]")
    found = discovery(file=file)
    assert await ids(found) == ["10.0.0.1:80", "10.0.0.2:80"]
    update("..2", "[10.0.0.2:80, 10.0.0.3:80]")
    assert await ids(found) == ["10.0.0.2:80", "10.0.0.3:80"]
