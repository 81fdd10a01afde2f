"""Discovery of replicas: addresses, DNS names, pods of Kubernetes, and a watched file."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from msgspec import structs
from pydantic import ValidationError

from extproc.config import Config, KubernetesPods, ReplicaSource
from extproc.ground.address import is_ip, join_address, with_name
from extproc.ground.clock import Clock, monotonic
from extproc.ground.files import WatchedFiles
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import SlowCall, in_daemon_thread, look_up
from extproc.ground.yaml_file import read_yaml
from extproc.replica_state import ReplicaState
from extproc.share.drains import Drains

if TYPE_CHECKING:
    from extproc.poll.kubernetes import KubernetesWatch

log = logging.getLogger(__name__)

RESOLVE_S = 2.0
"""Seconds between two reads of DNS names and the replicas file; also the timeout of a read."""
_UNNAMED_S = 10.0
"""Seconds without a mention in DNS answers after which an address drains. One answer may name only
some of a host's addresses, but all answers in this time together name every address."""
_NO_ADDRESS = socket.EAI_NONAME, socket.EAI_NODATA

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Maps a host name to IP addresses, maybe none; raises ``OSError`` if no name server answers."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to scrape."""

    id: str  # ``ip:port``, by which Envoy picks an upstream
    name: str
    profile: str
    kv_events_ports: tuple[int, int] | None = None  # to subscribe, and to request a replay
    # A change of the next two fields needs no new scraper, so comparisons ignore them.
    draining: bool = field(default=False, compare=False)  # by a command, or the pod terminates
    ready: bool = field(default=True, compare=False)  # False: Kubernetes says not ready

    def marked(self, state: ReplicaState) -> ReplicaState:
        """Returns the state, marked as draining or as not ready if this target is."""
        not_ready = "" if self.ready else "not ready, says Kubernetes"
        problem = not_ready if state.healthy else state.problem
        return structs.replace(state, draining=self.draining, ready=self.ready, problem=problem)

    @property
    def title(self) -> str:
        return with_name(self.id, self.name)


async def resolve_host(host: str) -> Sequence[str]:
    """Returns what :func:`look_up` finds, or nothing if the name has no address. OSError then only
    means that no name server answers."""
    try:
        return await look_up(host)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return []
        raise


@dataclass(eq=False)
class Discovery:
    """Looks up the replicas of all sources; a source whose lookup fails keeps its last replicas.

    An address that DNS no longer names stays a target while ``stays(address)`` is True. Once
    unnamed for ``_UNNAMED_S``, the replica is drained.
    """

    sources: Sequence[ReplicaSource]
    file: Path | None  # with more sources
    timeout_s: float  # of each lookup
    resolve: Resolve = resolve_host
    drains: Drains = field(default_factory=Drains)
    random: Random = field(default_factory=Random)  # of waits after failed watches
    stays: Callable[[str], bool] = lambda _: False
    clock: Clock = monotonic

    def __post_init__(self) -> None:
        self._file = _ReplicasFile(self.file, self.timeout_s) if self.file else None
        self._hosts: dict[str, Host] = {}
        self._named_at: dict[ReplicaSource, dict[str, float]] = {}  # results of ``_named``
        self._watches: dict[KubernetesPods, KubernetesWatch] = {}

    async def targets(self) -> tuple[Target, ...]:
        """Looks up the replicas. Of an address's sources, the first one that does not drain the
        replica counts; if all drain the replica, the first one."""
        sources = (*self.sources, *(await self._file.read() if self._file else ()))
        self._follow(sources)
        lookups: list[Host | KubernetesWatch] = [*self._hosts.values(), *self._watches.values()]
        await asyncio.gather(*(lookup.look_up() for lookup in lookups))
        self._named_at = {
            source: self._named(source) for source in sources if not source.kubernetes
        }
        targets = [target for source in sources for target in self._targets_of(source)]
        found: dict[str, Target] = {}
        for target in sorted(targets, key=lambda target: target.draining):
            found.setdefault(target.id, target)
        self.drains.listed = found
        return tuple(
            replace(target, draining=target.draining or self.drains.has(id_))
            for id_, target in found.items()
        )

    def unread(self) -> list[str]:
        """Returns the replicas file if no read has succeeded yet, and the sources whose pods the
        API server of Kubernetes has not listed yet."""
        file = [str(self._file.path)] if self._file and self._file.replicas is None else []
        return file + [str(wanted) for wanted, watch in self._watches.items() if not watch.listed]

    def problems(self) -> dict[str, str]:
        """Returns why names, Kubernetes sources and the replicas file could not be read."""
        problems = {name: host.outage.problem for name, host in self._hosts.items()}
        problems |= {str(wanted): watch.problem for wanted, watch in self._watches.items()}
        if self._file:
            problems[str(self._file.path)] = self._file.outage.problem
        return {name: problem for name, problem in problems.items() if problem}

    def stop(self) -> None:
        self._follow(())

    def _targets_of(self, source: ReplicaSource) -> Iterable[Target]:
        profile, ports = source.profile, source.kv_events_ports
        if source.kubernetes:
            for address, pod in self._watches[source.kubernetes].pods.items():
                name = "/".join(filter(None, (source.name, pod.name or address)))
                # vLLM adds a data-parallel rank to its ports.
                shifted = ports and (ports[0] + pod.rank, ports[1] + pod.rank)
                yield Target(address, name, profile, shifted, pod.terminating, pod.ready)
            return
        named_at = self._named_at[source]
        last = max(named_at.values(), default=0.0)
        for address, at in named_at.items():
            name = f"{source.name}/{address}" if source.name and source.dns else source.name
            yield Target(address, name or address, profile, ports, last - at > _UNNAMED_S)

    def _named(self, source: ReplicaSource) -> dict[str, float]:
        """Returns each address of a source with the time of the last lookup that found it."""
        host, port = source.host_and_port
        addresses = self._hosts[host].addresses
        named = [join_address(ip, port) for ip in (addresses if source.dns else addresses[:1])]
        before = self._named_at.get(source, {}) if source.dns or not named else {}
        staying = {id_: at for id_, at in before.items() if self.stays(id_)}
        return {**staying, **dict.fromkeys(named, self.clock())}

    def _follow(self, sources: Iterable[ReplicaSource]) -> None:
        """Adds the host names and watches that the sources need, and drops all others."""
        names = {source.host_and_port[0] for source in sources if not source.kubernetes}
        self._hosts = {
            name: self._hosts.get(name) or Host(name, self.resolve, self.timeout_s)
            for name in names
        }
        pods = {source.kubernetes for source in sources if source.kubernetes}
        for gone in self._watches.keys() - pods:
            self._watches.pop(gone).stop()
        for wanted in pods - self._watches.keys():
            from extproc.poll.kubernetes import PoolWatch, ServiceWatch  # needs lightkube

            kind = PoolWatch if wanted.inference_pool else ServiceWatch
            self._watches[wanted] = kind(
                wanted, self.drains.changed.set, self.timeout_s, self.random
            )


