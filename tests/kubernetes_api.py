"""API server of Kubernetes that lists and watches EndpointSlices like kube-apiserver.

Every change has a version. A watch sends all changes after the version in its query, and nothing
while that version is yet to come. Items of a list have no kind.
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
from extproc.poll import kubernetes
from tests.certificates import Authority
from tests.waiting import until

RECORDED = Path(__file__).parent / "data" / "kubernetes"  # answers of a real server
KIND = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
SERVICE = "kubernetes.io/service-name"

_Slice = dict[str, Any]
_Change = tuple[int, _Slice | None, _Slice | None]  # version, and the slice before and after
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


class ApiServer:
    """HTTPS server that accepts a single token; a test writes its slices, and makes it fail."""

    def __init__(self, directory: Path) -> None:
        self.account = directory / "account"  # the files of a pod's service account
        self.port = free_port()
        self.token = "token-1"
        self.forbidden: set[str] = set()  # verbs for which the token has no right
        self.queries: list[dict[str, str]] = []  # of accepted requests, each with its path
        self.version = 90
        self.handler: Handler = self._answer  # a test may replace it
        self._slices: dict[str, _Slice] = {}
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

    def put(self, new: Mapping[str, Any]) -> None:
        self.version += 1
        after = copy.deepcopy(dict(new))
        after["metadata"]["resourceVersion"] = str(self.version)
        name = after["metadata"]["name"]
        self._add_change(self._slices.get(name), after)
        self._slices[name] = after

    def delete(self, name: str) -> None:
        self.version += 1
        self._add_change(self._slices.pop(name), None)

    def go_back(self, version: int) -> None:
        """Restores a backup of that version: later changes never happened."""
        self.version = version
        self._changes.clear()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends all watches an event that is no change."""
        for watch in self.watches:
            watch.put_nowait(_line(kind, {**KIND, **fields}))

    def end_watches(self, last: bytes = b"", how: str = _END) -> None:
        """Ends all watches like their timeout or a proxy, perhaps within a line."""
        for watch in self.watches:
            watch.put_nowait(last)
            watch.put_nowait(how)

    def drop_watches(self, last: bytes = b"") -> None:
        self.end_watches(last, _HANG_UP)

    async def watched(self, times: int = 1) -> dict[str, str]:
        """Waits for the watch of that number to be open; returns the last query."""
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
        assert re.fullmatch(
            "/apis/discovery.k8s.io/v1/namespaces/[^/]+/endpointslices", request.path
        )
        verb = "watch" if request.query.get("watch") == "true" else "list"
        if verb in self.forbidden:
            status, body = recorded("forbidden")
            message = body["message"].replace('API group ""', 'API group "discovery.k8s.io"')
            message = message.replace("pods", "endpointslices").replace("list", verb)
            return web.json_response(body | {"message": message}, status=status)
        selector = request.query["labelSelector"]
        return await (self._watch if verb == "watch" else self._list)(request, selector)

    async def _list(self, _: web.Request, selector: str) -> web.StreamResponse:
        items = [item for item in self._slices.values() if _selected(item, selector)]
        return web.json_response(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items,
            }
        )

    async def _watch(self, request: web.Request, selector: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        watch: asyncio.Queue[Any] = asyncio.Queue()
        for change in self._changes:
            watch.put_nowait(change)
        self.watches.add(watch)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                    await self._send_changes(watch, request, response)
        finally:
            self.watches.discard(watch)
        return response

    async def _send_changes(
        self, watch: "asyncio.Queue[Any]", request: web.Request, response: web.StreamResponse
    ) -> None:
        since, selector = (request.query[key] for key in ("resourceVersion", "labelSelector"))
        while (item := await watch.get()) != _END:
            if item == _HANG_UP:
                assert request.transport is not None
                request.transport.abort()
                return
            if isinstance(item, bytes):
                await response.write(item)
            elif item[0] > int(since):
                await response.write(_event(item, selector))

    def _add_change(self, before: _Slice | None, after: _Slice | None) -> None:
        change = (self.version, before, after)
        self._changes.append(change)
        for watch in self.watches:
            watch.put_nowait(change)


def _selected(item: Mapping[str, Any], selector: str) -> bool:
    label, _, value = selector.partition("=")
    return bool(item["metadata"]["labels"].get(label) == value)


def _event(change: _Change, selector: str) -> bytes:
    """Returns the line of a change for a watch with this selector; empty: not selected."""
    version, before, after = change
    changed = copy.deepcopy(after or before)
    assert changed is not None
    if not _selected(changed, selector):
        return b""
    changed["metadata"]["resourceVersion"] = str(version)
    kind = "DELETED" if after is None else "MODIFIED" if before else "ADDED"
    return _line(kind, {**KIND, **changed})


def _line(kind: str, item: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def enter_pod(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process the environment and service account of a pod in the server's cluster."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(kubernetes, "ACCOUNT", server.account)
