"""Objects of the Kubernetes API, kept current by list and watch; needs the extra ``kubernetes``."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import msgspec
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.core.resource import NamespacedResource, api_info
from lightkube.models.meta_v1 import Status

from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import Backoff

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token and CA; kubelet renews the token."""

_CONNECT_S = 5.0
_LIST_S = 10.0
_WATCH_S = 40
"""Seconds after which the API server ends a watch, so that the next list soon shows if the server
is gone. Less than the minute of silence after which proxies may cut the connection."""
_LATE_S = 5.0  # seconds beyond ``_WATCH_S`` after which the client ends the watch
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


@dataclass(eq=False)
class Reflector:
    """Copy of the selected objects of a kind, like the Reflector of client-go: lists them, watches
    them for ``_WATCH_S``, and repeats.

    After a failure the last objects stay. Each round reads token and CA again (see ``ACCOUNT``).
    """

    kind: type[NamespacedResource]
    selection: Mapping[str, Any]  # ``namespace``, and ``labels`` or ``fields`` of the objects
    changed: Callable[[], None]  # called after each list and each event
    source: str  # source of replicas that the objects belong to, for logs
    random: Random  # source of random waits after failures, so that pollers do not retry together
    objects: dict[str, Any] = field(init=False, default_factory=dict)  # by name
    listed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tried = asyncio.Event()  # the first list has succeeded or failed
        self._backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S, self.random)
        self._outage = OutageLog(
            log,
            "Kubernetes source cannot be watched: keeping its last pods and retrying",
            "Kubernetes source is watched again",
            logging.ERROR,
            each=True,
            source=self.source,
            resource=api_info(self.kind).plural,
        )
        self._task = asyncio.create_task(self._follow())

    @property
    def problem(self) -> str:
        """Reason why the objects may be out of date or are unknown; empty if all is well."""
        return self._outage.problem or ("" if self.listed else "no answer")

    def stop(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                await self._list_and_watch()
            except (httpx2.HTTPError, ConfigError, OSError, KeyError) as error:
                self._outage.failed(_problem(error))
            except Exception as error:  # must not end the watches of other sources
                self._outage.failed(f"{type(error).__name__}: {error}", error)
            self.tried.set()
            await asyncio.sleep(self._backoff.next())

    async def _list_and_watch(self) -> None:
        config = KubeConfig.from_service_account(ACCOUNT)
        authority = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
        transport = _Transport(self._watch_began, authority)
        times = httpx2.Timeout(_LIST_S, connect=_CONNECT_S)
        client = AsyncClient(config, timeout=times, trust_env=False, transport=transport)
        try:
            listed = client.list(self.kind, **self.selection)
            self.objects = {_name(item): item async for item in listed}
            self._read()
            events = client.watch(
                self.kind,
                server_timeout=_WATCH_S,
                resource_version=listed.resourceVersion,
                **self.selection,
            )
            async with asyncio.timeout(_WATCH_S + _LATE_S):
                async for event, item in events:
                    if event in ("ADDED", "MODIFIED"):
                        self.objects[_name(item)] = item
                    elif event == "DELETED":
                        self.objects.pop(_name(item), None)
                    self._read()
        except (httpx2.TransportError, TimeoutError, msgspec.DecodeError) as error:
            if not transport.watched or isinstance(error, msgspec.ValidationError):
                raise  # otherwise the watch was cut, perhaps within a line
        finally:
            await client.close()

    def _watch_began(self) -> None:
        self._outage.recovered()
        self._backoff.reset()

    def _read(self) -> None:
        self.listed = True
        self.changed()
        self.tried.set()


class _Transport(httpx2.AsyncHTTPTransport):
    """HTTP transport that allows a single watch. If the API server refuses a request, the
    transport raises an error with the server's reason.

    After the end of a watch, lightkube would begin another watch from the last resource version. An
    API server that was restored from older data would wait for that version and send nothing
    (kubernetes/kubernetes issue 107457).
    """

    def __init__(self, watch_began: Callable[[], None], authority: ssl.SSLContext) -> None:
        # Python 3.13 sets this flag by default; many clusters' authorities fail its checks.
        authority.verify_flags &= ~ssl.VERIFY_X509_STRICT
        super().__init__(verify=authority)
        self._watch_began = watch_began
        self.watched = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.watched:
            raise httpx2.ReadError("the watch has ended")
        response = await super().handle_async_request(request)
        if not response.is_success:
            resource = request.url.path.rpartition("/")[2]
            refusal = _refusal(response.status_code, resource, await response.aread())
            raise httpx2.HTTPStatusError(refusal, request=request, response=response)
        if "watch" in request.url.params:
            self.watched = True
            self._watch_began()
        return response


def _refusal(status: int, resource: str, body: bytes) -> str:
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
                f"{resource} (403): {reason}"
            )
        case 404:
            return f"the cluster has no {resource} (404): install their custom resource definition"
    return f"the API server answered {status}: {reason}"


def _problem(error: Exception) -> str:
    match error:
        case httpx2.HTTPStatusError():
            return str(error)
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


def _name(item: Any) -> str:
    return str(item.metadata.name)
