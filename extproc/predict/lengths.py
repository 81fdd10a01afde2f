"""Output lengths: the tokens that a request will generate, learned from requests that ended."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from extproc.predict.inputs import Floats, Indices
from extproc.request.profile import RequestProfile

_PER_DOUBLING = 4
_LENGTHS: Floats = 2.0 ** (np.arange(17 * _PER_DOUBLING + 1) / _PER_DOUBLING)
"""Representative output lengths, in tokens: four to a doubling, 1 to 131,072."""
_LENGTHS_LIST: list[float] = _LENGTHS.tolist()

_PRIOR_MEDIAN, _PRIOR_SPREAD = 128.0, 1.2  # log-normal, wide enough for both chat and code
_PRIOR_WEIGHT = 4.0  # observations; a dozen observed requests outweigh the prior
_DECAY = 0.998  # weight of older observations after each new one: a memory of about 500 requests
_MOST_KINDS = 512
"""Limit of the kinds without a tenant, and also of the kinds with a tenant: under a common limit,
tenants that a client invents would displace all other kinds."""

_NONE = 1e-9  # weight of sequences below which a suffix of the histogram counts as empty
_SUMS = len(_LENGTHS_LIST) + 1  # suffix sums of a histogram
_NEXT: Floats = np.append(_LENGTHS, inf)  # length of each bucket; infinite behind the last

_Kind = tuple[object, ...]
_UNTENANTED = 4  # fields of the finest kind without a tenant


def _prior() -> Floats:
    """Suffix sums of the prior histogram: at ``[0, i]`` the sequences in bucket ``i`` and in all
    later buckets, at ``[1, i]`` the tokens of these sequences."""
    density = np.exp(-0.5 * (np.log(_LENGTHS / _PRIOR_MEDIAN) / _PRIOR_SPREAD) ** 2)
    sequences = _PRIOR_WEIGHT * density / density.sum()
    sums: Floats = np.zeros((2, _SUMS))
    sums[:, :-1] = np.stack([sequences, sequences * _LENGTHS])[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums


def _kinds(profile: RequestProfile) -> Iterator[_Kind]:
    """Kinds of a request, from fine to coarse. Output bounds with the same number of bits share a
    kind."""
    bound = 0 if profile.output_bound is None else profile.output_bound.bit_length()
    finest = profile.model, profile.endpoint, profile.stream, bound, profile.tenant
    if profile.tenant:
        yield finest
    for size in (_UNTENANTED, 2, 1):
        yield finest[:size]


class OutputLengths:
    """Decaying histograms of output lengths, by kind of request.

    Kinds get finer: by model; then also by endpoint, by streaming and output bound, by tenant. A
    kind without observations uses the histogram of the next coarser kind; its own starts as a copy
    of that one. If all rows are in use, a new kind takes the row of the least recently used kind
    that has no request in flight.

    The remaining tokens of a request follow from its progress, not from an estimate at its start:
    ``E[min(L, bound) − g | L > g]`` after ``g`` tokens, with the output length L. Suffix sums of
    the histogram make this a look-up in constant time, for one request or for all in flight.
    """

    def __init__(self) -> None:
        self._rows: list[dict[_Kind, int]] = [
            {(row,): row for row in range(first, first + _MOST_KINDS)}
            for first in (1, 1 + _MOST_KINDS)
        ]
        """Rows by kind, the least recently used kind first; without and with a tenant. At first a
        number stands for the kind of each row."""
        self._in_flight = [0] * (1 + 2 * _MOST_KINDS)  # requests by row
        # Suffix sums of the histograms: sequences and their tokens, a row for each kind.
        self._sums: Floats = np.zeros((2, 1 + 2 * _MOST_KINDS, _SUMS))
        self._sums[:, 0] = _prior()
        self._count: Floats = self._sums[0]
        self._tokens: Floats = self._sums[1]
        self._p90: dict[int, float] = {}  # by row; without the rows that learned since

    def row(self, profile: RequestProfile) -> int:
        """Returns the row of the request's finest kind that has a histogram; if none has one, row
        0, which counts all requests."""
        for kind in _kinds(profile):
            if (row := self._table(kind).get(kind)) is not None:
                return row
        return 0

    def hold(self, profile: RequestProfile) -> int:
        """Returns :meth:`row`, and keeps other kinds from taking this row until :meth:`release`."""
        row = self.row(profile)
        self._in_flight[row] += 1
        return row

    def release(self, begin: int) -> None:
        """Releases a row that :meth:`hold` returned. ``begin``: first of the two indices that
        :meth:`place` returned for the row."""
        self._in_flight[begin // _SUMS] -= 1

    def _table(self, kind: _Kind) -> dict[_Kind, int]:
        return self._rows[len(kind) > _UNTENANTED]

    def observe(self, profile: RequestProfile, tokens: float) -> None:
        """Learns that a sequence of the request ended after ``tokens`` tokens.

        A sequence that reached its bound might have become longer: its weight is spread over the
        lengths from the bound on, in the proportions seen so far. A request with a minimum length
        is not counted.
        """
        bound = inf if profile.output_bound is None else profile.output_bound
        if profile.least_output:
            return
        rows = self._rows_to_learn([*_kinds(profile)][::-1])
        nearest = bisect_left(_LENGTHS_LIST, tokens * 2 ** (-0.5 / _PER_DOUBLING))
        bucket = min(nearest, len(_LENGTHS_LIST) - 1)
        sums = self._sums[:, rows] * _DECAY
        if tokens < bound:
            sums[0, :, : bucket + 1] += 1.0
            sums[1, :, : bucket + 1] += _LENGTHS_LIST[bucket]
        else:
            beyond = sums[:, :, bucket, None]
            total = np.maximum(beyond[0], 1.0)
            sums[:, :, :bucket] += beyond / total
            sums[:, :, bucket:] *= 1.0 + 1.0 / total
        self._sums[:, rows] = sums
        for row in rows:
            self._p90.pop(row, None)

    def _rows_to_learn(self, kinds: Sequence[_Kind]) -> list[int]:
        """Rows that learn from a request of these kinds, which go from coarse to fine. A new row
        starts as a copy of the row of the next coarser kind."""
        rows = [0]
        for kind in kinds:
            table = self._table(kind)
            row = table.pop(kind, None)
            if row is None:
                free = (old for old, at in table.items() if not (self._in_flight[at] or at in rows))
                oldest = next(free, None)
                if oldest is None:
                    break
                row = table.pop(oldest)
                coarser = self._sums[:, rows[-1]]
                self._sums[:, row] = coarser * (_PRIOR_WEIGHT / coarser[0, 0])
            table[kind] = row  # the most recently used kind is the last
            rows.append(row)
        return rows

    def expected(self, row: int, bound: float) -> float:
        """Returns the expected length of a sequence: :meth:`remaining` at progress 0, without the
        cost of numpy."""
        begin, cut = self.place(row, bound)
        count, tokens = self._count.item, self._tokens.item
        total = tokens(begin) - tokens(cut) + bound * count(cut)
        return min(max(total / count(begin), 1.0), max(bound, 0.0))

    def p90(self, row: int, bound: float) -> float:
        """Returns the output length that nine of ten sequences of the row do not exceed."""
        p90 = self._p90.get(row)
        if p90 is None:
            count = self._count[row]
            beyond = _SUMS - int(count[::-1].searchsorted(0.1 * count.item(0), "right"))
            p90 = self._p90[row] = _LENGTHS_LIST[max(beyond - 1, 0)]
        return max(min(p90, bound), 0.0)

    @property
    def mean(self) -> float:
        """Mean output length of a sequence of any request."""
        return self._tokens.item(0) / self._count.item(0)

    def place(self, row: int, bound: float) -> tuple[int, int]:
        """Returns two indices into the flattened suffix sums: of the row's first bucket, and of the
        bucket that contains the bound."""
        return row * _SUMS, row * _SUMS + bisect_left(_LENGTHS_LIST, bound)

    def reached(self, begin: Indices, progress: Floats) -> tuple[Indices, Floats]:
        """Finds for each sequence the first bucket of lengths above its ``progress`` (tokens
        generated). Returns the bucket's index into the flattened suffix sums, and the progress
        at which this index changes. ``begin``: the first indices that :meth:`place` returned."""
        longer = _LENGTHS.searchsorted(progress, "right")
        return begin + longer, _NEXT[longer]

    def remaining(
        self, alive: Indices, cut: Indices, progress: Floats, bound: Floats, least: Floats
    ) -> Floats:
        """Returns the expected number of tokens that each sequence still generates.

        The number is at least 1, unless less is left to the bound. A sequence that is longer than
        all sequences seen so far is expected to reach 1.5 times its progress.

        ``progress``: tokens generated so far, at most ``bound``. ``bound`` and ``least``: most and
        fewest tokens of the sequence. ``alive`` and ``cut``: buckets of ``progress`` and ``bound``,
        from :meth:`reached` and :meth:`place`.
        """
        count, tokens = self._count, self._tokens
        survivors = count.take(alive)
        total = tokens.take(alive) - tokens.take(cut) + bound * count.take(cut)
        beyond = (survivors <= _NONE).nonzero()[0]
        if len(beyond):
            total[beyond] = 1.5 * progress[beyond]
            survivors[beyond] = 1.0
        total /= survivors
        left = np.maximum(np.maximum(total, least) - progress, 1.0)
        return np.minimum(left, bound - progress)
