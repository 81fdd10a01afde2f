"""Replicas are found by address, DNS and a watched file; failures keep the last answer."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.config import ReplicaSource
from extproc.ground import files
from extproc.poll.discovery import Discovery, Target, read_replicas, resolve_host
from extproc.predict.step import DEFAULT_PROFILE
from tests.conftest import Logged
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S, until_read

FILE_BROKEN = "replicas file cannot be used: keeping the last usable content, if any, and retrying"
FILE_USABLE = "replicas file can be used again"


class Names:
    """A name server whose zone a test writes."""

    def __init__(self, **zone: Sequence[str]) -> None:
        self.zone = zone

    async def resolve(self, host: str) -> Sequence[str]:
        if host not in self.zone:
            raise OSError("Name or service not known")
        return self.zone[host]


def discovery(
    *sources: ReplicaSource,
    file: Path | None = None,
    names: Names | None = None,
    timeout_s: float = PATIENCE_S,
    **more: Any,
) -> Discovery:
    return Discovery(sources, file, timeout_s, (names or Names()).resolve, **more)


async def ids(found: Discovery) -> list[str]:
    return [target.id for target in await found.targets()]


class DnsPool:
    """Replicas behind the DNS name ``vllm``; those in ``dead`` answer no scrape."""

    def __init__(self, *addresses: str, **source: str) -> None:
        self.names = Names(vllm=addresses)
        self.clock = ManualClock()
        self.dead: set[str] = set()
        self.discovery = discovery(
            ReplicaSource.model_validate(source or {"dns": "vllm:80"}),
            names=self.names,
            stays=lambda id_: id_ not in self.dead,
            clock=self.clock,
        )

    async def draining(self) -> dict[str, bool]:
        return {target.id: target.draining for target in await self.discovery.targets()}


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
async def test_url_becomes_the_address_by_which_envoy_knows_a_replica(
    url: str, address: str
) -> None:
    found = discovery(ReplicaSource(url=url), names=Names(gpu=["10.0.0.7"]))
    assert await found.targets() == (Target(address, address, DEFAULT_PROFILE),)


async def test_dns_name_is_a_replica_for_each_address() -> None:
    names = Names(vllm=["10.0.0.2", "10.0.0.1", "10.0.0.2"])
    found = discovery(ReplicaSource(dns="vllm:80", name="fast"), names=names)
    first, second = await found.targets()
    assert (first.id, first.name) == ("10.0.0.1:80", "fast/10.0.0.1:80")
    assert second.id == "10.0.0.2:80"
    names.zone = {"vllm": ["10.0.0.2", "10.0.0.3"]}
    assert await ids(found) == ["10.0.0.2:80", "10.0.0.3:80"]


async def test_address_missing_from_partial_answers_stays_while_it_answers() -> None:
    twelve, random = [f"10.0.0.{number}" for number in range(12)], Random(1)
    pool = DnsPool(*twelve)
    pool.dead = {"10.0.0.3:80"}
    everyone = (await pool.draining()).keys()
    for _ in range(100):
        pool.clock.advance(2.0)
        pool.names.zone = {"vllm": random.sample(twelve[:3] + twelve[4:], 8)}
        draining = await pool.draining()
        assert draining.keys() == everyone - pool.dead
        assert sum(draining.values()) <= 1


async def test_address_that_dns_names_no_longer_drains_and_leaves() -> None:
    pool = DnsPool("10.0.0.1", "10.0.0.2")
    await pool.draining()
    pool.names.zone = {"vllm": ["10.0.0.2"]}
    pool.clock.advance(9.0)
    assert await pool.draining() == {"10.0.0.1:80": False, "10.0.0.2:80": False}
    pool.clock.advance(2.0)
    assert await pool.draining() == {"10.0.0.1:80": True, "10.0.0.2:80": False}
    pool.dead.add("10.0.0.1:80")
    assert [*await pool.draining()] == ["10.0.0.2:80"]
    pool.dead.clear()
    assert [*await pool.draining()] == ["10.0.0.2:80"]


@pytest.mark.parametrize("source", [{"dns": "vllm:80"}, {"url": "vllm:80"}])
async def test_name_without_addresses_keeps_replicas_that_answer(
    source: dict[str, str], logged: Logged
) -> None:
    pool = DnsPool("10.0.0.1", **source)
    await pool.draining()
    pool.names.zone = {"vllm": []}
    for _ in range(10):
        pool.clock.advance(60)
        assert await pool.draining() == {"10.0.0.1:80": False}
    assert pool.discovery.problems() == {"vllm": "the name has no address"}
    pool.dead.add("10.0.0.1:80")
    assert await pool.draining() == {}
    assert logged.lines()[0]["error"] == "the name has no address"


async def test_url_whose_name_gets_another_address_is_a_single_replica() -> None:
    pool = DnsPool("10.0.0.1", url="vllm:80")
    assert [*await pool.draining()] == ["10.0.0.1:80"]
    pool.names.zone = {"vllm": ["10.0.0.2"]}
    assert [*await pool.draining()] == ["10.0.0.2:80"]


async def test_replica_with_two_address_families_counts_once() -> None:
    names = Names(vllm=["::2", "10.0.0.1"], six=["::2"])
    assert await ids(discovery(ReplicaSource(dns="vllm:80"), names=names)) == ["10.0.0.1:80"]
    assert await ids(discovery(ReplicaSource(dns="six:80"), names=names)) == ["[::2]:80"]


async def test_address_named_by_two_sources_counts_once() -> None:
    names = Names(gpu=["10.0.0.1", "10.0.0.2"])
    found = discovery(
        ReplicaSource(url="10.0.0.1:80", name="mine"), ReplicaSource(dns="gpu:80"), names=names
    )
    assert [target.name for target in await found.targets()] == ["mine", "10.0.0.2:80"]


async def test_address_that_moves_to_another_source_does_not_drain() -> None:
    names, clock = Names(a=["10.0.0.1", "10.0.0.2"], b=["10.0.0.3"]), ManualClock()
    sources = [ReplicaSource(dns="a:80", name="a"), ReplicaSource(dns="b:80", name="b")]
    found = discovery(*sources, names=names, stays=lambda _: True, clock=clock)
    await found.targets()
    names.zone = {"a": ["10.0.0.1"], "b": ["10.0.0.2", "10.0.0.3"]}
    clock.advance(60.0)
    assert {target.id: (target.name[0], target.draining) for target in await found.targets()} == {
        "10.0.0.1:80": ("a", False),
        "10.0.0.2:80": ("b", False),
        "10.0.0.3:80": ("b", False),
    }


async def test_name_that_does_not_resolve_logs_once_and_recovers(logged: Logged) -> None:
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


async def test_late_dns_answer_is_used_by_the_next_lookup() -> None:
    answered = asyncio.Event()

    async def resolve(host: str) -> Sequence[str]:
        await answered.wait()
        return ["10.0.0.1"]

    found = Discovery([ReplicaSource(dns="slow:80")], None, timeout_s=0.01, resolve=resolve)
    assert await ids(found) == []
    answered.set()
    assert await ids(found) == ["10.0.0.1:80"]


async def test_hanging_lookup_delays_no_other_and_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    lookups, released = [], threading.Event()
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host == "hangs":
            lookups.append(host)
            released.wait()
            raise OSError("Temporary failure in name resolution")
        return real(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    sources = [ReplicaSource(dns="hangs:80"), ReplicaSource(url="10.0.0.9:80")]
    found = Discovery(sources, None, timeout_s=0.001)
    try:
        for _ in range(50):  # more than the event loop has threads
            assert await ids(found) == ["10.0.0.9:80"]
        assert lookups == ["hangs"]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(int)
    finally:
        released.set()
    (line,) = logged.lines()
    assert line["error"] == "no answer within 0.001 s"


@pytest.mark.process
def test_hanging_lookup_does_not_delay_the_exit_of_the_program() -> None:
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


async def test_system_resolver_finds_localhost_and_no_invalid_name() -> None:
    found = Discovery([ReplicaSource(url="localhost:80")], None, timeout_s=10)
    assert (await ids(found))[0] in ("127.0.0.1:80", "[::1]:80")
    with suppress(OSError):  # raised where no name server is reached
        assert await resolve_host("no-such-host.invalid") == []


def replicas_file(directory: Path) -> Path:
    file = directory / "replicas.yaml"
    file.write_text("[10.0.0.1:80]")
    return file


async def test_host_removed_from_the_replicas_file_is_forgotten(
    tmp_path: Path, logged: Logged
) -> None:
    file, names = replicas_file(tmp_path), Names(gpu=["10.0.0.1"])
    found = discovery(file=file, names=names)
    for content, expected in [("[gpu:80]", ["10.0.0.1:80"]), ("[]", []), ("[ 'gpu:80' ]", [])]:
        file.write_text(content)
        assert await ids(found) == expected
        names.zone = {}
    (line,) = logged.lines(
        "replica's host does not resolve: keeping its last addresses and retrying"
    )
    assert line["host"] == "gpu"


async def test_changed_replicas_file_is_read_again(tmp_path: Path) -> None:
    file = replicas_file(tmp_path)
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
        (b"[" * 1000, "nested too deeply"),
        (b"&a [*a]", "recursive"),
        (b"[{kubernetes: {service: vllm, port: 80}}]", "pip install 'extproc[kubernetes]'"),
        (None, "No such file"),
    ],
)
async def test_broken_replicas_file_keeps_the_last_list(
    tmp_path: Path,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    error: str,
) -> None:
    file = replicas_file(tmp_path)
    monkeypatch.setitem(sys.modules, "lightkube", None)
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
    assert error in found.problems()[str(file)]
    assert await ids(found) == ["10.0.0.2:80", "10.0.0.3:80"]
    assert not found.problems()
    assert len(logged.lines(FILE_USABLE)) == 1


async def test_missing_replicas_file_is_read_when_it_appears(
    tmp_path: Path, logged: Logged
) -> None:
    file = replicas_file(tmp_path)
    file.unlink()
    found = discovery(file=file)
    assert await ids(found) == await ids(found) == []
    file.write_text("[10.0.0.1:80]")
    assert await ids(found) == ["10.0.0.1:80"]
    assert [line["msg"] for line in logged.lines()] == [FILE_BROKEN, FILE_USABLE]


async def test_unchanged_replicas_file_that_returns_is_usable(
    tmp_path: Path, logged: Logged
) -> None:
    file = replicas_file(tmp_path)
    aside = file.with_name("aside")
    found = discovery(file=file)
    for count in (1, 2):
        assert await ids(found) == ["10.0.0.1:80"]
        file.rename(aside)
        assert await ids(found) == ["10.0.0.1:80"]
        aside.rename(file)
        assert await ids(found) == ["10.0.0.1:80"]
        assert len(logged.lines(FILE_BROKEN)) == len(logged.lines(FILE_USABLE)) == count


async def test_replicas_file_of_same_size_and_time_replaces_another(tmp_path: Path) -> None:
    file = replicas_file(tmp_path)
    other = file.with_name("other.yaml")
    other.write_text("[10.0.0.2:80]")
    for path in (file, other):
        os.utime(path, ns=(0, 0))
    found = discovery(file=file)
    assert await ids(found) == ["10.0.0.1:80"]
    other.replace(file)
    assert await ids(found) == ["10.0.0.2:80"]


async def test_config_map_update_adds_and_removes_replicas(tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap as links into a folder, and replaces the folder link."""
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


