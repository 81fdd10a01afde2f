"""Responses in a replica's memory, as vLLM keeps them where ``VLLM_ENABLE_RESPONSES_API_STORE`` is
set: of one process, and until it ends."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from extproc.lab.simulator import tokens
from extproc.lab.simulator.endpoints.base import GenerateBody, Reply
from extproc.lab.simulator.endpoints.responses import ResponsesBody, ResponsesReply
from extproc.lab.simulator.errors import RequestError
from extproc.lab.simulator.live import Generation


@dataclass
class _Stored:
    response: dict[str, Any]
    conversation: bytes = b""
    """Encoded, with the answer."""
    work: asyncio.Task[None] | None = None
    """In the background, until it is done."""


class ResponseStore:
    """Keeps the responses of one replica."""

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def response(self, name: str) -> dict[str, Any]:
        """The response of that id, as it is now."""
        return self._find(name).response

    def resume(self, body: GenerateBody) -> None:
        """Put the conversation that a request goes on from before it."""
        if isinstance(body, ResponsesBody) and body.previous_response_id is not None:
            body.begin_with(self._find(body.previous_response_id).conversation)

    def keep(self, body: GenerateBody, reply: Reply, generation: Generation) -> None:
        """Keep what was answered."""
        if isinstance(body, ResponsesBody) and body.store and generation.complete:
            output = tokens.encode(generation.outputs()[0].text)
            conversation = body.prompts[0] + output + tokens.encode("<|end|>")
            whole = reply.whole(generation.outputs(), generation.usage())
            self._stored[reply.id] = _Stored(whole, conversation)

    def queue(self, reply: ResponsesReply, work: asyncio.Task[None]) -> dict[str, Any]:
        """Keep that it is being worked on in the background; returns what the client is told."""
        self._stored[reply.id] = _Stored(reply.queued(), work=work)
        return self.response(reply.id)

    def cancel(self, name: str) -> dict[str, Any]:
        """End work in the background; returns the response."""
        stored = self._find(name)
        if stored.work is None:
            raise RequestError("Cannot cancel a synchronous response.", "response_id")
        stored.work.cancel()
        stored.work = None
        stored.response["status"] = "cancelled"
        return stored.response

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            message = f"Response with id '{name}' not found."
            raise RequestError(message, "response_id", HTTPStatus.NOT_FOUND)
        return self._stored[name]
