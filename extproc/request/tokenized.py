"""Tokenization of long texts, most of which begin like earlier texts."""

from collections import OrderedDict
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extproc.request.prefix import Ids, Prefix, prefix_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_BYTES = 16_384  # of a text, tokenized in one call, in some 10 ms
_UNIT = 256  # characters whose tokens are remembered together
_MOST_UNITS = 65_536  # remembered, of all texts together: 16 million characters in some 50 MB
_MOST_TOKENS = 512  # in a remembered unit: a rare character may have a dozen
_OVERLAP = 8  # last remembered tokens, compared with new ones; if they differ, nothing is reused


class TokenizedPrompt(NamedTuple):
    """Token ids of a prompt that is sent as text."""

    ids: Ids
    tokens: int  # of the whole prompt, estimated unless ``complete``
    complete: bool  # ``ids`` cover the whole prompt

    def prefix(self, seed: int) -> Prefix:
        """Return the keys of the prompt, as far as its token ids are known."""
        prefix = prefix_of(self.ids.tobytes(), len(self.ids), seed)
        whole = prefix.whole if self.complete else 0
        return replace(prefix, tokens=self.tokens, ids=self.ids, whole=whole)


class _Unit(NamedTuple):
    start: int  # of the unit's first token: characters before it in the text
    ids: bytes  # of the tokens that begin in the unit


class CachingTokenizer:
    """Tokenizes texts, and remembers the tokens of their beginnings in units of 256 characters.

    A token depends on the text that follows it. So the tokens that begin in a unit are stored under
    a hash of the text up to the end of the next unit. Tokenization starts again with the last unit
    found. If its last tokens come out as stored, the units before it are valid, too.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        # By the hash of the text on which the tokens depend; the least recently used first.
        self._units: OrderedDict[int, _Unit] = OrderedDict()

    def tokenize(self, text: str) -> TokenizedPrompt:
        """Return the token ids of a text, without special tokens before it."""
        keys = _keys(text)
        known = self._known(keys)
        ids, starts, end = self._encode(text, known[-1].start if known else 0)
        border = np.searchsorted(starts, len(known) * _UNIT)
        again = ids[:border][-_OVERLAP:].tobytes()
        if known and again != known[-1].ids[-_OVERLAP * ids.itemsize :]:
            known = []
            ids, starts, end = self._encode(text, 0)
            border = np.intp(0)
        self._remember(keys, len(known), ids, starts, end)
        before = b"".join(unit.ids for unit in known)
        all_ids = np.frombuffer(before + ids[border:].tobytes(), np.uint32)
        tokens = round(len(all_ids) * len(text) / max(end, 1))
        return TokenizedPrompt(all_ids, tokens, end == len(text))

    def _known(self, keys: list[int]) -> list[_Unit]:
        known = list(takewhile(self._units.__contains__, keys[1:]))
        for key in known:
            self._units.move_to_end(key)
        return [self._units[key] for key in known]

    def _encode(self, text: str, start: int) -> tuple[Ids, NDArray[np.intp], int]:
        """Tokenize the text from ``start`` on. Return the token ids that later text cannot change,
        the position in the text where each begins, and the position up to which they are known."""
        beginning = text[start : start + _MOST_BYTES].encode()[:_MOST_BYTES]
        part = beginning.decode(errors="ignore")
        encoding = self._tokenizer.encode(part, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        starts = np.array([begin for begin, _ in encoding.offsets], np.intp) + start
        end = start + len(part)
        if end == len(text):
            return ids, starts, end
        end -= _UNIT
        sure = np.searchsorted(starts, end)
        return ids[:sure], starts[:sure], end

    def _remember(
        self, keys: list[int], first: int, ids: Ids, starts: NDArray[np.intp], end: int
    ) -> None:
        last = min(len(keys) - 1, end // _UNIT)
        borders = np.searchsorted(starts, np.arange(first, last + 1) * _UNIT).tolist()
        for unit, begin, stop in zip(range(first, last), borders, borders[1:], strict=False):
            if not 0 < stop - begin <= _MOST_TOKENS:  # 0: a token is longer than the unit
                return
            key = keys[unit + 1]
            self._units[key] = _Unit(int(starts[begin]), ids[begin:stop].tobytes())
            self._units.move_to_end(key)
        while len(self._units) > _MOST_UNITS:
            self._units.popitem(last=False)


def _keys(text: str) -> list[int]:
    """Return a number for each whole unit: a hash of the text up to the end of the unit."""
    keys, key = [], 0
    for end in range(_UNIT, len(text) + 1, _UNIT):
        key = hash((key, text[end - _UNIT : end]))
        keys.append(key)
    return keys
