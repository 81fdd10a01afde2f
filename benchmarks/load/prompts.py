"""Prompts of as many tokens as a trace says, sharing the prefixes that it says are shared.

The text is of short common words. Each is one token to the simulated replica and to most real
vocabularies; what a target counts beside them is asked of it before the first request.
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
    """How a target counts: a prompt of so many words is ``overhead + per_word·words`` tokens."""

    overhead: float = 0.0  # tokens of the chat template, or that begin every text
    per_word: float = 1.0

    @classmethod
    def of(cls, fewer: tuple[int, int], more: tuple[int, int]) -> "Counting":
        """From the words and tokens of two prompts.

        Raises:
            ValueError: the one with more words does not have more tokens.
        """
        (words, tokens), (more_words, more_tokens) = fewer, more
        per_word = (more_tokens - tokens) / (more_words - words)
        if per_word <= 0:
            raise ValueError(f"{words} words are {tokens} tokens, {more_words} are {more_tokens}")
        return cls(tokens - per_word * words, per_word)

    def words(self, tokens: int) -> int:
        """Words of a prompt of so many tokens; at least one."""
        return max(round((tokens - self.overhead) / self.per_word), 1)


def prompt(request: TracedRequest, number: int, counting: Counting, salt: str) -> str:
    """The text for the request ``number`` of a trace.

    Equal leading hash ids begin with equal text, other text is the request's own. With another
    ``salt`` all of it differs, so that no prefix cache knows it.
    """
    words = counting.words(request.prompt_tokens)
    return "".join(_pieces(request, number, words, counting, salt)).rstrip()


def some_words(key: str, count: int) -> str:
    """So many words, and a space after each; fewer with the same key are their beginning.

    Every :data:`DECK` words in a row are all there are, shuffled: texts of one length count nearly
    alike in a vocabulary that has some of the words in pieces.
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
