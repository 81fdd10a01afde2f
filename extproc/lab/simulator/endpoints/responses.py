"""``/v1/responses``, and the store of responses."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import PrivateAttr

from extproc.lab.simulator import tokens
from extproc.lab.simulator.endpoints.base import (
    Bound,
    GenerateBody,
    Output,
    Reply,
    RequestError,
    Usage,
    event,
)
from extproc.lab.simulator.live import Generation
from extproc.lab.simulator.steps import FinishReason


class ResponsesBody(GenerateBody):
    """The request."""

    bounds = ("max_output_tokens",)
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Bound | None = None
    store: bool | None = True
    background: bool | None = False
    previous_response_id: str | None = None
    _earlier: bytes = PrivateAttr(b"")

    def begin_with(self, conversation: bytes) -> None:
        """Go on from a conversation, encoded."""
        self._earlier = conversation

    @property
    def prompts(self) -> list[bytes]:
        """What was said before, instructions, tools, input, framed, and the head of the answer."""
        if not self.input:
            raise RequestError("the input must not be empty", "input")
        turns = []
        if self.instructions:
            turns.append(tokens.encode_turn("system", tokens.encode(self.instructions)))
        if self.tools:
            turns.append(tokens.encode_turn("tools", tokens.encode(json.dumps(self.tools))))
        items = [{"content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            content = tokens.encode_content(item.get("content", item))
            turns.append(tokens.encode_turn(str(item.get("role", "user")), content))
        return [self._earlier + b"".join(turns) + tokens.encode("<|assistant|>")]


class ResponsesReply(Reply):
    """The reply. Its events are numbered."""

    id_prefix = "resp_"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = -1
        self._item = {"item_id": f"msg_{self.key}", "output_index": 0, "content_index": 0}

    def prelude(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opening(self, sequences: int) -> bytes:
        message = self._message("in_progress", [])
        return self._event(
            "response.output_item.added", output_index=0, item=message
        ) + self._event("response.content_part.added", **self._item, part=self._part(""))

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        return self._event("response.output_text.delta", **self._item, delta=text, logprobs=[])

    def closing(self, outputs: Sequence[Output], usage: Usage, include_usage: bool) -> bytes:
        output = outputs[0]
        part = self._part(output.text)
        message = self._message("completed", [part])
        return (
            self._event("response.output_text.done", **self._item, text=output.text, logprobs=[])
            + self._event("response.content_part.done", **self._item, part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
            + self._event("response.completed", response=self.whole(outputs, usage))
        )

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        output = outputs[0]
        cut = output.reason == FinishReason.LENGTH
        response = self._response("incomplete" if cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["output"] = [self._message("completed", [self._part(output.text)])]
        response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        return response

    def queued(self) -> dict[str, Any]:
        return self._response("queued")

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields})

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": None,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item["item_id"],
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


@dataclass
class _Stored:
    response: dict[str, Any]
    conversation: bytes = b""  # encoded, with the answer
    work: asyncio.Task[None] | None = None  # in the background, until it is done


class ResponseStore:
    """Keeps the responses of one replica."""

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def response(self, name: str) -> dict[str, Any]:
        return self._find(name).response

    def resume(self, body: GenerateBody) -> None:
        """Put the conversation that a request goes on from before it."""
        if isinstance(body, ResponsesBody) and body.previous_response_id is not None:
            body.begin_with(self._find(body.previous_response_id).conversation)

    def keep(self, body: GenerateBody, reply: Reply, generation: Generation) -> None:
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
