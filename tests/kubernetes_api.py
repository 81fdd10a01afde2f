"""API server of Kubernetes that lists and watches objects like kube-apiserver.

Every change has a version. A watch sends all changes after the version in its query, and nothing
before that version exists. Items of a list have no kind.
"""

import asyncio
import copy
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extproc.lab.harness.processes import free_port
from extproc.poll import reflector
from tests.certificates import Authority
from tests.waiting import until

RECORDED = Path(__file__).parent / "data" / "kubernetes"  # answers of a real server
KIND = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
KINDS = {
    "endpointslices": KIND,
    "pods": {"kind": "Pod", "apiVersion": "v1"},
    "inferencepools": {"kind": "InferencePool", "apiVersion": "inference.networking.k8s.io/v1"},
}
SERVICE = "kubernetes.io/service-name"

_Object = dict[str, Any]
_Change = tuple[int, str, _Object | None, _Object | None]
"""Version, resource, and the object before and after."""
_END, _HANG_UP = "end", "hang up"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def recorded(name: str) -> tuple[int, dict[str, Any]]:
    """Returns status and body of a recorded answer."""
    answer = json.loads((RECORDED / f"{name}.json").read_text())
    return answer["status"], answer["body"]


def recorded_watch(name: str) -> list[dict[str, Any]]:
    """Returns the events of a recorded watch."""
    lines = (RECORDED / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def endpoint(
    ip: str, pod: str, ready: bool = True, serving: bool | None = None, terminating: bool = False
) -> dict[str, Any]:
    """Returns an endpoint as the slice controller writes it."""
    serving = ready if serving is None else serving
    return {
        "addresses": [ip],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "targetRef": {"kind": "Pod", "namespace": "llm", "name": pod},
    }


def terminating(ip: str, pod: str) -> dict[str, Any]:
    """Returns the endpoint of a terminating pod that still serves."""
    return endpoint(ip, pod, ready=False, serving=True, terminating=True)


def endpoint_slice(
    *endpoints: Mapping[str, Any],
    name: str = "vllm-abcde",
    family: str = "IPv4",
    ports: Sequence[tuple[str, int]] = (("http", 8000),),
    service: str = "vllm",
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "llm", "labels": {SERVICE: service}},
        "addressType": family,
        "endpoints": [dict(item) for item in endpoints],
        "ports": [{"name": port, "protocol": "TCP", "port": number} for port, number in ports],
    }


def pod(name: str, ip: str = "", ready: bool = True, **metadata: Any) -> dict[str, Any]:
    """Returns a running pod as kubelet writes it; ``metadata``: labels, annotations, …"""
    condition = {"type": "Ready", "status": str(ready)}
    return {
        "metadata": {"name": name, "namespace": "llm", "labels": {"app": "vllm"}, **metadata},
        "status": {"phase": "Running", "podIP": ip, "conditions": [condition]},
    }


def inference_pool(*ports: int, name: str = "vllm-llama", **labels: str) -> dict[str, Any]:
    """Returns an InferencePool of the pods with these labels, by default ``app: vllm``."""
    picker = {"name": "extproc-router", "port": {"number": 50051}, "failureMode": "FailOpen"}
    return {
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {
            "selector": {"matchLabels": labels or {"app": "vllm"}},
            "targetPorts": [{"number": port} for port in ports or (8000,)],
            "endpointPickerRef": picker,
        },
    }


