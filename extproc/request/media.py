"""Profiles estimated from the length of a body: audio in a form, or a body too large to be read."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import ceil

from extproc.request.endpoint import Endpoint
from extproc.request.fields import MAX_SEQUENCES, MAX_TOKENS, flag
from extproc.request.profile import RequestProfile
from extproc.request.tokens import TokenCounter

_BYTES_PER_S = 16_000  # MP3 at 128 kbit/s; WAV of 16 kHz has 32,000, Opus 3,000 to 8,000
_TOKENS_PER_S = 25  # Qwen2-Audio, Qwen2.5-Omni; Whisper makes 50, Voxtral 12.5, Ultravox 6.25
_CLIP_S = 30  # vLLM transcribes clips of this length, each a prompt (max_audio_clip_s)

_MOST_AUDIO = 2**26  # bytes: more than an hour. By default, vLLM refuses files over 25 MiB

CLIP_TOKENS = _CLIP_S * _TOKENS_PER_S  # estimate for audio of unknown size

LARGE_BODY = 8 * 2**20
"""Bytes. The router reads a larger body only if it must: behind Envoy 1.40, a body of 8 MB reached
the router after 30 ms, and 40 MB after 240 to 380 ms. By default Envoy waits 200 ms for a reply."""
_MEDIUM = 2**20  # bytes that count as one image
_ENDS = 16_384  # bytes at either end of a form that are searched for its fields
_FIELD = re.compile(
    rb'name="(model|stream)"[^\r\n]{0,256}\r\n'  # and perhaps other headers of the part
    rb"(?:[^\r\n]{1,256}\r\n){0,4}\r\n([^\r\n]{1,512})\r\n"
)


def of_length(
    endpoint: Endpoint, length: int, model: str, tokens: TokenCounter, stream: bool = False
) -> RequestProfile:
    """Return the profile of a request whose body of ``length`` bytes is audio or images."""
    if endpoint.takes_audio:
        length = min(length, _MOST_AUDIO)
        prompts = max(ceil(length / (_BYTES_PER_S * _CLIP_S)), 1)
        prompt_tokens = audio_tokens(length)
    else:
        prompts, prompt_tokens = 1, media_tokens(length, model, tokens)
    return RequestProfile(
        endpoint=endpoint,
        model=model,
        prompt_tokens=min(prompt_tokens, MAX_TOKENS),
        prompt_bytes=0,
        output_bound=None if endpoint.decodes else 0,
        sequences=min(prompts, MAX_SEQUENCES) if endpoint.decodes else 0,
        stream=stream,
        longest_share=1 / prompts,
        fetches=True,
        stored=endpoint is Endpoint.RESPONSES,
    )


def media_tokens(length: int, model: str, tokens: TokenCounter) -> int:
    """Estimate the tokens of ``length`` bytes of base64: images or other data."""
    return tokens.image_tokens(model) * ceil(length / _MEDIUM)


def of_form(
    endpoint: Endpoint,
    body: bytes,
    length: int,
    tokens: TokenCounter,
    model_of: Callable[[str, str], str],
) -> RequestProfile:
    """Return the profile of a transcription or translation from the ``body`` received so far.

    ``length``: bytes of the whole body, most of which is audio; ``model_of``: as in
    :func:`~extproc.request.inspect.inspect`.
    """
    found = {name: value.decode(errors="replace") for name, value in _FIELD.findall(_ends(body))}
    requested = found.get(b"model", "")
    model = model_of(requested, "")
    profile = of_length(endpoint, length, model, tokens, flag(found.get(b"stream")))
    return replace(profile, requested_model=requested)


def model_in_form(body: bytes) -> tuple[int, int] | None:
    """Return where the model's name in a form begins and ends; None: the form names no model."""
    ends = _ends(body)
    spans = [field.span(2) for field in _FIELD.finditer(ends) if field[1] == b"model"]
    if not spans:
        return None
    first, last = spans[-1]
    skipped = len(body) - len(ends) if first >= _ENDS else 0
    return first + skipped, last + skipped


def _ends(body: bytes) -> bytes:
    return body[:_ENDS] + body[_ENDS:][-_ENDS:]


def audio_tokens(size: int) -> int:
    """Estimate the tokens of ``size`` bytes of audio."""
    return ceil(size * _TOKENS_PER_S / _BYTES_PER_S)
