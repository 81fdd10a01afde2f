"""Pods of a Service of Kubernetes, read from its EndpointSlices; needs the extra ``kubernetes``.

EndpointSlices have all that a poller needs: address, port, readiness, and whether a pod terminates.
They follow the Service's selector, and reading them needs no right to read pods.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import msgspec
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.models.discovery_v1 import Endpoint
from lightkube.models.meta_v1 import Status
from lightkube.resources.discovery_v1 import EndpointSlice

from extproc.config import KubernetesService
from extproc.ground.address import join_address
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import Backoff

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token and CA; kubelet renews the token."""

_CONNECT_S = 5.0
_LIST_S = 10.0
_WATCH_S = 40
"""Seconds after which the API server ends a watch, and a new list begins. Proxies may cut
connections that are silent for a minute, and the list fails if the server is gone."""
_LATE_S = 5.0  # seconds beyond ``_WATCH_S`` after which this side ends the watch
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, or another endpoint of the Service."""

    name: str  # empty: not a pod
    ready: bool
    terminating: bool  # gets no new requests, but may still serve those in flight


class ServiceWatch:
    """Pods of a Service: lists its EndpointSlices, watches them for ``_WATCH_S``, and repeats.

    After a failure the last pods stay. Each round reads token and CA again, because kubelet renews
    them.

    Args:
        wanted: the Service.
        changed: called when the pods have changed.
        timeout_s: longest wait of :meth:`look_up`.
        random: source of random waits after failures, so that pollers do not retry together.
    """

    def __init__(
        self,
        wanted: KubernetesService,
        changed: Callable[[], None],
        timeout_s: float,
        random: Random,
    ) -> None:
        self.pods: dict[str, Pod] = {}  # by ``ip:port``
        self.listed = False
        self._wanted = wanted
        self._changed = changed
        self._timeout_s = timeout_s
        self._backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S, random)
        service = str(wanted)
        begins = "Service cannot be watched: keeping its last pods and retrying"
        over = "Service is watched again"
        self._outage = OutageLog(log, begins, over, logging.ERROR, each=True, service=service)
        self._empty = OutageLog(log, "Service has no replicas", each=True, service=service)
        self._tried = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @property
    def problem(self) -> str:
        """Reason why the pods are unknown or the Service has none; empty: no problem."""
        return self._outage.problem or self._empty.problem or ("" if self.listed else "no answer")

    async def look_up(self) -> None:
        """Waits until the first list has succeeded or failed, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._tried.wait()

    def stop(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                await self._list_and_watch()
            except (httpx2.HTTPError, ConfigError, OSError, KeyError) as error:
                self._outage.failed(_problem(error))
            except Exception as error:  # must not end the watches of other Services
                self._outage.failed(f"{type(error).__name__}: {error}", error)
            self._tried.set()
            await asyncio.sleep(self._backoff.next())

    async def _list_and_watch(self) -> None:
        config = KubeConfig.from_service_account(ACCOUNT)
        authority = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
        transport = _Transport(self._watch_began, authority)
        times = httpx2.Timeout(_LIST_S, connect=_CONNECT_S)
        client = AsyncClient(config, timeout=times, trust_env=False, transport=transport)
        labels: Any = {"kubernetes.io/service-name": self._wanted.service}
        selected = {"namespace": self._wanted.namespace, "labels": labels}
        try:
            listed = client.list(EndpointSlice, **selected)
            slices = {_name(item): item async for item in listed}
            self._read(slices.values())
            version = listed.resourceVersion
            events = client.watch(
                EndpointSlice, server_timeout=_WATCH_S, resource_version=version, **selected
            )
            async with asyncio.timeout(_WATCH_S + _LATE_S):
                async for kind, item in events:
                    if kind in ("ADDED", "MODIFIED"):
                        slices[_name(item)] = item
                    elif kind == "DELETED":
                        slices.pop(_name(item), None)
                    self._read(slices.values())
        except (httpx2.TransportError, TimeoutError, msgspec.DecodeError) as error:
            if not transport.watched or isinstance(error, msgspec.ValidationError):
                raise  # otherwise the watch was cut, perhaps within a line
        finally:
            await client.close()

    def _watch_began(self) -> None:
        self._outage.recovered()
        self._backoff.reset()

    def _read(self, slices: Collection[EndpointSlice]) -> None:
        self.listed = True
        pods = pods_of(slices, self._wanted.port)
        if pods != self.pods:
            self.pods = pods
            self._changed()
        if not slices:
            self._empty.failed("no EndpointSlices: does the Service exist in that namespace?")
        elif not pods and any(item.endpoints for item in slices):
            port = self._wanted.port
            self._empty.failed(f"none of its endpoints has an IP address and the port {port}")
        else:
            self._empty.recovered()
        self._tried.set()


class _Transport(httpx2.AsyncHTTPTransport):
    """HTTP transport that allows a single watch, and raises an error with the API server's reason
    for a refusal.

    After the end of a watch, lightkube would begin another from the last resource version. An API
    server that was restored from older data would wait for that version and send nothing
    (kubernetes/kubernetes issue 107457).
    """

    def __init__(self, watch_began: Callable[[], None], authority: ssl.SSLContext) -> None:
        # Python 3.13 sets this flag by default; many clusters' authorities do not pass with it.
        authority.verify_flags &= ~ssl.VERIFY_X509_STRICT
        super().__init__(verify=authority)
        self._watch_began = watch_began
        self.watched = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.watched:
            raise httpx2.ReadError("the watch has ended")
        response = await super().handle_async_request(request)
        if not response.is_success:
            refusal = _refusal(response.status_code, await response.aread())
            raise httpx2.HTTPStatusError(refusal, request=request, response=response)
        if "watch" in request.url.params:
            self.watched = True
            self._watch_began()
        return response


def _refusal(status: int, body: bytes) -> str:
    try:
        reason = msgspec.json.decode(body, type=Status).message
    except msgspec.DecodeError:
        reason = "no reason given"
    match status:
        case 401:
            return f"the token in {ACCOUNT / 'token'} is not accepted (401): {reason}"
        case 403:
            return (
                "the pod's service account needs a Role that allows the verbs list and watch on "
                f"endpointslices (403): {reason}"
            )
    return f"the API server answered {status}: {reason}"


def _problem(error: Exception) -> str:
    match error:
        case ApiError():
            return f"the watch failed ({error.status.code}): {error}"
        case KeyError():
            return f"{error.args[0]} is not set, as it is in every pod: run this process in a pod"
        case ssl.SSLError():
            return f"{ACCOUNT / 'ca.crt'} holds no certificate (PEM): {error}"
        case ConfigError() | OSError():
            return (
                f"{ACCOUNT}: {error}: give the pod a service account, and do not set "
                "automountServiceAccountToken to false"
            )
    return f"no answer from the API server: {str(error) or type(error).__name__}"


def _name(item: EndpointSlice) -> str | None:
    return item.metadata.name if item.metadata else None


def pods_of(slices: Iterable[EndpointSlice], port: int | str) -> dict[str, Pod]:
    """Returns the pods of a Service by ``ip:port``; a pod with IPv4 and IPv6 counts once, as IPv4.

    Args:
        slices: all slices of the Service. A pod may be in two slices for a moment; it counts as
            ready, or as terminating, if one of them says so.
        port: number, or name of the port in the slices.
    """
    families: dict[str, str] = {}  # by pod
    found: dict[str, Pod] = {}
    for item in sorted(slices, key=lambda item: item.addressType):
        number = _number(item, port)
        if number is None or item.addressType not in ("IPv4", "IPv6"):
            continue
        for endpoint in item.endpoints or ():
            address = join_address(endpoint.addresses[0], number)  # further ones: the same pod
            pod = _pod(endpoint)
            if families.setdefault(pod.name or address, item.addressType) != item.addressType:
                continue
            other = found.get(address, pod)
            found[address] = Pod(
                pod.name, pod.ready or other.ready, pod.terminating or other.terminating
            )
    return dict(sorted(found.items()))


def _number(item: EndpointSlice, port: int | str) -> int | None:
    if isinstance(port, int):
        return port
    return next((named.port for named in item.ports or () if named.name == port), None)


def _pod(endpoint: Endpoint) -> Pod:
    """Reads an endpoint. Missing conditions have the defaults of Kubernetes: ready, and serving if
    ready.

    A terminating pod that still serves counts as ready, although its condition ``ready`` is false.
    """
    conditions, target = endpoint.conditions, endpoint.targetRef
    ready = conditions is None or conditions.ready is not False
    terminating = conditions is not None and bool(conditions.terminating)
    serving = ready if conditions is None or conditions.serving is None else conditions.serving
    name = target.name if target and target.name else ""
    return Pod(name, ready or (terminating and serving), terminating)
