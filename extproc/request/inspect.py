"""Request body to :class:`~extproc.request.profile.RequestProfile`."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from extproc.request.body import decode, ending, readable, tokens_per_byte
from extproc.request.bounds import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    least_output,
    output_bound,
    sequences,
)
from extproc.request.errors import BadRequest
from extproc.request.fields import Reading, read
from extproc.request.form import of_form
from extproc.request.lax import flag, positive_int
from extproc.request.prefix import NO_PREFIX, Prefix, seed_of
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.tokens import TokenCounter

_LONGEST_NAME = 512
"""Characters of a model's name: it is kept with every decision."""

_LONGEST_ID = 128
"""Characters of a response's id; of vLLM's own 21."""

_MAX_LENGTH = 2**40
"""Bytes a body is taken to have at most, whatever its header says."""


def inspect(
    endpoint: Endpoint,
    body: bytes,
    tokens: TokenCounter,
    *,
    partial: bool = False,
    content_length: int | None = None,
    default_model: Callable[[], str] = str,
) -> RequestProfile:
    """What the predictor has to know of a request.

    Fields of the wrong type and absurd numbers count as absent: the replica owns the API, and
    answers.

    Args:
        endpoint: what it asks for.
        body: its body, as far as it came.
        tokens: counts the tokens of the prompt.
        partial: ``body`` is the beginning of a larger one.
        content_length: bytes of the whole body; what is missing counts as prompt, like the
            end of ``body``.
        default_model: asked where the request names no model; empty: nobody knows.

    Raises:
        BadRequest: the body is not a JSON object, or the model in it is not a name.
    """
    whole = max(len(body), min(content_length or 0, _MAX_LENGTH))
    if endpoint.takes_audio:
        return of_form(endpoint, body, whole, tokens, default_model)
    part = readable(body)
    cut = partial or len(part) < len(body)
    fields = _beginning(part) if cut else decode(part)
    if cut and not partial:
        fields |= ending(body)
    model = _model(fields) or default_model()
    reading = read(endpoint, fields)
    size = _measure(reading, fields, model, tokens)
    if cut:
        density = tokens_per_byte(part, 1 / tokens.bytes_per_token(model))
        missing = round((whole - len(part)) * density)
        size = size._replace(tokens=size.tokens + missing, bytes=0, images=0)
    bound = output_bound(endpoint, fields)
    profile = RequestProfile(
        endpoint=endpoint,
        model=model,
        prompt_tokens=min(size.tokens, MAX_TOKENS),
        prompt_bytes=size.bytes,
        output_bound=bound,
        sequences=sequences(endpoint, fields, reading.prompts),
        prompts=min(reading.prompts, MAX_SEQUENCES),
        stream=flag(fields.get("stream")),
        least_output=least_output(fields, bound),
        longest_share=size.longest_share,
        images=size.images,
        image_tokens=size.image_tokens,
        prefix=NO_PREFIX if cut else _prefix(endpoint, reading, fields, model, size.tokens),
    )
    return _of_responses(profile, fields) if endpoint is Endpoint.RESPONSES else profile


def _of_responses(profile: RequestProfile, fields: dict[str, object]) -> RequestProfile:
    """With what one replica keeps. Of a prompt that goes on from there, only the end is here."""
    given = fields.get("previous_response_id")
    previous = given if isinstance(given, str) and len(given) <= _LONGEST_ID else ""
    return replace(
        profile,
        prompt_bytes=0 if previous else profile.prompt_bytes,
        images=0 if previous else profile.images,
        previous_response=previous,
        stored=flag(fields.get("store", True)),
        in_background=flag(fields.get("background")) and not profile.stream,
        prefix=NO_PREFIX if previous else profile.prefix,
    )


def _beginning(part: bytes) -> dict[str, object]:
    fields = decode(part, partial=True)
    if next(reversed(fields), None) == "model":
        del fields["model"]  # perhaps only its beginning
    return fields


def _model(fields: dict[str, object]) -> str:
    """Empty where none is named: a replica then serves the model it has."""
    model = fields.get("model")
    if model is None:
        return ""
    if not isinstance(model, str):
        raise BadRequest("the model must be a string", "model", "invalid_model")
    if len(model) > _LONGEST_NAME:
        message = f"the model's name is longer than {_LONGEST_NAME} characters"
        raise BadRequest(message, "model", "invalid_model")
    return model


def _prefix(
    endpoint: Endpoint, reading: Reading, fields: dict[str, object], model: str, tokens: int
) -> Prefix:
    """Nothing where there is no one prompt to be continued, or where its beginning is cut off."""
    limit = positive_int(fields.get("truncate_prompt_tokens"))
    if not endpoint.decodes or reading.prompts > 1 or (limit and tokens >= limit):
        return NO_PREFIX
    given = fields.get("cache_salt")
    salt = given if isinstance(given, str) else ""
    [(prompt, _)] = reading.pieces
    return replace(prompt.prefix(tokens, seed_of(model, salt)), salt=salt)


class _Size(NamedTuple):
    """A prompt's tokens, and what a report of their number teaches: see the profile."""

    tokens: int
    bytes: int
    longest_share: float
    images: int
    image_tokens: int


def _measure(
    reading: Reading, fields: dict[str, object], model: str, counter: TokenCounter
) -> _Size:
    pieces, share = reading.pieces, reading.longest_share
    tokens = sum(prompt.count(counter, model) * times for prompt, times in pieces)
    images = sum(prompt.images * times for prompt, times in pieces)
    if limit := positive_int(fields.get("truncate_prompt_tokens")):
        kept = min(tokens, limit * reading.prompts)
        return _Size(kept, 0, min(share * tokens, limit) / max(kept, 1), 0, 0)
    if any(prompt.media for prompt, _ in pieces):
        return _Size(tokens, 0, share, 0, 0)
    if images:
        return _Size(tokens, 0, share, images, images * counter.image_tokens(model))
    if counter.is_exact(model) or not all(prompt.texts and times == 1 for prompt, times in pieces):
        return _Size(tokens, 0, share, 0, 0)
    # Template and token ids enter at the model's ratio: the share they have of the tokens is the
    # share they have of the bytes, so the ratio learned from both is that of the text.
    return _Size(tokens, round(tokens * counter.bytes_per_token(model)), share, 0, 0)