class ApiServer:
    """HTTPS server that accepts a single token; a test writes its objects, and makes it fail."""

    def __init__(self, directory: Path) -> None:
        self.account = directory / "account"  # the files of a pod's service account
        self.port = free_port()
        self.token = "token-1"
        self.forbidden: set[str] = set()  # verbs and resources for which the token has no right
        self.unknown: set[str] = set()  # resources whose definition is not installed
        self.queries: list[dict[str, str]] = []  # of accepted requests, each with its path
        self.version = 90
        self.handler: Handler = self._answer  # a test may replace it
        self._objects: dict[tuple[str, str], _Object] = {}  # by resource and name
        self._changes: list[_Change] = []
        self.watches: set[asyncio.Queue[Any]] = set()
        """Open watches, each with changes and lines to send, or its end."""
        self._runner: web.AppRunner | None = None
        authority = Authority(directory / "kube-ca")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*authority.sign("kube-apiserver"))
        self.account.mkdir()
        (self.account / "ca.crt").write_bytes(authority.file.read_bytes())
        (self.account / "namespace").write_text("llm")
        self.mount_token(self.token)

    def mount_token(self, token: str) -> None:
        (self.account / "token").write_text(token + "\n")

    def put(self, new: Mapping[str, Any], resource: str = "endpointslices") -> None:
        self.version += 1
        after = copy.deepcopy(dict(new))
        after["metadata"]["resourceVersion"] = str(self.version)
        key = resource, after["metadata"]["name"]
        self._add_change(resource, self._objects.get(key), after)
        self._objects[key] = after

    def delete(self, name: str, resource: str = "endpointslices") -> None:
        self.version += 1
        self._add_change(resource, self._objects.pop((resource, name)), None)

    def go_back(self, version: int) -> None:
        """Restores a backup of that version: later changes never happened."""
        self.version = version
        self._changes.clear()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends an event that is no change to all watches."""
        for watch in self.watches:
            watch.put_nowait(_line(kind, {**KIND, **fields}))

    def end_watches(self, last: bytes = b"", how: str = _END) -> None:
        """Ends all watches, as a timeout or a proxy does; ``last`` may be part of a line."""
        for watch in self.watches:
            watch.put_nowait(last)
            watch.put_nowait(how)

    def drop_watches(self, last: bytes = b"") -> None:
        self.end_watches(last, _HANG_UP)

    async def watched(self, times: int = 1) -> dict[str, str]:
        """Waits until this many watches have been opened; returns the query of the last."""
        await until(lambda: len(self.queries_of("watch")) >= times and self.watches)
        return self.queries_of("watch")[-1]

    def queries_of(self, verb: str) -> list[dict[str, str]]:
        return [query for query in self.queries if ("watch" in query) == (verb == "watch")]

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._admit)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._context).start()

    async def stop(self) -> None:
        """Closes the port and cuts open connections."""
        if self._runner is not None:
            self.drop_watches()
            await self._runner.cleanup()

    async def _admit(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            status, body = recorded("unauthorized")
            return web.json_response(body, status=status)
        self.queries.append({"path": request.path, **request.query})
        return await self.handler(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        found = re.fullmatch("/apis?/(.+)/namespaces/[^/]+/([a-z]+)", request.path)
        assert found
        version, resource = found.groups()
        assert version == KINDS[resource]["apiVersion"]
        if resource in self.unknown:
            return web.Response(status=404, text="404 page not found\n")
        verb = "watch" if request.query.get("watch") == "true" else "list"
        if self.forbidden & {verb, resource}:
            status, body = recorded("forbidden")
            group = version.rpartition("/")[0]
            message = body["message"].replace('API group ""', f'API group "{group}"')
            message = message.replace("pods", resource).replace("list", verb)
            return web.json_response(body | {"message": message}, status=status)
        return await (self._watch if verb == "watch" else self._list)(request, resource)

    async def _list(self, request: web.Request, resource: str) -> web.StreamResponse:
        kind = KINDS[resource]
        objects = [item for (plural, _), item in self._objects.items() if plural == resource]
        return web.json_response(
            {
                "kind": f"{kind['kind']}List",
                "apiVersion": kind["apiVersion"],
                "metadata": {"resourceVersion": str(self.version)},
                "items": [item for item in objects if _selected(item, request.query)],
            }
        )

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        watch: asyncio.Queue[Any] = asyncio.Queue()
        for change in self._changes:
            watch.put_nowait(change)
        self.watches.add(watch)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                    await self._send_changes(watch, request, response, resource)
        finally:
            self.watches.discard(watch)
        return response

    async def _send_changes(
        self,
        watch: "asyncio.Queue[Any]",
        request: web.Request,
        response: web.StreamResponse,
        resource: str,
    ) -> None:
        since = request.query["resourceVersion"]
        while (item := await watch.get()) != _END:
            if item == _HANG_UP:
                assert request.transport is not None
                request.transport.abort()
                return
            if isinstance(item, bytes):
                await response.write(item)
            elif item[0] > int(since) and item[1] == resource:
                await response.write(_event(item, request.query))

    def _add_change(self, resource: str, before: _Object | None, after: _Object | None) -> None:
        change = (self.version, resource, before, after)
        self._changes.append(change)
        for watch in self.watches:
            watch.put_nowait(change)


def _selected(item: Mapping[str, Any] | None, query: Mapping[str, str]) -> bool:
    """Returns True if the object has the labels, and the name, that the query wants."""
    if item is None:
        return False
    metadata = item["metadata"]
    labels = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return labels.items() <= metadata.get("labels", {}).items() and name in ("", metadata["name"])


def _event(change: _Change, query: Mapping[str, str]) -> bytes:
    """Returns the line of a change for a watch with this query; empty: not selected."""
    version, resource, before, after = change
    was, now = _selected(before, query), _selected(after, query)
    if not was and not now:
        return b""
    changed = copy.deepcopy(after or before)
    assert changed is not None
    changed["metadata"]["resourceVersion"] = str(version)
    kind = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
    return _line(kind, KINDS[resource] | changed)


def _line(kind: str, item: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def enter_pod(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process the environment and service account of a pod in the server's cluster."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(reflector, "ACCOUNT", server.account)
