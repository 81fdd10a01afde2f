"""Profile of a request, read from its body."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from extproc.request.body import decode, ending, readable, tokens_per_byte
from extproc.request.endpoint import Endpoint, invoked
from extproc.request.errors import BadRequest
from extproc.request.fields import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    flag,
    least_output,
    output_bound,
    positive_int,
    sampling_of,
    sequences,
)
from extproc.request.media import media_tokens, model_in_form, of_form
from extproc.request.prefix import NO_PREFIX, Prefix, seed_of
from extproc.request.profile import NO_WORK, RequestProfile
from extproc.request.prompt import Reading, read
from extproc.request.tokenized import TokenizedPrompt
from extproc.request.tokens import TokenCounter

_LONGEST_NAME = 512  # characters of a model's name, which is kept with every decision
_LONGEST_ID = 128  # characters of a response's id; vLLM's ids have 21
_MAX_LENGTH = 2**40  # bytes of a body, whatever its header says


def inspect(
    endpoint: Endpoint,
    body: bytes,
    tokens: TokenCounter,
    *,
    partial: bool = False,
    content_length: int | None = None,
    model_of: Callable[[str, str], str] = lambda requested, _: requested,
) -> RequestProfile:
    """Return the profile of a request.

    Fields of the wrong type and absurd numbers count as absent: the replica rejects them.

    Args:
        endpoint: endpoint of the request's path.
        body: the body, as far as received.
        tokens: counts the tokens of the prompt.
        partial: ``body`` is only the beginning.
        content_length: bytes of the whole body; bytes that are missing in ``body`` count as prompt.
        model_of: returns the model (empty: not known) for two arguments: the name in the body, and
            the id of the stored response that the request continues (each empty if absent).

    Raises:
        BadRequest: the body is not a JSON object, or the model in the body is not a name.
    """
    whole = max(len(body), min(content_length or 0, _MAX_LENGTH))
    if endpoint.takes_audio:
        return of_form(endpoint, body, whole, tokens, model_of)
    part = readable(body)
    cut = partial or len(part) < len(body)
    fields = _beginning(part) if cut else decode(part)
    if cut and not partial:
        fields |= ending(body)
    if endpoint is Endpoint.INVOCATIONS:
        endpoint = invoked(fields)
    requested, previous = _model(fields), _previous_response(endpoint, fields)
    model = model_of(requested, previous)
    if not endpoint.computes:
        return replace(NO_WORK, endpoint=endpoint, model=model, requested_model=requested)
    reading = read(endpoint, fields)
    limit = positive_int(fields.get("truncate_prompt_tokens"))
    exact = None if cut or limit else tokens.exact(endpoint, fields, model, reading.size)
    size = _Size(exact.tokens) if exact else _measure(reading, part, limit, model, tokens)
    if cut:
        density = tokens_per_byte(part, 1 / tokens.bytes_per_token(model))
        missing = round((whole - len(part)) * density)
        size = size._replace(tokens=size.tokens + missing, bytes=0, images=0)
    sampling = sampling_of(endpoint, fields)
    bound = output_bound(endpoint, sampling)
    prompt_tokens = min(size.tokens, MAX_TOKENS)
    prefix = NO_PREFIX
    if endpoint.decodes and not (cut or previous or (limit and size.tokens >= limit)):
        prefix = _prefix(reading, exact, size.tokens, model, fields.get("cache_salt"))
    if not prefix.tokens:
        # Without keys, too, the prompt takes space in the replica's prefix cache.
        prefix = replace(NO_PREFIX, tokens=float(prompt_tokens))
    stream, responses = flag(fields.get("stream")), endpoint is Endpoint.RESPONSES
    return RequestProfile(
        endpoint=endpoint,
        model=model,
        requested_model=requested,
        prompt_tokens=prompt_tokens,
        prompt_bytes=0 if previous else size.bytes,  # the report includes earlier turns
        output_bound=bound,
        sequences=sequences(endpoint, sampling, bound, reading.prompts),
        prompts=min(reading.prompts, MAX_SEQUENCES),
        stream=stream,
        least_output=least_output(sampling, bound),
        longest_share=size.longest_share,
        images=0 if previous else size.images,
        image_tokens=size.image_tokens,
        previous_response=previous,
        claims_priority=cut or "priority" in fields,
        stored=responses and flag(fields.get("store", True)),
        in_background=responses and flag(fields.get("background")) and not stream,
        prefix=prefix,
    )


def _previous_response(endpoint: Endpoint, fields: dict[str, object]) -> str:
    given = fields.get("previous_response_id") if endpoint is Endpoint.RESPONSES else None
    return given if isinstance(given, str) and len(given) <= _LONGEST_ID else ""


def names_model(endpoint: Endpoint, body: bytes) -> bool:
    """Return True if the beginning of a body names the model.

    Raises:
        BadRequest: ``body`` is not the beginning of a JSON object.
    """
    if endpoint.takes_audio:
        return model_in_form(body) is not None
    return "model" in _beginning(readable(body))


def _beginning(part: bytes) -> dict[str, object]:
    fields = decode(part, partial=True)
    if next(reversed(fields), None) == "model":
        del fields["model"]  # the name may be cut off
    return fields


def _model(fields: dict[str, object]) -> str:
    """Return the model's name, or an empty string if the body has no model."""
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
    reading: Reading, exact: TokenizedPrompt | None, tokens: int, model: str, salt: object
) -> Prefix:
    salt = salt if isinstance(salt, str) else ""
    if reading.prompts > 1 or len(salt) > _LONGEST_NAME:
        return NO_PREFIX
    seed = seed_of(model, salt)
    [(prompt, _)] = reading.pieces
    prefix = exact.prefix(seed) if exact else prompt.prefix(tokens, seed)
    return replace(prefix, salt=salt) if salt else prefix


class _Size(NamedTuple):
    """Size of a request's prompts, as fields of the profile.

    When the replica reports the prompt's tokens, the last three fields serve to learn ratios.
    """

    tokens: int
    longest_share: float = 1.0
    bytes: int = 0
    images: int = 0
    image_tokens: int = 0


def _measure(
    reading: Reading, body: bytes, limit: int | None, model: str, counter: TokenCounter
) -> _Size:
    share, tokens, images, media, of_text = reading.longest_share, 0, 0, 0, True
    for prompt, times in reading.pieces:
        tokens += prompt.count(counter, model) * times
        images += prompt.images * times
        media += prompt.media
        of_text = of_text and times == 1 and bool(prompt.texts)
    if not tokens and not reading.size:  # no prompt was found
        tokens = _by_length(body, model, counter)
    if limit:
        read_tokens = min(tokens, limit * reading.prompts)
        return _Size(read_tokens, min(share * tokens, limit) / max(read_tokens, 1))
    if images and not media:
        image_tokens = images * counter.image_tokens(model)
        return _Size(tokens, share, images=images, image_tokens=image_tokens)
    if media or not of_text:
        return _Size(tokens, share)
    # The replica will report all tokens, including those of token ids and template. ``bytes``
    # counts these two at the present ratio, so that they do not change the learned ratio.
    return _Size(tokens, share, bytes=round(tokens * counter.bytes_per_token(model)))


def _by_length(body: bytes, model: str, counter: TokenCounter) -> int:
    """Estimate the tokens of a body whose prompt was not found, by what its middle consists of."""
    density = tokens_per_byte(body[: len(body) // 2], 1 / counter.bytes_per_token(model))
    return round(len(body) * density) or media_tokens(len(body), model, counter)
