"""A Service of Kubernetes, watched: which pods it has, and what becomes of them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from random import Random

import aiohttp
from pydantic import BaseModel

from extproc.config import KubernetesService
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import Backoff
from extproc.poll import in_cluster
from extproc.poll.endpoint_slices import EndpointSlice, EndpointSliceList, Pod, pods_of
from extproc.poll.in_cluster import ApiError

log = logging.getLogger(__name__)

_LIST_S = 10.0
_WATCH_S = 40
"""Seconds after which a watch ends and the next one begins: what stands between may hang up on one
that is silent for a minute, and a server that vanished is found out."""
_LATE_S = 5.0
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


class _Told(EndpointSlice):
    """What an event is about: a slice, or an error."""

    message: str = ""
    code: int | None = None


class _Event(BaseModel):
    """A line of a watch."""

    type: str
    object: _Told


class ServiceWatch:
    """Lists the EndpointSlices of a Service, watches them for a while, and begins again; what fails
    keeps the last answer. The first list is waited for for ``timeout_s``.

    No watch goes on where another one ended: a server that came back with older data takes one from
    a version that is yet to come, and says nothing (kubernetes/kubernetes issue 107457).
    """

    def __init__(
        self,
        wanted: KubernetesService,
        changed: Callable[[], None],
        timeout_s: float,
        random: Random,
    ) -> None:
        self.pods: dict[str, Pod] = {}
        """By ``ip:port``, as was told last."""
        self.listed = False
        """Whether it was told at all."""
        self._wanted = wanted
        self._changed = changed
        self._timeout_s = timeout_s
        self._backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S, random)
        self._slices: dict[str, EndpointSlice] = {}
        who, text = str(wanted), "Kubernetes does not tell of a Service, keeping its last pods"
        again = "Kubernetes tells of the Service again"
        self._untold = OutageLog(log, text, again, logging.ERROR, each=True, service=who)
        self._empty = OutageLog(log, "a Service has no replicas", each=True, service=who)
        self._tried = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @property
    def problem(self) -> str:
        """Why nothing is told of it, or it has no pods; empty where all is well."""
        return self._untold.problem or self._empty.problem or ("" if self.listed else "no answer")

    async def look_up(self) -> None:
        """Waits until they were listed for the first time, or could not be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._tried.wait()

    def stop(self) -> None:
        """Nobody wants to know any more."""
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch(await self._list())
            except ApiError as error:
                self._untold.failed(error)
            except Exception as error:  # it is this Service's alone: the others go on
                self._untold.failed(f"{type(error).__name__}: {error}", error)
            self._tried.set()
            await asyncio.sleep(self._backoff.next())

    async def _list(self) -> str:
        """Returns the version to watch from."""
        async with in_cluster.ask(self._path, self._query, _LIST_S) as response:
            told = EndpointSliceList.model_validate_json(await response.read())
        self._slices = {one.metadata.name: one for one in told.items or ()}
        self.listed = True
        self._look()
        self._tried.set()
        return told.metadata.resource_version

    async def _watch(self, version: str) -> None:
        """Returns when the watch has ended, or was cut off."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        whole = _WATCH_S + _LATE_S
        async with in_cluster.ask(self._path, self._query | query, whole) as response:
            self._untold.works()
            self._backoff.reset()
            with suppress(aiohttp.ClientError, TimeoutError):
                async for line in response.content:
                    if line.endswith(b"\n"):  # else it was cut off
                        self._hear(_Event.model_validate_json(line))

    def _hear(self, event: _Event) -> None:
        told = event.object
        match event.type:
            case "ADDED" | "MODIFIED":
                self._slices[told.metadata.name] = told
            case "DELETED":
                self._slices.pop(told.metadata.name, None)
            case "ERROR":
                raise ApiError(f"the watch failed ({told.code}): {told.message}")
        self._look()

    def _look(self) -> None:
        pods = pods_of(self._slices.values(), self._wanted.port)
        if pods != self.pods:
            self.pods = pods
            self._changed()
        if not self._slices:
            why = "it has no EndpointSlices: is there such a Service in that namespace?"
            self._empty.failed(why)
        elif not self.pods and any(one.endpoints for one in self._slices.values()):
            why = f"none of its endpoints has an IP address and the port {self._wanted.port}"
            self._empty.failed(why)
        else:
            self._empty.works()

    @property
    def _path(self) -> str:
        namespace = self._wanted.namespace or in_cluster.own_namespace()
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    @property
    def _query(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._wanted.service}"}
