"""Which replicas there are: addresses from the configuration, DNS names, a watched file, and what
commands added and removed."""

import asyncio
import ipaddress
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from extproc.address import join_address
from extproc.config import Config, ReplicaSource
from extproc.poll.members import Membership
from extproc.poll.resolve import Lookups, Resolve, resolve_host
from extproc.yaml_file import read_yaml

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to scrape."""

    id: str
    """``ip:port``: Envoy picks an upstream by nothing else."""
    name: str
    profile: str
    kv_events_ports: tuple[int, int] | None = None
    """Where its KV events are published and replayed; None: they are not."""

    @property
    def who(self) -> str:
        """What it is called in the log."""
        return self.id if self.name == self.id else f"{self.name} ({self.id})"


class Discovery:
    """Looks up the replicas, again and again; what fails keeps its last answer."""

    def __init__(
        self,
        sources: Sequence[ReplicaSource],
        file: Path | None,
        timeout_s: float,
        resolve: Resolve = resolve_host,
        membership: Membership | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._file = None if file is None else ReplicasFile(file)
        self._lookups = Lookups(resolve, timeout_s)
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._unresolved: set[str] = set()
        self._membership = membership or Membership()

    async def wait(self, seconds: float) -> None:
        """Returns when it is time to look again: after so many seconds, at a command at once."""
        await self._membership.wait(seconds)

    async def targets(self) -> tuple[Target, ...]:
        """Return the replicas as of now; an address named twice counts once, the first."""
        listed = self._file.sources() if self._file else ()
        sources = (*self._sources, *listed, *self._membership.added)
        await self._look_up({source.host_and_port[0] for source in sources})
        found: dict[str, Target] = {}
        for source in sources:
            for target in self._targets_of(source):
                found.setdefault(target.id, target)
        removed = self._membership.removed_of(found)
        return tuple(target for id_, target in found.items() if id_ not in removed)

    def _targets_of(self, source: ReplicaSource) -> Iterable[Target]:
        host, port = source.host_and_port
        addresses = self._addresses.get(host, ())
        for ip in addresses if source.dns else addresses[:1]:
            address = join_address(ip, port)
            name = f"{source.name}/{address}" if source.name and source.dns else source.name
            yield Target(address, name or address, source.profile, source.kv_events_ports)

    async def _look_up(self, hosts: set[str]) -> None:
        self._forget_all_but(hosts)
        await asyncio.gather(*map(self._look_up_one, hosts))

    def _forget_all_but(self, hosts: set[str]) -> None:
        self._addresses = {host: self._addresses[host] for host in hosts & self._addresses.keys()}
        self._unresolved &= hosts
        self._lookups.forget_all_but(hosts)

    async def _look_up_one(self, host: str) -> None:
        try:
            addresses = [host] if _is_ip(host) else await self._lookups.addresses(host)
        except (OSError, UnicodeError) as error:
            if host not in self._unresolved:
                extra = {"host": host, "error": str(error)}
                log.warning("replica's host does not resolve, retrying", extra=extra)
            self._unresolved.add(host)
            return
        if host in self._unresolved:
            self._unresolved.discard(host)
            log.warning("replica's host resolves again", extra={"host": host})
        self._addresses[host] = one_family(addresses)


class ReplicasFile:
    """A YAML list of replicas, read again when the file changes; a broken one changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._problem = ""
        self._sources: tuple[ReplicaSource, ...] = ()

    def sources(self) -> tuple[ReplicaSource, ...]:
        """Return the list as last read without an error."""
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if version != self._seen:
                self._sources = read_replicas(self._path)
                self._seen = version
                self._note("")
        except OSError as error:
            self._seen = None  # it may come back as it was
            self._note(error.strerror or str(error))
        except ValueError as error:
            self._seen = version
            self._note(str(error))
        return self._sources

    def _note(self, problem: str) -> None:
        if problem and problem != self._problem:
            extra = {"file": str(self._path), "error": problem, "kept": len(self._sources)}
            log.error("replicas file is not usable, keeping its last list", extra=extra)
        elif self._problem and not problem:
            log.warning("replicas file is usable again", extra={"file": str(self._path)})
        self._problem = problem


def read_replicas(path: Path) -> tuple[ReplicaSource, ...]:
    """Read a YAML list in the form of the configuration's ``replicas``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a list; the message is one line.
    """
    listed = read_yaml(path)
    if not isinstance(listed, list):
        raise ValueError("not a YAML list of replicas")
    try:
        return Config.model_validate({"replicas": listed}).replicas
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from None


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def one_family(addresses: Iterable[str]) -> tuple[str, ...]:
    """Sort the addresses; of a replica that has both IPv4 and IPv6 it keeps one, IPv4."""
    ips = sorted({ipaddress.ip_address(address) for address in addresses}, key=_order)
    return tuple(str(ip) for ip in ips if ip.version == ips[0].version)


def _order(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return ip.version, int(ip)