class Host:
    """A host name or an IP address, resolved repeatedly; a failure keeps the last addresses.

    A lookup that takes longer than ``timeout_s`` goes on; the next :meth:`look_up` uses its answer.
    """

    def __init__(self, name: str, resolve: Resolve, timeout_s: float) -> None:
        self.addresses: tuple[str, ...] = ()  # all IPv4 or all IPv6, sorted
        self._name = name
        self._lookup = SlowCall(partial(resolve, name), timeout_s)
        self.outage = OutageLog(
            log,
            "replica's host does not resolve: keeping its last addresses and retrying",
            "replica's host resolves again",
            host=name,
        )

    async def look_up(self) -> None:
        try:
            found = [self._name] if is_ip(self._name) else await self._lookup.result()
            self.addresses = _one_family(found)
        except (OSError, UnicodeError) as error:
            self.outage.failed(error)
        else:
            self.outage.note("" if self.addresses else "the name has no address")


def _one_family(addresses: Iterable[str]) -> tuple[str, ...]:
    """Sorts the addresses and drops duplicates. If IPv4 and IPv6 occur, only IPv4 is kept."""
    ips = sorted(map(ipaddress.ip_address, addresses), key=lambda ip: (ip.version, int(ip)))
    return tuple(dict.fromkeys(str(ip) for ip in ips if ip.version == ips[0].version))


class _ReplicasFile:
    """File of replicas, which may be on a file server that hangs."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self._file = WatchedFiles("replicas file", partial(read_replicas, path), path)
        self._read = SlowCall(partial(in_daemon_thread, self._file.if_changed), timeout_s)
        self.outage = self._file.outage
        self.replicas: tuple[ReplicaSource, ...] | None = None  # None: no read has succeeded yet

    async def read(self) -> tuple[ReplicaSource, ...]:
        """Returns the listed replicas; those of the last read if the file cannot be used."""
        try:
            await self._read.result()
        except TimeoutError as error:
            self.outage.failed(error)
        self.replicas = getattr(self._file, "content", None)
        return self.replicas or ()


def names_replicas(config: Config) -> bool:
    """Returns True if the configuration names a replica or a file of replicas; raises ValueError
    from :func:`require_client`."""
    require_client(config)
    return any(pool.replicas or pool.replicas_file for pool in config.each_pool)


def require_client(config: Config) -> None:
    """Raises ValueError if a source needs the Kubernetes client, which is not installed."""
    sources = (source for pool in config.each_pool for source in pool.replicas)
    if any(source.kubernetes for source in sources) and find_spec("lightkube") is None:
        raise ValueError(
            "replicas: pods of Kubernetes need lightkube, which is not installed: "
            "pip install 'extproc[kubernetes]'"
        )


def read_replicas(path: Path) -> tuple[ReplicaSource, ...]:
    """Reads a YAML file that has the form of the setting ``replicas``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has another form, or needs a missing package; the message is one line.
    """
    listed = read_yaml(path)
    if not isinstance(listed, list):
        raise ValueError("not a YAML list of replicas")
    try:
        config = Config.model_validate({"replicas": listed})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from None
    require_client(config)
    return config.replicas
