"""Token ids of long texts, whose beginnings were mostly tokenised before."""

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extproc.request.prefix import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_CHARACTERS = 16_384  # tokenised in one call, in some 10 ms
_UNIT = 256  # characters whose tokens are remembered together
_MOST_UNITS = 65_536  # remembered of all texts: 16 million characters in some 50 MB
_OVERLAP = 8  # remembered tokens that must come out again, or all are tokenised anew


class Tokenized(NamedTuple):
    """Tokens of a text, as far as known."""

    ids: Ids
    tokens: int  # of the whole text, estimated unless ``complete``
    complete: bool  # ``ids`` are all of the text's


class _Unit(NamedTuple):
    start: int  # of the first token, in the text
    ids: bytes  # of the tokens that begin in the unit


class Tokenizations:
    """Tokenises texts, and remembers the tokens of their beginnings by units of 256 characters.

    A token depends on the text after it, so the tokens that begin in a unit are remembered by the
    text up to the end of the next unit. Tokenisation starts with the last remembered unit. If the
    last tokens of that unit come out as remembered, the earlier units are valid, too.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        # By the text that the tokens depend on; the least recently used first.
        self._units: OrderedDict[int, _Unit] = OrderedDict()

    def of(self, text: str) -> Tokenized:
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
        every = np.frombuffer(before + ids[border:].tobytes(), np.uint32)
        return Tokenized(every, round(len(every) * len(text) / max(end, 1)), end == len(text))

    def _known(self, keys: list[int]) -> list[_Unit]:
        known = []
        for key in keys[1:]:
            if not (unit := self._units.get(key)):
                break
            self._units.move_to_end(key)
            known.append(unit)
        return known

    def _encode(self, text: str, start: int) -> tuple[Ids, NDArray[np.intp], int]:
        """Return the ids from ``start`` on that are final, where each begins in the text, and where
        the last of them ends."""
        part = text[start : start + _MOST_CHARACTERS]
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
            if begin == stop:  # a token is longer than the unit
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
