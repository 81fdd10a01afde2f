"""Answers of the endpoints that generate text, whole or streamed, and stored responses."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Any, ClassVar

from msgspec.json import encode

from extproc.lab.simulator import tokens
from extproc.lab.simulator.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    GenerateBody,
    MessagesBody,
    RequestError,
    ResponsesBody,
)
from extproc.lab.simulator.live import Generation, TokenUsage
from extproc.lab.simulator.steps import FinishReason
from extproc.request.endpoint import Endpoint

DONE = b"data: [DONE]\n\n"
ERRORS: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.SERVICE_UNAVAILABLE: "Service Unavailable",
}
STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


def error_body(path: str, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error body in the format of the endpoint, Anthropic's or OpenAI's."""
    server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = ERRORS.get(status, "InternalServerError" if server else "BadRequestError")
    if path == Endpoint.MESSAGES:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass
class Reply(ABC):
    """Writer of the answer to one request, in the form of its endpoint."""

    id_prefix: ClassVar[str]

    key: str  # unique part of the id
    model: str
    created: int  # seconds since the epoch
    details: bool  # True: the usage reports cached prompt tokens, an option of vLLM

    def __post_init__(self) -> None:
        self.id = self.id_prefix + self.key

    def prelude(self) -> bytes:
        return b""

    def opening(self, generation: Generation) -> bytes:
        """Return the events of a stream before its first token."""
        return b""

    @abstractmethod
    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        """Return the event for a token of sequence ``index``; ``reason``: why the sequence ends
        with this token; None: the sequence goes on."""

    @abstractmethod
    def closing(self, generation: Generation, include_usage: bool) -> bytes:
        """Return the events at the end of a stream."""

    @abstractmethod
    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the answer to a request that wants no stream."""


class CompletionReply(Reply):
    """Answer of ``/v1/completions``."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        end = {"logprobs": None, "finish_reason": reason}
        return self._chunk(choices=[{"index": index, **self._delta(text), **end}])

    def closing(self, generation: Generation, include_usage: bool) -> bytes:
        usage = self._chunk(choices=[], usage=self._usage(generation.usage()))
        return usage + DONE if include_usage else DONE

    def whole(self, generation: Generation) -> dict[str, Any]:
        choices = [
            {"index": index, **self._text(answer.text), "logprobs": None}
            | {"finish_reason": answer.sequence.reason, "stop_reason": None}
            for index, answer in enumerate(generation.answers)
        ]
        usage = self._usage(generation.usage())
        return {**self._frame(self.object), "choices": choices, "usage": usage}

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk(self, **fields: Any) -> bytes:
        return b"data: %b\n\n" % encode({**self._frame(self.chunk_object), **fields})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, usage: TokenUsage) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": usage.cached}}
        return {
            "prompt_tokens": usage.prompt,
            "total_tokens": usage.prompt + usage.completion,
            "completion_tokens": usage.completion,
            **(details if self.details else {}),
        }


