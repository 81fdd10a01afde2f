"""Readers of a response that Envoy forwards in chunks: token usage, and the id of a stored
response."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from extproc.request.endpoint import Endpoint
from extproc.request.fields import MAX_TOKENS

_PRELUDE = {Endpoint.RESPONSES: 2}
"""Endpoint → events that vLLM sends before the engine begins: ``response.created`` and
``response.in_progress``. All other streams begin with the first token."""

_USAGE = b'"usage":'
_ERROR, _ERROR_EVENT = b'data: {"error":', b"event: error\n"  # the second in Anthropic's API
"""Beginnings of the event with which vLLM ends a stream that fails after the status 200. Generated
text contains neither, because JSON escapes quotes and line breaks."""
_CACHED, _CREATED = "cache_read_input_tokens", "cache_creation_input_tokens"
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_MAX_USAGE = 8_192  # bytes of a usage object; longer objects are ignored

# All marks have the same length, so that one overlap between chunks counts each mark once.
_EVENT = b"\nevent:"  # begins the second and later events; JSON contains no raw line break
_DELTA = b'delta":'
_ROLE = b'{"role"'  # in the delta that opens a chat
_TEXT = b'"text":'  # of completions, which have no deltas
_IDS = b'_ids":['  # of streams with token ids instead of text
_COUNTED = _DELTA, _ROLE, _TEXT, _IDS
_OVERLAP = len(_EVENT) - 1
_CARRIED = max(map(len, (_USAGE, _ERROR, _ERROR_EVENT))) - 1

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Tokens of a request, as reported by its replica."""

    prompt_tokens: int | None  # None: not reported
    completion_tokens: int  # counted from the streamed events if not reported
    cached_tokens: int | None = None  # tokens of the prompt found in the prefix cache


class UsageReader:
    """Reads the usage of a response from its body, in chunks split anywhere, in a few kB of memory.

    The reader knows OpenAI's chat, completions, embeddings and Responses APIs and Anthropic's
    messages, as JSON or as server-sent events. It decodes only usage objects. Generated text cannot
    contain the key ``"usage":``, because JSON escapes the quotes. Generated JSON that is embedded
    as an object may contain the key, but the replica's own usage follows later.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.generating = False  # the first token has come
        self.failed = False  # an event of the stream is an error
        self._prelude = _PRELUDE.get(endpoint, 0)  # events still to come before the first token
        self._carry = b""  # last bytes read: perhaps the beginning of a mark, or of a usage object
        self._reported: dict[str, int] = {}
        self._streamed: bool | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes of the response body; bytes of any kind raise no error."""
        if self._streamed is None and (head := chunk.lstrip()):
            self._streamed = not head.startswith((b"{", b"["))
        window = self._carry + chunk
        start = max(0, len(self._carry) - _OVERLAP)
        if self._streamed:
            self.failed |= _ERROR in window or _ERROR_EVENT in window
            for mark in _COUNTED:
                self._counts[mark] += window.count(mark, start)
        if not self.generating:
            self._prelude -= window.count(_EVENT, start)
            self.generating = self._prelude <= 0 and not self.failed
        self._carry = window[-_CARRIED:]
        at = window.find(_USAGE)
        while at >= 0:
            begin = at + len(_USAGE)
            if not self._read(window[begin : begin + _MAX_USAGE]):
                self._carry = window[at:]
            at = window.find(_USAGE, begin)

    def usage(
        self, tokens_per_event: float = 1.0, counted: float = 0.0, stepped: float = 0.0
    ) -> ReportedUsage | None:
        """Return the usage read so far; None: the response had neither a usage figure nor a
        streamed event.

        Args:
            tokens_per_event: tokens of each streamed event except the first. An event may have
                more, because vLLM joins the tokens that its server has not sent yet.
            counted: tokens by the steps of the replica until its last poll.
            stepped: tokens by all its steps. They count if the events have less than ``counted``.
        """
        counts = self._counts
        events = max(0, counts[_DELTA] - counts[_ROLE]) or counts[_TEXT] or counts[_IDS]
        prompt, completion = map(self._reported.get, ("prompt", "completion"))
        if prompt is None and completion is None and not events:
            return None
        tokens = 1 + round((events - 1) * tokens_per_event) if events else 0
        if events and tokens < counted:
            tokens = round(stepped)
        return ReportedUsage(prompt, completion or tokens, self._reported.get("cached"))

    def _read(self, value: bytes) -> bool:
        """Read the usage object at the beginning of ``value``; return False if the object may go on
        in the next chunk."""
        text = value.lstrip()
        if b"}" in text:  # without a brace the object is not whole, and decoding would take long
            with suppress(ValueError, RecursionError):
                usage, _ = _decode(text.decode("latin-1"))
                if isinstance(usage, dict):
                    self._take(usage)
                return True
        return text[:1] not in (b"", b"{") or len(value) == _MAX_USAGE

    def _take(self, usage: dict[str, object]) -> None:
        prompt = _first(usage, "prompt_tokens", "input_tokens")
        if prompt is not None and "input_tokens" in usage:  # Anthropic excludes cached tokens
            prompt += sum(_first(usage, name) or 0 for name in (_CACHED, _CREATED))
        completion = _first(usage, "completion_tokens", "output_tokens")
        cached = _first(usage, _CACHED)
        for details in map(usage.get, _DETAILS):
            if isinstance(details, dict):
                cached = _first(details, "cached_tokens")
        figures = {"prompt": prompt, "completion": completion, "cached": cached}
        self._reported |= {name: value for name, value in figures.items() if value is not None}


def _first(usage: dict[str, object], *names: str) -> int | None:
    """Return the first of the named fields whose value is a plausible number of tokens."""
    values = map(usage.get, names)
    return next((n for n in values if type(n) is int and 0 <= n <= MAX_TOKENS), None)


HEAD_BYTES = 4_096  # of a response, which contain its id: vLLM's JSON and streams begin with it
_ID = re.compile(rb'"id":\s*"(resp_[^"\\]{1,123})"')


def response_id(head: bytes) -> str | None:
    """Return the id of a stored response, if the beginning of its body has the whole id."""
    found = _ID.search(head)
    return found[1].decode(errors="replace") if found else None
