"""Pods of a Service or an InferencePool of Kubernetes; needs the extra ``kubernetes``.

EndpointSlices have all that a poller has to know of a Service's pods: address, port, readiness, and
whether a pod terminates. Reading slices needs no right to read pods. An InferencePool has no
slices: its selector names the pods.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.discovery_v1 import Endpoint, EndpointConditions
from lightkube.resources import core_v1
from lightkube.resources.discovery_v1 import EndpointSlice

from extproc.config import KubernetesPods
from extproc.ground.address import join_address
from extproc.ground.outage_log import OutageLog
from extproc.poll.reflector import Reflector

log = logging.getLogger(__name__)

_InferencePool = create_namespaced_resource(
    "inference.networking.k8s.io", "v1", "InferencePool", "inferencepools"
)
_ACTIVE_PORTS = "inference.networking.k8s.io/active-ports"
"""Annotation with the only ports of the InferencePool that a pod serves, separated by commas."""


@dataclass(frozen=True, slots=True)
class Pod:
    """Kubernetes replica: a pod, one port of a pod, or an address without a pod."""

    name: str  # empty: not a pod
    ready: bool
    terminating: bool  # gets no new requests, but may still serve requests in flight
    rank: int = 0  # index of the port in the InferencePool's list: the data-parallel rank


@dataclass(eq=False)
class KubernetesWatch:
    """Pods of a Kubernetes source; after a failure, the last known pods stay."""

    wanted: KubernetesPods
    changed: Callable[[], None]  # called when the pods have changed
    timeout_s: float  # longest wait of ``look_up``
    random: Random  # source of random waits after failures
    pods: dict[str, Pod] = field(init=False, default_factory=dict)  # by ``ip:port``

    def __post_init__(self) -> None:
        self._reflectors: list[Reflector] = []
        self._empty = OutageLog(
            log,
            "Kubernetes source has no replicas",
            "Kubernetes source has replicas again",
            each=True,
            source=str(self.wanted),
        )

    @property
    def listed(self) -> bool:
        """True if the API server has listed the pods."""
        return all(reflector.listed for reflector in self._reflectors)

    @property
    def problem(self) -> str:
        """Reason why the pods are unknown or the source has none; empty if there is no problem."""
        problems = (reflector.problem for reflector in self._reflectors)
        return next(filter(None, problems), self._empty.problem)

    async def look_up(self) -> None:
        """Waits until the first lists have succeeded or failed, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                for reflector in self._reflectors:  # the first reflector may add a second one
                    await reflector.tried.wait()

    def stop(self) -> None:
        for reflector in self._reflectors:
            reflector.stop()

    def _reflect(
        self, kind: type[Any], changed: Callable[[], None], **selection: dict[str, Any]
    ) -> Reflector:
        where = {"namespace": self.wanted.namespace, **selection}
        reflector = Reflector(kind, where, changed, str(self.wanted), self.random)
        self._reflectors.append(reflector)
        return reflector

    def _update(self, pods: dict[str, Pod], problem: str = "") -> None:
        if pods != self.pods:
            self.pods = pods
            self.changed()
        self._empty.note(problem)


