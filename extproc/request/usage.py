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

# Of equal length, so that one overlap between chunks counts each of them once.
_EVENT = b"\nevent:"  # the second and later ones: JSON has no bare line break
_DELTA = b'delta":'
_TEXT = b'"text":'
_ROLE = b'{"role"'
_OVERLAP = len(_TEXT) - 1

_DETAILS = ("prompt_tokens_details", "input_tokens_details")

_MAX_USAGE = 8_192  # bytes a usage object may have; longer ones are given up

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Usage:
    """What a replica says a request was, in tokens."""

    prompt_tokens: int | None  # None: the response did not say
    completion_tokens: int  # streamed events where the response did not say
    cached_tokens: int | None = None  # of the prompt's, found in the prefix cache


class UsageReader:
    """Reads the usage of one response from its body, in chunks however split.

    It knows the dialects of OpenAI's chat, completions, embeddings and Responses APIs and of
    Anthropic's messages, as JSON or as server-sent events. Nothing is decoded but the usage
    objects: the key ``"usage":`` cannot occur inside generated text, since JSON escapes the quotes
    there, and where generated JSON is embedded as such, the replica's own usage comes later.
    Memory stays within a few kB.
    """

    def __init__(self, prelude: int = 0) -> None:
        """``prelude``: with how many events the stream begins before the first token."""
        self.generating = False  # whether the first token has come
        self._prelude = prelude
        self._carry = b""
        self._open: bytes | None = None  # what follows a usage key, until it is a whole object
        self._prompt: int | None = None
        self._completion: int | None = None
        self._cached: int | None = None
        self._streamed: bool | None = None
        self._deltas = 0
        self._texts = 0
        self._roles = 0

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
            self._deltas += window.count(_DELTA, start)
            self._texts += window.count(_TEXT, start)
            self._roles += window.count(_ROLE, start)
        if self._open is not None:
            self._read((self._open + chunk)[:_MAX_USAGE])
        at = window.find(_USAGE)
        while at >= 0:
            at += len(_USAGE)
            self._read(window[at : at + _MAX_USAGE])
            at = window.find(_USAGE, at)
        self._carry = window[1 - len(_USAGE) :]

    def usage(self) -> Usage | None:
        """The usage seen so far; None: neither a figure nor a streamed event."""
        events = self._generated_events()
        if not self._completion and events:
            return Usage(self._prompt, events, self._cached)
        if self._prompt is None and self._completion is None:
            return None
        return Usage(self._prompt, self._completion or 0, self._cached)

    def _generated_events(self) -> int:
        """Events that stand for a token: deltas, but for the one that opens with the role; for
        completions, which have no deltas, texts.
        """
        return max(0, self._deltas - self._roles) or self._texts

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
            prompt += _first(usage, "cache_read_input_tokens") or 0
            prompt += _first(usage, "cache_creation_input_tokens") or 0
        completion = _first(usage, "completion_tokens", "output_tokens")
        self._prompt = self._prompt if prompt is None else prompt
        self._completion = self._completion if completion is None else completion
        cached = _first(usage, "cache_read_input_tokens")
        for details in map(usage.get, _DETAILS):
            if isinstance(details, dict):
                cached = _first(details, "cached_tokens")
        self._cached = self._cached if cached is None else cached


def _first(usage: dict[str, object], *names: str) -> int | None:
    """The first of these fields that is a plausible number of tokens."""
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            return value
    return None


_ID = re.compile(rb'"id":\s*"(resp_[^"\\]{1,123})"')
_WITHIN = 4_096  # bytes in which the id stands: vLLM's JSON and streams begin with it


class ResponseIdReader:
    """Reads the id from the beginning of a body, in chunks however split."""

    def __init__(self) -> None:
        self._head: bytes | None = b""  # None: it was found, or is not there

    def feed(self, chunk: bytes) -> str | None:
        """Take the next bytes of the body; returns the id once, when it is whole."""
        if self._head is None:
            return None
        self._head += chunk[: _WITHIN - len(self._head)]
        found = _ID.search(self._head)
        if found or len(self._head) >= _WITHIN:
            self._head = None
        return found[1].decode(errors="replace") if found else None