async def test_hanging_replicas_file_keeps_the_last_list_and_delays_no_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a named pipe waits for a writer, like a reader of a file server that hangs."""
    reads = list[Path]()

    def counted(path: Path) -> tuple[ReplicaSource, ...]:
        reads.append(path)
        return read_replicas(path)

    monkeypatch.setattr("extproc.poll.discovery.read_replicas", counted)
    file, names = replicas_file(tmp_path), Names(gpu=["10.0.0.8"])
    pipe = file.with_name("pipe")
    found = discovery(ReplicaSource(dns="gpu:80"), file=file, names=names, timeout_s=0.05)
    await until_read(partial(ids, found), ["10.0.0.8:80", "10.0.0.1:80"].__eq__)
    os.mkfifo(pipe)
    pipe.replace(file)
    names.zone = {"gpu": ["10.0.0.9"]}
    for _ in range(3):
        assert await ids(found) == ["10.0.0.9:80", "10.0.0.1:80"]
        assert found.problems() == {str(file): "no answer within 0.05 s"}
    assert len(reads) <= 2
    file.rename(pipe)
    file.write_text("[10.0.0.3:80]")
    pipe.write_text("[10.0.0.2:80]")
    for listed in ("10.0.0.2:80", "10.0.0.3:80"):
        await until_read(partial(ids, found), ["10.0.0.9:80", listed].__eq__)
    assert not found.problems()


async def test_replicas_file_that_answers_again_unchanged_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, released, stamp = replicas_file(tmp_path), threading.Event(), files._stamp
    found = discovery(file=file, timeout_s=0.05)
    await until_read(partial(ids, found), ["10.0.0.1:80"].__eq__)

    def late(path: Path) -> object:
        released.wait()
        return stamp(path)

    async def problems() -> dict[str, str]:
        await found.targets()
        return found.problems()

    monkeypatch.setattr(files, "_stamp", late)
    try:
        await until_read(problems, {str(file): "no answer within 0.05 s"}.__eq__)
    finally:
        released.set()
    await until_read(problems, {}.__eq__)
