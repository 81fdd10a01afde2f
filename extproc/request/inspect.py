"""Request body to :class:`~extproc.request.profile.RequestProfile`."""

from extproc.request.body import decode, ending, readable, tokens_per_byte
from extproc.request.bounds import MAX_TOKENS, least_output, output_bound, sequences
from extproc.request.errors import BadRequest
from extproc.request.fields import read
from extproc.request.lax import flag, positive_int
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.tokens import TokenCounter

_LONGEST_NAME = 512
"""Characters of a model's name: it is kept with every decision."""

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}

_MAX_LENGTH = 2**40
"""Bytes a body is taken to have at most, whatever its header says."""


def endpoint_of(path: str) -> Endpoint | None:
    """The endpoint a request's path names, query string or not; None: no inference."""
    return _ENDPOINTS.get(path.partition("?")[0])


def inspect(
    path: str,
    body: bytes,
    tokens: TokenCounter,
    *,
    partial: bool = False,
    content_length: int | None = None,
) -> RequestProfile:
    """What the predictor has to know of a request.

    Fields of the wrong type and absurd numbers count as absent: the replica owns the API, and
    answers.

    Args:
        path: the request's path, one that ``endpoint_of`` knows.
        body: its body, as far as it came.
        tokens: counts the tokens of the prompt.
        partial: ``body`` is the beginning of a larger one; it may name no model (then ``""``).
        content_length: bytes of the whole body; what is missing counts as prompt, like the
            end of ``body``.

    Raises:
        BadRequest: the body is not a JSON object, or names no model.
        ValueError: the path carries no inference.
    """
    endpoint = endpoint_of(path)
    if endpoint is None:
        raise ValueError(f"{path!r} carries no inference")
    part = readable(body)
    cut = partial or len(part) < len(body)
    fields = _beginning(part) if cut else decode(part)
    if cut and not partial:
        fields |= ending(body)
    model = _model(fields, cut)
    prompt_tokens, prompt_bytes, prompts = _measure(endpoint, fields, model, tokens)
    if cut:
        whole = max(len(body), min(content_length or 0, _MAX_LENGTH))
        density = tokens_per_byte(part, 1 / tokens.bytes_per_token(model))
        prompt_tokens += round((whole - len(part)) * density)
        prompt_bytes = 0
    bound = output_bound(endpoint, fields)
    return RequestProfile(
        endpoint=endpoint,
        model=model,
        prompt_tokens=min(prompt_tokens, MAX_TOKENS),
        prompt_bytes=prompt_bytes,
        output_bound=bound,
        sequences=sequences(endpoint, fields, prompts),
        stream=flag(fields.get("stream")),
        least_output=least_output(fields, bound),
    )


def _beginning(part: bytes) -> dict[str, object]:
    fields = decode(part, partial=True)
    if next(reversed(fields), None) == "model":
        del fields["model"]  # perhaps only its beginning
    return fields


def _model(fields: dict[str, object], cut: bool) -> str:
    if cut and "model" not in fields:
        return ""
    model = fields.get("model")
    if model is None:
        raise BadRequest("the request names no model", "model", "missing_model")
    if not isinstance(model, str) or not model:
        raise BadRequest("the model must be a non-empty string", "model", "invalid_model")
    if len(model) > _LONGEST_NAME:
        message = f"the model's name is longer than {_LONGEST_NAME} characters"
        raise BadRequest(message, "model", "invalid_model")
    return model


def _measure(
    endpoint: Endpoint, fields: dict[str, object], model: str, counter: TokenCounter
) -> tuple[int, int, int]:
    """Prompt tokens, the bytes that teach their ratio, and the number of prompts."""
    pieces, prompts = read(endpoint, fields)
    tokens = sum(prompt.count(counter, model) * times for prompt, times in pieces)
    if limit := positive_int(fields.get("truncate_prompt_tokens")):
        return min(tokens, limit * prompts), 0, prompts
    if counter.is_exact(model) or not all(p.texts and not p.images and t == 1 for p, t in pieces):
        return tokens, 0, prompts
    # Template and token ids enter at the model's ratio: the share they have of the tokens is the
    # share they have of the bytes, so the ratio learned from both is that of the text.
    return tokens, round(tokens * counter.bytes_per_token(model)), prompts
