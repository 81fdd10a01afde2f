"""Token usage and the id of a stored response, read while the response passes."""

import json
import re
from dataclasses import dataclass

from extproc.request.endpoint import Endpoint
from extproc.request.fields import MAX_TOKENS

PRELUDE = {Endpoint.RESPONSES: 2}
"""Events that vLLM sends before its engine has begun: ``response.created`` and
``response.in_progress``. All other streams begin with the first token."""

_USAGE = b'"usage":'
_CACHED, _CREATED = "cache_read_input_tokens", "cache_creation_input_tokens"
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_MAX_USAGE = 8_192  # bytes a usage object may have; longer ones are given up

# Marks of equal length, so that one overlap between chunks counts each of them once.
_EVENT = b"\nevent:"  # the second and later ones: JSON has no bare line break
_DELTA = b'delta":'
_ROLE = b'{"role"'  # in the delta that opens a chat
_TEXT = b'"text":'  # of completions, which have no deltas
_IDS = b'_ids":['  # of tokens, without their text
_COUNTED = _DELTA, _ROLE, _TEXT, _IDS
_OVERLAP = len(_EVENT) - 1

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Tokens of a request, as its replica reports them."""

    prompt_tokens: int | None  # None: not reported
    completion_tokens: int  # streamed events where the replica does not report them
    cached_tokens: int | None = None  # of the prompt's, found in the prefix cache


class UsageReader:
    """Reads the usage of one response from its body, in chunks however split.

    The reader knows the dialects of OpenAI's chat, completions, embeddings and Responses APIs and
    of Anthropic's messages, as JSON or as server-sent events. Nothing is decoded but the usage
    objects: the key ``"usage":`` cannot occur inside generated text, since JSON escapes the quotes
    there, and where generated JSON is embedded as such, the replica's own usage comes later.
    Memory stays within a few kB.
    """

    def __init__(self, prelude: int = 0) -> None:
        """``prelude``: the number of events before the first token."""
        self.generating = False  # the first token has come
        self._prelude = prelude
        self._carry = b""
        self._open: bytes | None = None  # what follows a usage key, until it is a whole object
        self._reported: dict[str, int] = {}
        self._streamed: bool | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the response body. Never raises, whatever they are."""
        if self._streamed is None and (head := chunk.lstrip()):
            self._streamed = not head.startswith((b"{", b"["))
        window = self._carry + chunk
        start = max(0, len(self._carry) - _OVERLAP)
        if not self.generating:
            self._prelude -= window.count(_EVENT, start)
            self.generating = self._prelude <= 0
        if self._streamed:
            for mark in _COUNTED:
                self._counts[mark] += window.count(mark, start)
        if self._open is not None:
            self._read((self._open + chunk)[:_MAX_USAGE])
        at = window.find(_USAGE)
        while at >= 0:
            at += len(_USAGE)
            self._read(window[at : at + _MAX_USAGE])
            at = window.find(_USAGE, at)
        self._carry = window[1 - len(_USAGE) :]

    def usage(self) -> ReportedUsage | None:
        """The usage seen so far; None: neither a figure nor a streamed event."""
        counts = self._counts
        events = max(0, counts[_DELTA] - counts[_ROLE]) or counts[_TEXT] or counts[_IDS]
        prompt, completion = map(self._reported.get, ("prompt", "completion"))
        if prompt is None and completion is None and not events:
            return None
        return ReportedUsage(prompt, completion or events, self._reported.get("cached"))

    def _read(self, value: bytes) -> None:
        """Take the usage object that ``value`` begins with; keep it for later while it is cut."""
        value = value.lstrip()
        self._open = value if value[:1] in (b"", b"{") and len(value) < _MAX_USAGE else None
        if b"}" not in value:
            return
        try:
            usage = _decode(value.decode("latin-1"))[0]
        except (ValueError, RecursionError):
            return
        self._open = None
        if isinstance(usage, dict):
            self._take(usage)

    def _take(self, usage: dict[str, object]) -> None:
        prompt = _first(usage, "prompt_tokens", "input_tokens")
        if prompt is not None and "input_tokens" in usage:  # Anthropic's leaves the cached ones out
            prompt += sum(_first(usage, name) or 0 for name in (_CACHED, _CREATED))
        completion = _first(usage, "completion_tokens", "output_tokens")
        cached = _first(usage, _CACHED)
        for details in map(usage.get, _DETAILS):
            if isinstance(details, dict):
                cached = _first(details, "cached_tokens")
        told = {"prompt": prompt, "completion": completion, "cached": cached}
        self._reported |= {name: value for name, value in told.items() if value is not None}


def _first(usage: dict[str, object], *names: str) -> int | None:
    """The first of these fields that is a plausible number of tokens."""
    values = map(usage.get, names)
    return next((one for one in values if type(one) is int and 0 <= one <= MAX_TOKENS), None)


_ID = re.compile(rb'"id":\s*"(resp_[^"\\]{1,123})"')
_WITHIN = 4_096  # bytes in which the id stands: vLLM's JSON and streams begin with it


class ResponseIdReader:
    """Reads the id from the beginning of a body, in chunks however split."""

    def __init__(self) -> None:
        self._head: bytes | None = b""  # None: the id was found, or is not there

    def feed(self, chunk: bytes) -> str | None:
        """Take the next bytes of the body; returns the id once, when it is whole."""
        if self._head is None:
            return None
        self._head += chunk[: _WITHIN - len(self._head)]
        found = _ID.search(self._head)
        if found or len(self._head) >= _WITHIN:
            self._head = None
        return found[1].decode(errors="replace") if found else None