class ChatReply(CompletionReply):
    """Answer of ``/v1/chat/completions``: like a completion, with messages instead of texts."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, generation: Generation) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(choices=[{"index": index, "delta": delta, "finish_reason": None}])
            for index in range(len(generation.answers))
        )

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "tool_calls": []}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}


class MessagesReply(Reply):
    """Answer of ``/v1/messages``."""

    id_prefix = "msg_"

    def opening(self, generation: Generation) -> bytes:
        usage = {"input_tokens": generation.usage().prompt, "output_tokens": 0}
        message = self._message([], None, usage)
        block = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        return event("message_start", message=message) + block

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def closing(self, generation: Generation, include_usage: bool) -> bytes:
        whole = self.whole(generation)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        end = event("message_delta", delta=delta, usage=whole["usage"]) + event("message_stop")
        return event("content_block_stop", index=0) + end

    def whole(self, generation: Generation) -> dict[str, Any]:
        [answer] = generation.answers
        content = [{"type": "text", "text": answer.text}]
        usage = self._usage(generation.usage())
        return self._message(content, STOP_REASONS.get(answer.sequence.reason), usage)

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        end = {"stop_reason": stop_reason, "stop_sequence": None, "usage": usage}
        return {**head, "content": content, **end}

    def _usage(self, usage: TokenUsage) -> dict[str, int]:
        """Return Anthropic's usage. Like vLLM, count cached tokens among the input tokens or, if
        the option ``details`` is set, apart from them."""
        cached = usage.cached if self.details else 0
        counts = {"input_tokens": usage.prompt - cached, "output_tokens": usage.completion}
        return counts | ({"cache_read_input_tokens": cached} if self.details else {})


class ResponsesReply(Reply):
    """Answer of ``/v1/responses``."""

    id_prefix = "resp_"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = count()
        self._item = {"item_id": f"msg_{self.key}", "output_index": 0, "content_index": 0}

    def prelude(self) -> bytes:
        response = self.response("in_progress")
        kinds = ("created", "in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def opening(self, generation: Generation) -> bytes:
        item = self._message("in_progress", [])
        added = self._event("output_item.added", output_index=0, item=item)
        return added + self._event("content_part.added", **self._item, part=_part(""))

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        return self._event("output_text.delta", **self._item, delta=text, logprobs=[])

    def closing(self, generation: Generation, include_usage: bool) -> bytes:
        whole = self.whole(generation)
        [message] = whole["output"]
        [part] = message["content"]
        return (
            self._event("output_text.done", **self._item, text=part["text"], logprobs=[])
            + self._event("content_part.done", **self._item, part=part)
            + self._event("output_item.done", output_index=0, item=message)
            + self._event("completed", response=whole)
        )

    def whole(self, generation: Generation) -> dict[str, Any]:
        [answer], usage = generation.answers, generation.usage()
        cut = answer.sequence.reason == FinishReason.LENGTH
        return self.response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message("completed", [_part(answer.text)])],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def response(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "object": "response", "created_at": self.created}
        absent = ("error", "incomplete_details", "instructions", "metadata", "temperature", "top_p")
        tools = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        state = {"model": self.model, "status": status, "usage": None}
        return {**head, **state, "output": [], **dict.fromkeys(absent), **tools}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(f"response.{kind}", sequence_number=next(self._numbers), **fields)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._item["item_id"], "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def event(kind: str, **fields: Any) -> bytes:
    """Encode a server-sent event whose name and field ``type`` are ``kind``."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


GENERATING: dict[str, tuple[type[GenerateBody], type[Reply]]] = {
    Endpoint.CHAT: (ChatBody, ChatReply),
    Endpoint.COMPLETIONS: (CompletionBody, CompletionReply),
    Endpoint.RESPONSES: (ResponsesBody, ResponsesReply),
    Endpoint.MESSAGES: (MessagesBody, MessagesReply),
}


@dataclass
class _Stored:
    response: dict[str, Any]
    conversation: bytes = b""  # encoded, including the answer
    work: asyncio.Task[None] | None = None  # of an unfinished background response


class ResponseStore:
    """Stored responses of a replica."""

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def response(self, name: str) -> dict[str, Any]:
        return self._find(name).response

    def resume(self, body: GenerateBody) -> None:
        """Prepend to ``body`` the conversation that the request continues."""
        if isinstance(body, ResponsesBody) and body.previous_response_id is not None:
            body.begin_with(self._find(body.previous_response_id).conversation)

    def store(self, body: Body, reply: Reply | None, generation: Generation) -> None:
        """Store the response if it is complete and its request has ``store`` set."""
        if reply and isinstance(body, ResponsesBody) and body.store and generation.complete:
            output = tokens.encode(generation.answers[0].text)
            conversation = body.prompts()[0] + output + tokens.encode("<|end|>")
            whole = reply.whole(generation)
            self._stored[reply.id] = _Stored(whole, conversation)

    def queue(self, reply: Reply, work: asyncio.Task[None]) -> dict[str, Any]:
        """Store a background response as queued, and return it; ``work`` completes it."""
        assert isinstance(reply, ResponsesReply)
        self._stored[reply.id] = _Stored(reply.response("queued"), work=work)
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
