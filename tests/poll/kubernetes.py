"""Pods that discovery finds through the API server of Kubernetes."""

import asyncio
import json
from random import Random
from typing import Any

from aiohttp import web

from extproc.config import ReplicaSource
from extproc.poll.discovery import Discovery
from tests.kubernetes_api import recorded, recorded_watch
from tests.waiting import PATIENCE_S, until_read

LOST = "Kubernetes source cannot be watched: keeping its last pods and retrying"
FOUND = "Kubernetes source is watched again"
EMPTY = "Kubernetes source has no replicas"
SCALED = (
    {"vllm_0": "serves", "vllm_1": "serves", "vllm_2": "not ready"},
    {"vllm_0": "serves", "vllm_1": "serves", "vllm_2": "serves"},
    {"vllm_0": "serves", "vllm_1": "not ready", "vllm_2": "serves"},
    {"vllm_0": "serves", "vllm_1": "serves", "vllm_2": "serves"},
    {"vllm_0": "drains", "vllm_1": "serves", "vllm_2": "serves"},
)
"""Pods after each of the first events of the recorded watches."""


class Found:
    """Pods that discovery finds in a Kubernetes source, until the end of the ``with`` block."""

    def __init__(self, **pods: Any) -> None:
        source = ReplicaSource.model_validate({"kubernetes": pods})
        self.discovery = Discovery([source], None, PATIENCE_S, random=Random(1))

    def __enter__(self) -> "Found":
        return self

    def __exit__(self, *_: object) -> None:
        self.discovery.stop()

    async def pods(self) -> dict[str, str]:
        return {
            pod.name: "drains" if pod.draining else "serves" if pod.ready else "not ready"
            for pod in await self.discovery.targets()
        }

    async def has(self, **pods: str) -> None:
        expected = {name.replace("_", "-"): state for name, state in pods.items()}
        await until_read(self.pods, lambda now: now == expected)


class RecordedAnswers:
    """Answers of a real API server: a list, then watches, one after the other."""

    def __init__(self, resource: str, *watches: str) -> None:
        self._resource = resource
        self._watches = [recorded_watch(name) for name in watches]
        self.step = asyncio.Semaphore(0)  # each release sends an event

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            status, body = recorded(f"{self._resource}-list")
            return web.json_response(body, status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        if not self._watches:
            await asyncio.Event().wait()
        for event in self._watches.pop(0):
            await self.step.acquire()
            await response.write(json.dumps(event).encode() + b"\n")
        return response
