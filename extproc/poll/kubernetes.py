"""The pods of a Service of Kubernetes, by its EndpointSlices; needs the extra ``kubernetes``.

Slices and not pods: they say all that matters here (address, port, readiness, whether a pod is
about to end), follow the Service's selector, and whoever reads them need not be allowed to read
pods.
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
"""Folder in which kubelet keeps a pod's token and CA; kubelet renews the token."""

_CONNECT_S = 5.0
_LIST_S = 10.0
_WATCH_S = 40
"""Seconds after which a watch ends and the next list begins: what stands between may hang up on a
connection that is silent for a minute, and a server that vanished is found out."""
_LATE_S = 5.0
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A replica, as Kubernetes sees it."""

    name: str  # empty: the endpoint is no pod
    ready: bool
    terminating: bool  # takes nothing new, and may still be serving


class ServiceWatch:
    """Lists the EndpointSlices of a Service, watches them for a while, and begins again.

    A failure keeps the last answer. Each round reads token and authority anew, for kubelet renews
    them.

    Args:
        wanted: the Service.
        changed: called when its pods have changed.
        timeout_s: how long :meth:`look_up` waits for the first list.
        random: spreads attempts after failures.
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
        who, text = str(wanted), "Kubernetes does not tell of a Service, keeping its last pods"
        again = "Kubernetes tells of the Service again"
        self._untold = OutageLog(log, text, again, logging.ERROR, each=True, service=who)
        self._empty = OutageLog(log, "a Service has no replicas", each=True, service=who)
        self._tried = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @property
    def problem(self) -> str:
        """Why the Service is not known, or has no pods; empty: all is well."""
        return self._untold.problem or self._empty.problem or ("" if self.listed else "no answer")

    async def look_up(self) -> None:
        """Waits until the Service was listed for the first time, or could not be."""
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
                self._untold.failed(_problem(error))
            except Exception as error:  # the other Services go on
                self._untold.failed(f"{type(error).__name__}: {error}", error)
            self._tried.set()
            await asyncio.sleep(self._backoff.next())

    async def _list_and_watch(self) -> None:
        config = KubeConfig.from_service_account(ACCOUNT)
        transport = _Transport(
            self._watching, ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
        )
        times = httpx2.Timeout(_LIST_S, connect=_CONNECT_S)
        client = AsyncClient(config, timeout=times, trust_env=False, transport=transport)
        labels: Any = {"kubernetes.io/service-name": self._wanted.service}
        asked = {"namespace": self._wanted.namespace, "labels": labels}
        try:
            listed = client.list(EndpointSlice, **asked)
            slices = {_name(one): one async for one in listed}
            self._look(slices.values())
            version = listed.resourceVersion
            events = client.watch(
                EndpointSlice, server_timeout=_WATCH_S, resource_version=version, **asked
            )
            async with asyncio.timeout(_WATCH_S + _LATE_S):
                async for kind, one in events:
                    if kind in ("ADDED", "MODIFIED"):
                        slices[_name(one)] = one
                    elif kind == "DELETED":
                        slices.pop(_name(one), None)
                    self._look(slices.values())
        except (httpx2.TransportError, TimeoutError, msgspec.DecodeError) as error:
            if not transport.watched or isinstance(error, msgspec.ValidationError):
                raise  # else the watch was cut off, perhaps within a line
        finally:
            await client.close()

    def _watching(self) -> None:
        self._untold.recovered()
        self._backoff.reset()

    def _look(self, slices: Collection[EndpointSlice]) -> None:
        self.listed = True
        pods = pods_of(slices, self._wanted.port)
        if pods != self.pods:
            self.pods = pods
            self._changed()
        if not slices:
            why = "it has no EndpointSlices: is there such a Service in that namespace?"
            self._empty.failed(why)
        elif not pods and any(one.endpoints for one in slices):
            why = f"none of its endpoints has an IP address and the port {self._wanted.port}"
            self._empty.failed(why)
        else:
            self._empty.recovered()
        self._tried.set()


class _Transport(httpx2.AsyncHTTPTransport):
    """Takes one watch, and reads what the API server says of a refusal.

    When a watch ends, lightkube begins another one at the last version. A server that came back
    with older data takes that for a version yet to come, and tells nothing (kubernetes/kubernetes
    issue 107457).
    """

    def __init__(self, watching: Callable[[], None], authority: ssl.SSLContext) -> None:
        # The default since Python 3.13 refuses authorities that clusters have made for years.
        authority.verify_flags &= ~ssl.VERIFY_X509_STRICT
        super().__init__(verify=authority)
        self._watching = watching
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
            self._watching()
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
            return f"{error.args[0]} is not set, as it is in every pod: is this one?"
        case ssl.SSLError():
            return f"{ACCOUNT / 'ca.crt'} holds no certificate (PEM): {error}"
        case ConfigError() | OSError():
            return (
                f"{ACCOUNT}: {error}: a pod has it that has a service account and does not set "
                "automountServiceAccountToken to false"
            )
    return f"no answer from the API server: {str(error) or type(error).__name__}"


def _name(one: EndpointSlice) -> str | None:
    return one.metadata.name if one.metadata else None


def pods_of(slices: Iterable[EndpointSlice], port: int | str) -> dict[str, Pod]:
    """Returns the pods in all slices of a Service by ``ip:port``: its IPv4, or else its IPv6.

    Args:
        slices: all of the Service. A pod may be in two of them for a moment, and the older one may
            say less.
        port: a pod's own, or the name by which slices have it.
    """
    families: dict[str, str] = {}  # by pod
    found: dict[str, Pod] = {}
    for one in sorted(slices, key=lambda one: one.addressType):
        number = _number(one, port)
        if number is None or one.addressType not in ("IPv4", "IPv6"):
            continue
        for endpoint in one.endpoints or ():
            address = join_address(endpoint.addresses[0], number)  # others are the same pod's
            pod = _pod(endpoint)
            if families.setdefault(pod.name or address, one.addressType) != one.addressType:
                continue
            other = found.get(address, pod)
            found[address] = Pod(
                pod.name, pod.ready or other.ready, pod.terminating or other.terminating
            )
    return dict(sorted(found.items()))


def _number(one: EndpointSlice, port: int | str) -> int | None:
    if isinstance(port, int):
        return port
    return next((known.port for known in one.ports or () if known.name == port), None)


def _pod(endpoint: Endpoint) -> Pod:
    """Reads what is not said as Kubernetes defines: a pod is ready, and serves if it is ready.

    A pod that terminates is not ready, whether or not it serves still.
    """
    said, target = endpoint.conditions, endpoint.targetRef
    ready = said is None or said.ready is not False
    terminating = said is not None and bool(said.terminating)
    serving = ready if said is None or said.serving is None else said.serving
    name = target.name if target and target.name else ""
    return Pod(name, ready or (terminating and serving), terminating)
