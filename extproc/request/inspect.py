"""Profile of a request, read from its body."""

from collections.abc import Callable
from dataclasses import replace

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
    whole = max(len(body), content_length or 0)
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
    exact = None if cut or limit else tokens.exact(endpoint, fields, model)
    sampling = sampling_of(endpoint, fields)
    bound = output_bound(endpoint, sampling)
    stream, responses = flag(fields.get("stream")), endpoint is Endpoint.RESPONSES
    profile = RequestProfile(
        endpoint=endpoint,
        model=model,
        requested_model=requested,
        prompt_tokens=exact.tokens if exact else 0,
        prompt_bytes=0,
        output_bound=bound,
        sequences=sequences(endpoint, sampling, bound, reading.prompts),
        prompts=min(reading.prompts, MAX_SEQUENCES),
        stream=stream,
        least_output=least_output(sampling, bound),
        previous_response=previous,
        claims_priority=cut or "priority" in fields,
        stored=responses and flag(fields.get("store", True)),
        in_background=responses and flag(fields.get("background")) and not stream,
    )
    if not exact:
        _measure(profile, reading, part, limit, tokens)
    if cut:
        density = tokens_per_byte(part, 1 / tokens.bytes_per_token(model))
        profile.prompt_tokens += round((whole - len(part)) * density)
    if cut or previous:  # the replica reports more tokens than those of this prompt
        profile.prompt_bytes = profile.images = 0
    profile.prompt_tokens = min(profile.prompt_tokens, MAX_TOKENS)
    truncated = limit is not None and profile.prompt_tokens >= limit
    if endpoint.decodes and not (cut or previous or truncated):
        profile.prefix = _prefix(reading, exact, profile, fields.get("cache_salt"))
    if not profile.prefix.tokens:
        # Without keys, too, the prompt takes space in the replica's prefix cache.
        profile.prefix = replace(NO_PREFIX, tokens=float(profile.prompt_tokens))
    return profile


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
        raise BadRequest(
            f"the model's name is longer than {_LONGEST_NAME} characters", "model", "invalid_model"
        )
    return model


def _prefix(
    reading: Reading, exact: TokenizedPrompt | None, profile: RequestProfile, salt: object
) -> Prefix:
    salt = salt if isinstance(salt, str) else ""
    if reading.prompts > 1 or len(salt) > _LONGEST_NAME:
        return NO_PREFIX
    seed = seed_of(profile.model, salt)
    [(prompt, _)] = reading.pieces
    prefix = exact.prefix(seed) if exact else prompt.prefix(profile.prompt_tokens, seed)
    return replace(prefix, salt=salt) if salt else prefix


def _measure(
    profile: RequestProfile, reading: Reading, body: bytes, limit: int | None, counter: TokenCounter
) -> None:
    """Set the size of a request's prompts, and the sizes from which ratios are learned once the
    replica has reported the tokens."""
    model, tokens, images, media, of_text = profile.model, 0, 0, 0, True
    for prompt, times in reading.pieces:
        tokens += prompt.count(counter, model) * times
        images += prompt.images * times
        media += prompt.media
        of_text = of_text and times == 1 and bool(prompt.texts)
    if not tokens and not any(prompt.texts for prompt, _ in reading.pieces):  # found no prompt
        # What the middle of the body consists of is taken for the whole.
        density = tokens_per_byte(body[: len(body) // 2], 1 / counter.bytes_per_token(model))
        tokens = round(len(body) * density) or media_tokens(len(body), model, counter)
    profile.prompt_tokens, profile.longest_share = tokens, reading.longest_share
    profile.fetches = images + media > 0
    if limit:
        profile.prompt_tokens = min(tokens, limit * reading.prompts)
        longest = min(reading.longest_share * tokens, limit)
        profile.longest_share = longest / max(profile.prompt_tokens, 1)
    elif images and not media:
        profile.images, profile.image_tokens = images, images * counter.image_tokens(model)
    elif of_text and not media:
        # The replica will report all tokens, including those of token ids and template. The bytes
        # count these two at the present ratio, so that they do not change the learned ratio.
        profile.prompt_bytes = round(tokens * counter.bytes_per_token(model))
