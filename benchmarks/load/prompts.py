"""Prompts with the lengths and shared prefixes of a trace, made of short common words.

A word is one token to the simulated replica and in most real vocabularies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_128

import numpy as np

from benchmarks.trace import ID_TOKENS, TracedRequest
from extproc.lab.simulator.tokens import WORDS

_WORDS = np.array([word.encode() for word in WORDS])

DECK = len(_WORDS)


@dataclass(frozen=True, slots=True)
class Counting:
    """Tokens that a target counts in a prompt: ``overhead + per_word·words``."""

    overhead: float = 0.0  # tokens of the chat template, or that begin every text
    per_word: float = 1.0

    @classmethod
    def of(cls, fewer: tuple[int, int], more: tuple[int, int]) -> "Counting":
        """Solves for the words and tokens of two prompts; ValueError if more words are no more."""
        (words, tokens), (more_words, more_tokens) = fewer, more
        per_word = (more_tokens - tokens) / (more_words - words)
        if per_word <= 0:
            raise ValueError(f"{words} words are {tokens} tokens, {more_words} are {more_tokens}")
        return cls(tokens - per_word * words, per_word)

    def words(self, tokens: int) -> int:
        """Number of words, at least one, that make so many tokens."""
        return max(round((tokens - self.overhead) / self.per_word), 1)


def prompt(request: TracedRequest, number: int, counting: Counting, salt: str) -> str:
    """Text of the request ``number`` of a trace: equal leading hash ids begin with equal text.

    With another ``salt`` all of it differs, so that no prefix cache knows it.
    """
    words = counting.words(request.prompt_tokens)
    return "".join(_pieces(request, number, words, counting, salt)).rstrip()


def some_words(key: str, count: int) -> str:
    """Words drawn by the key, each followed by a space; fewer with the same key are a prefix.

    Every :data:`DECK` words in a row are all words, shuffled: texts of equal length count nearly
    alike even in a vocabulary that splits some of the words.
    """
    decks = -(-count // DECK)
    drawn = np.frombuffer(shake_128(key.encode()).digest(decks * DECK), np.uint8)
    shuffled = np.argsort(drawn.reshape(decks, DECK), axis=1, kind="stable").ravel()
    return _WORDS[shuffled[:count]].tobytes().decode()


def _pieces(
    request: TracedRequest, number: int, words: int, counting: Counting, salt: str
) -> Iterator[str]:
    words_of_an_id = max(round(ID_TOKENS / counting.per_word), 1)
    for one in request.hash_ids:
        yield some_words(f"{salt}/{one}", min(words, words_of_an_id))
        words -= min(words, words_of_an_id)
    yield some_words(f"{salt}/request {number}", words)
