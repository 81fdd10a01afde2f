"""The EndpointSlices of an API server of Kubernetes, listed and watched as the real one has them.

As in kube-apiserver: every change has a version; a watch tells all changes after the one it is
asked from, and nothing while that is yet to come; items of a list have no kind.
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

RECORDED = Path(__file__).parent / "data" / "kubernetes"  # what a real one answered
KIND = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
SERVICE = "kubernetes.io/service-name"

_Slice = dict[str, Any]
_Change = tuple[int, _Slice | None, _Slice | None]  # version, and the slice before and after
_END, _HANG_UP = "end", "hang up"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def recorded(name: str) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer."""
    answer = json.loads((RECORDED / f"{name}.json").read_text())
    return answer["status"], answer["body"]


def recorded_watch(name: str) -> list[dict[str, Any]]:
    """The events of a watch."""
    lines = (RECORDED / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def endpoint(
    ip: str, pod: str, ready: bool = True, serving: bool | None = None, terminating: bool = False
) -> dict[str, Any]:
    """One of a slice, as the slice controller writes it."""
    serving = ready if serving is None else serving
    return {
        "addresses": [ip],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "targetRef": {"kind": "Pod", "namespace": "llm", "name": pod},
    }


def terminating(ip: str, pod: str) -> dict[str, Any]:
    """One that is about to end, and serves still."""
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
        "endpoints": [dict(one) for one in endpoints],
        "ports": [{"name": port, "protocol": "TCP", "port": number} for port, number in ports],
    }


class ApiServer:
    """Speaks HTTPS, and takes one token; a test writes its slices, and makes it misbehave."""

    def __init__(self, directory: Path) -> None:
        self.account = directory / "account"  # the files of a pod's service account
        self.port = free_port()
        self.token = "token-1"
        self.forbidden: set[str] = set()  # verbs that the token gives no right to
        self.asked: list[dict[str, str]] = []  # the queries that were answered, each with its path
        self.version = 90
        self.handler: Handler = self._answer  # a test may put another in its place
        self._slices: dict[str, _Slice] = {}
        self._changes: list[_Change] = []
        self.watches: set[asyncio.Queue[Any]] = set()
        """For each that is open what it is to be told: changes, lines, its end."""
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
        self._happened(self._slices.get(name), after)
        self._slices[name] = after

    def delete(self, name: str) -> None:
        self.version += 1
        self._happened(self._slices.pop(name), None)

    def go_back(self, version: int) -> None:
        """To a backup of that version; what came after it never was."""
        self.version = version
        self._changes.clear()

    def send(self, kind: str, **told: Any) -> None:
        """An event of no change to all that watch."""
        for watch in self.watches:
            watch.put_nowait(_line(kind, {**KIND, **told}))

    def end_watches(self, last: bytes = b"", how: str = _END) -> None:
        """Ends all watches as their timeout or a proxy does, perhaps within a line."""
        for watch in self.watches:
            watch.put_nowait(last)
            watch.put_nowait(how)

    def drop_watches(self, last: bytes = b"") -> None:
        self.end_watches(last, _HANG_UP)

    async def watched(self, times: int = 1) -> dict[str, str]:
        """Returns the last query when there were so many watches and the last is open."""

        def so() -> bool:
            return len(self.asked_for("watch")) >= times and bool(self.watches)

        await until(so)
        return self.asked_for("watch")[-1]

    def asked_for(self, verb: str) -> list[dict[str, str]]:
        return [one for one in self.asked if ("watch" in one) == (verb == "watch")]

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._admit)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._context).start()

    async def stop(self) -> None:
        """Nobody listens any more, and what was open is cut."""
        if self._runner is not None:
            self.drop_watches()
            await self._runner.cleanup()

    async def _admit(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            status, body = recorded("unauthorized")
            return web.json_response(body, status=status)
        self.asked.append({"path": request.path, **request.query})
        return await self.handler(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert re.fullmatch(
            "/apis/discovery.k8s.io/v1/namespaces/[^/]+/endpointslices", request.path
        )
        verb = "watch" if request.query.get("watch") == "true" else "list"
        if verb in self.forbidden:
            status, body = recorded("forbidden")
            told = body["message"].replace('API group ""', 'API group "discovery.k8s.io"')
            told = told.replace("pods", "endpointslices").replace("list", verb)
            return web.json_response(body | {"message": told}, status=status)
        selector = request.query["labelSelector"]
        return await (self._watch if verb == "watch" else self._list)(request, selector)

    async def _list(self, _: web.Request, selector: str) -> web.StreamResponse:
        items = [one for one in self._slices.values() if _selected(one, selector)]
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
                    await self._tell(watch, request, response)
        finally:
            self.watches.discard(watch)
        return response

    async def _tell(
        self, watch: "asyncio.Queue[Any]", request: web.Request, response: web.StreamResponse
    ) -> None:
        since, selector = (request.query[key] for key in ("resourceVersion", "labelSelector"))
        while (told := await watch.get()) != _END:
            if told == _HANG_UP:
                assert request.transport is not None
                request.transport.abort()
                return
            if isinstance(told, bytes):
                await response.write(told)
            elif told[0] > int(since):
                await response.write(_event(told, selector))

    def _happened(self, before: _Slice | None, after: _Slice | None) -> None:
        change = (self.version, before, after)
        self._changes.append(change)
        for watch in self.watches:
            watch.put_nowait(change)


def _selected(one: Mapping[str, Any], selector: str) -> bool:
    label, _, value = selector.partition("=")
    return bool(one["metadata"]["labels"].get(label) == value)


def _event(change: _Change, selector: str) -> bytes:
    """The line that tells of a change those who asked with this selector; empty: none does."""
    version, before, after = change
    told = copy.deepcopy(after or before)
    assert told is not None
    if not _selected(told, selector):
        return b""
    told["metadata"]["resourceVersion"] = str(version)
    kind = "DELETED" if after is None else "MODIFIED" if before else "ADDED"
    return _line(kind, {**KIND, **told})


def _line(kind: str, told: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": told}).encode() + b"\n"


def enter_pod(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process finds is what a pod finds in a cluster with this server."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(kubernetes, "ACCOUNT", server.account)