class ServiceWatch(KubernetesWatch):
    """Pods of a Service, as its EndpointSlices list them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = {"kubernetes.io/service-name": self.wanted.service}
        self._slices = self._reflect(EndpointSlice, self._read, labels=labels)

    def _read(self) -> None:
        slices, port = self._slices.objects.values(), self.wanted.port or ""
        pods, problem = pods_of(slices, port), ""
        if not slices:
            problem = "no EndpointSlices: does the Service exist in that namespace?"
        elif not pods and any(item.endpoints for item in slices):
            problem = f"none of its endpoints has an IP address and the port {port}"
        self._update(pods, problem)


class PoolWatch(KubernetesWatch):
    """Pods that the selector of an InferencePool matches, at the pool's ports.

    The first reflector has the pool; the second one, once the pool is known, has the pods.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        name = {"metadata.name": self.wanted.inference_pool}
        self._pools = self._reflect(_InferencePool, self._read, fields=name)
        self._selector: dict[str, str] | None = None  # labels of the members

    def _read(self) -> None:
        pool = next(iter(self._pools.objects.values()), None)
        selector = pool and pool.spec["selector"]["matchLabels"]
        if selector != self._selector:  # other pods, or none, take the place of the former pods
            self._selector = selector
            while len(self._reflectors) > 1:
                self._reflectors.pop().stop()
            if selector is not None:
                self._reflect(core_v1.Pod, self._read, labels=selector)
        if pool is None:
            self._update({}, "no InferencePool of that name in that namespace")
        elif self.listed:
            _, members = self._reflectors
            ports = [port["number"] for port in pool.spec["targetPorts"]]
            self._update(members_of(members.objects.values(), ports))


def members_of(pods: Iterable[core_v1.Pod], ports: Sequence[int]) -> dict[str, Pod]:
    """Returns the replicas of an InferencePool by ``ip:port``: each port of a pod is a replica.

    Pods without an address and pods that have ended are skipped, as in EndpointSlices. If the pool
    has several ports, replicas have the names that the reference endpoint picker gives them.
    """
    found: dict[str, Pod] = {}
    for item in pods:
        metadata, status = item.metadata, item.status
        assert metadata is not None
        assert status is not None
        if not status.podIP or status.phase in ("Succeeded", "Failed"):
            continue
        conditions = {condition.type: condition.status for condition in status.conditions or ()}
        ready, terminating = conditions.get("Ready") == "True", bool(metadata.deletionTimestamp)
        active = (metadata.annotations or {}).get(_ACTIVE_PORTS)
        for rank, port in enumerate(ports):
            if active is None or str(port) in map(str.strip, active.split(",")):
                name = f"{metadata.name}-rank-{rank}" if len(ports) > 1 else f"{metadata.name}"
                address = join_address(status.podIP, port)
                found[address] = Pod(name, ready, terminating, rank)
    return dict(sorted(found.items()))


def pods_of(slices: Iterable[EndpointSlice], port: int | str) -> dict[str, Pod]:
    """Returns the pods of a Service by ``ip:port``; a pod with IPv4 and IPv6 counts once, as IPv4.

    Args:
        slices: all slices of the Service. A pod may be in two slices for a moment; it counts as
            ready, or as terminating, if either slice says so.
        port: number, or name of the port in the slices.
    """
    families: dict[str, str] = {}  # by pod
    found: dict[str, Pod] = {}
    for item in sorted(slices, key=lambda item: item.addressType):
        ports = {named.name: named.port for named in item.ports or ()}
        number = port if isinstance(port, int) else ports.get(port)
        if number is None or item.addressType not in ("IPv4", "IPv6"):
            continue
        for endpoint in item.endpoints or ():
            address = join_address(endpoint.addresses[0], number)  # all lead to the same pod
            pod = _pod(endpoint)
            if families.setdefault(pod.name or address, item.addressType) != item.addressType:
                continue
            other = found.get(address, pod)
            found[address] = Pod(
                pod.name, pod.ready or other.ready, pod.terminating or other.terminating
            )
    return dict(sorted(found.items()))


def _pod(endpoint: Endpoint) -> Pod:
    """Reads an endpoint. By the defaults of Kubernetes, a missing condition ``ready`` is true, and
    a missing ``serving`` equals ``ready``.

    A terminating pod that still serves counts as ready, although its condition ``ready`` is false.
    """
    conditions, target = endpoint.conditions or EndpointConditions(), endpoint.targetRef
    ready, terminating = conditions.ready is not False, bool(conditions.terminating)
    serving = ready if conditions.serving is None else conditions.serving
    name = target.name if target and target.name else ""
    return Pod(name, ready or (terminating and serving), terminating)
