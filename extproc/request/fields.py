"""Which fields of a request body are its prompt."""

from collections.abc import Sequence
from typing import NamedTuple

from extproc.request.profile import Endpoint
from extproc.request.prompt import Prompt

_SCORED = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Names under which vLLM takes the two sides of what it scores."""

_ONE = (1,)
"""Of an only prompt there is nothing to compare."""

_RERANKED = (("query", "documents"),)


class Reading(NamedTuple):
    """What a replica reads for one request."""

    pieces: list[tuple[Prompt, int]]
    """Pieces, and how many times each is read."""
    lengths: Sequence[int]
    """Of each prompt, to compare them: characters of text, or token ids."""

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self.lengths)

    @property
    def size(self) -> int:
        """How many messages, texts and media there are."""
        return sum(prompt.size for prompt, _ in self.pieces)

    @property
    def longest_share(self) -> float:
        """Share of the longest prompt in all of them."""
        total = sum(self.lengths)
        return max(self.lengths) / total if total else 1 / self.prompts


def read(endpoint: Endpoint, fields: dict[str, object]) -> Reading:
    """Collect the prompts of a request; fields of the wrong type are passed over."""
    if endpoint is Endpoint.SCORE:
        return _read_pairs(fields, _SCORED)
    if endpoint is Endpoint.RERANK:
        return _read_pairs(fields, _RERANKED)
    prompt = Prompt()
    lengths: Sequence[int] = _ONE
    if endpoint is Endpoint.COMPLETIONS:
        lengths = prompt.add_inputs(fields.get("prompt"))
    elif not endpoint.decodes:
        lengths = prompt.add_inputs(fields.get("input", fields.get("texts")))
        prompt.add_chat(fields.get("messages"))
    elif endpoint is Endpoint.RESPONSES:
        prompt.add_chat(fields.get("input"), fields.get("instructions"), fields.get("tools"))
    else:
        prompt.add_chat(fields.get("messages"), fields.get("system"), fields.get("tools"))
    return Reading([(prompt, 1)], lengths)


def _read_pairs(fields: dict[str, object], names: tuple[tuple[str, str], ...]) -> Reading:
    """Every document is read with its query: with the only one, or each with its own."""
    left, right = next((pair for pair in names if fields.keys() >= set(pair)), names[0])
    queries, documents = fields.get(left), fields.get(right)
    query, document = Prompt(), Prompt()
    query.add_content(queries)
    document.add_content(documents)
    right_lengths = _lengths(documents)
    left_lengths, pairs = _lengths(queries), len(right_lengths)
    own_query = len(left_lengths) > 1
    each = left_lengths if own_query else left_lengths * pairs
    lengths = [sum(pair) for pair in zip(each, right_lengths, strict=False)]
    return Reading([(query, 1 if own_query else pairs), (document, 1)], lengths or _ONE)


def _lengths(values: object) -> list[int]:
    """Characters of each text; 0 for what is not one."""
    each = values if isinstance(values, list) else [values]
    return [len(value) if isinstance(value, str) else 0 for value in each]
