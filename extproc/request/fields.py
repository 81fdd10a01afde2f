"""Which fields of a request body are its prompt."""

from typing import NamedTuple

from extproc.request.profile import Endpoint
from extproc.request.prompt import TOKENS_PER_MESSAGE, Prompt

_SCORED = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Names under which vLLM takes the two sides of what it scores."""

_RERANKED = (("query", "documents"),)


class Reading(NamedTuple):
    """What a replica reads for one request."""

    pieces: list[tuple[Prompt, int]]
    """Pieces, and how many times each is read."""
    prompts: int
    """Number of prompts."""


def read(endpoint: Endpoint, fields: dict[str, object]) -> Reading:
    """Collect the prompts of a request; fields of the wrong type are passed over."""
    if endpoint is Endpoint.SCORE:
        return _read_pairs(fields, _SCORED)
    if endpoint is Endpoint.RERANK:
        return _read_pairs(fields, _RERANKED)
    prompt = Prompt()
    prompts = 1
    if endpoint is Endpoint.COMPLETIONS:
        prompts = prompt.add_inputs(fields.get("prompt"))
    elif endpoint is Endpoint.EMBEDDINGS:
        prompts = prompt.add_inputs(fields.get("input"))
        prompt.add_messages(fields.get("messages"))
    elif endpoint is Endpoint.RESPONSES:
        _read_chat(prompt, fields.get("input"), fields.get("instructions"), fields.get("tools"))
    else:
        _read_chat(prompt, fields.get("messages"), fields.get("system"), fields.get("tools"))
    return Reading([(prompt, 1)], prompts)


def _read_chat(prompt: Prompt, messages: object, system: object, tools: object) -> None:
    prompt.add_messages(messages)
    if system:
        prompt.tokens += TOKENS_PER_MESSAGE
        prompt.add_content(system)
    if tools:
        prompt.add_json(tools)


def _read_pairs(fields: dict[str, object], names: tuple[tuple[str, str], ...]) -> Reading:
    """Every document is read with its query: with the only one, or each with its own."""
    left, right = next((pair for pair in names if fields.keys() >= set(pair)), names[0])
    queries, documents = fields.get(left), fields.get(right)
    query, document = Prompt(), Prompt()
    query.add_content(queries)
    document.add_content(documents)
    pairs = len(documents) if isinstance(documents, list) else 1
    own_query = isinstance(queries, list) and len(queries) > 1
    return Reading([(query, 1 if own_query else pairs), (document, 1)], pairs)
