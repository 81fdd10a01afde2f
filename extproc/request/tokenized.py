"""Token ids of long texts that begin as earlier ones did."""

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extproc.request.prefix import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_CHARACTERS = 16_384  # tokenised by one call, in some 10 ms; longer texts take several
_UNIT = 256  # characters whose tokens are remembered together
_MOST_UNITS = 65_536  # of all texts, units remembered: 16 million characters in some 50 MB
_OVERLAP = 8  # tokens that must come out the same again before those after them are believed


class Tokenized(NamedTuple):
    """The tokens of a text, as far as they are known."""

    ids: Ids
    tokens: int  # of all of the text; estimated where ``ids`` are not all
    complete: bool


class _Unit(NamedTuple):
    start: int  # of its first token, in the text
    ids: bytes  # of the tokens that begin in it


class Tokenizations:
    """Tokenises texts, of which the beginnings are mostly known.

    A token depends on the text after it, so the tokens that begin in a unit are remembered by the
    text up to the end of the next unit. Tokenisation starts again a unit before the first unknown
    one; if the last tokens of that unit come out as they are known, nothing before it mattered.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        # By the text that their tokens depend on; the one longest unused first.
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
        """Ids from ``start`` on, where each begins in the text, and where the sure ones end."""
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
            if begin == stop:  # a token longer than the unit
                return
            key = keys[unit + 1]
            self._units[key] = _Unit(int(starts[begin]), ids[begin:stop].tobytes())
            self._units.move_to_end(key)
        while len(self._units) > _MOST_UNITS:
            self._units.popitem(last=False)


def _keys(text: str) -> list[int]:
    """A number for each whole unit that stands for the text up to its end, in this process."""
    keys, key = [], 0
    for end in range(_UNIT, len(text) + 1, _UNIT):
        key = hash((key, text[end - _UNIT : end]))
        keys.append(key)
    return keys
