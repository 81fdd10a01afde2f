"""How many tokens a request will generate, learned from the ones that ended."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf

import numpy as np

from extproc.predict.inputs import Floats, Indices
from extproc.request.profile import RequestProfile

_PER_DOUBLING = 4
_LENGTHS: Floats = 2.0 ** (np.arange(17 * _PER_DOUBLING + 1) / _PER_DOUBLING)
"""Representative output lengths, in tokens: four to a doubling, 1 to 131,072."""
_LENGTHS_LIST: list[float] = _LENGTHS.tolist()

_PRIOR_MEDIAN = 128.0
_PRIOR_SPREAD = 1.2
"""Log-normal to start from, wide enough for chat and code alike; it is outweighed after a dozen
observations."""
_PRIOR_WEIGHT = 4.0
_DECAY = 0.998  # weight that older observations keep: a memory of about 500 requests
_MOST_KINDS = 512  # told apart without tenants, and as many with: clients may make tenants up
_MOST_COUNTED = 200.0  # requests that a replica's own histogram counts for, at most

_NONE = 1e-9  # survivors this few are none
_SUMS = len(_LENGTHS_LIST) + 1  # suffix sums of a histogram
_NEXT: Floats = np.append(_LENGTHS, inf)  # the length after so many of them

_Kind = tuple[object, ...]
_UNTENANTED = 4  # parts of the finest kind without a tenant


def _prior() -> Floats:
    density = np.exp(-0.5 * (np.log(_LENGTHS / _PRIOR_MEDIAN) / _PRIOR_SPREAD) ** 2)
    return _suffix_sums(_PRIOR_WEIGHT * density / density.sum())


def _suffix_sums(weights: Floats) -> Floats:
    """Of histograms and of the tokens they stand for: an array of two where there was one."""
    of_both = np.stack([weights, weights * _LENGTHS])
    sums: Floats = np.zeros((*of_both.shape[:-1], _SUMS))
    sums[..., :-1] = of_both[..., ::-1].cumsum(axis=-1)[..., ::-1]
    return sums


def _kinds(profile: RequestProfile) -> list[_Kind]:
    """What a request is one of, from coarse to fine; bounds are told apart by their doublings."""
    bound = 0 if profile.output_bound is None else profile.output_bound.bit_length()
    kinds: list[_Kind] = [
        (profile.model,),
        (profile.model, profile.endpoint),
        (profile.model, profile.endpoint, profile.stream, bound),
    ]
    if profile.tenant:
        kinds.append((profile.model, profile.endpoint, profile.stream, bound, profile.tenant))
    return kinds


class _Rows:
    """Rows of the histograms of kinds."""

    def __init__(self, rows: range) -> None:
        self._free = [*rows]
        self._of: dict[_Kind, int] = {}  # the one used the longest ago first

    def find(self, kind: _Kind) -> int | None:
        return self._of.get(kind)

    def use(self, kind: _Kind) -> None:
        self._of[kind] = self._of.pop(kind)

    def add(self, kind: _Kind, keep: Callable[[int], bool]) -> int | None:
        """Row for a new kind: a free one, or that of the kind used the longest ago.

        None where all rows are to ``keep``.
        """
        if not self._free:
            old = next((old for old, row in self._of.items() if not keep(row)), None)
            if old is None:
                return None
            self._free.append(self._of.pop(old))
        self._of[kind] = self._free.pop()
        return self._of[kind]


class OutputLengths:
    """Decaying histograms of output lengths, per kind of request.

    A kind is a model, an endpoint of it, whether it streams and how it is bounded, and a tenant. Of
    a kind that nothing was seen of yet, the next coarser one tells; its first histogram starts from
    that one's. Where there are too many kinds, the one used the longest ago gives way; those of
    requests in flight stay.

    What remains of a request follows from its progress, not from an estimate made at its start:
    ``E[min(L, bound) − g | L > g]`` after ``g`` tokens. Suffix sums of the histogram make that a
    constant-time look-up, for one request or for all in flight at once.
    """

    def __init__(self) -> None:
        self._rows = _Rows(range(1, 1 + _MOST_KINDS))
        self._tenants = _Rows(range(1 + _MOST_KINDS, 1 + 2 * _MOST_KINDS))
        self._in_flight = [0] * (1 + 2 * _MOST_KINDS)  # requests by row
        # Histograms are kept as suffix sums, of sequences and of their tokens, a row a kind.
        self._sums: Floats = np.zeros((2, 1 + 2 * _MOST_KINDS, _SUMS))
        self._sums[:, 0] = _prior()
        self._count: Floats = self._sums[0]
        self._tokens: Floats = self._sums[1]

    def row(self, profile: RequestProfile) -> int:
        """The histogram of the finest kind that requests like this were seen of; 0: of all."""
        for kind in reversed(_kinds(profile)):
            if (row := self._table(kind).find(kind)) is not None:
                return row
        return 0

    def hold(self, profile: RequestProfile) -> int:
        """:meth:`row`, which stays that of its kind until it is released."""
        row = self.row(profile)
        self._in_flight[row] += 1
        return row

    def release(self, begin: int) -> None:
        """The request is over; ``begin`` is from :meth:`place`."""
        self._in_flight[begin // _SUMS] -= 1

    def _table(self, kind: _Kind) -> _Rows:
        return self._tenants if len(kind) > _UNTENANTED else self._rows

    def observe(self, profile: RequestProfile, tokens: float) -> None:
        """A sequence of that request ended after ``tokens`` tokens.

        One that was cut by its bound would have gone on: it counts for the lengths beyond, as they
        are distributed among themselves. One that asked for a least length tells nothing.
        """
        bound = inf if profile.output_bound is None else profile.output_bound
        if profile.least_output:
            return
        rows = self._rows_to_learn(_kinds(profile))
        bucket = _bucket(tokens)
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

    def observe_counts(self, model: str, counts: Sequence[tuple[float, float]]) -> None:
        """A replica's own histogram says how long its answers were.

        Args:
            model: what they came from.
            counts: upper bound in tokens of each bucket, rising, and the requests in it.
        """
        edges, requests = zip(*counts, strict=True) if counts else ((), ())
        total = float(sum(requests))
        if total > 0:
            rows = self._rows_to_learn([(model,)])
            weight = min(total, _MOST_COUNTED)
            seen = np.array(requests) * (weight / total) @ _spread(edges)
            self._sums[:, rows] = self._sums[:, rows] * _DECAY**weight + seen[:, None]

    def _rows_to_learn(self, kinds: Sequence[_Kind]) -> list[int]:
        """The row of all and those of the kinds; a new one starts from what its coarser shows."""
        rows = [0]
        for kind in kinds:
            table = self._table(kind)
            row = table.find(kind)
            if row is None:
                row = table.add(kind, lambda row: self._in_flight[row] > 0 or row in rows)
                if row is None:
                    break
                coarser = self._sums[:, rows[-1]]
                self._sums[:, row] = coarser * (_PRIOR_WEIGHT / coarser[0, 0])
            table.use(kind)
            rows.append(row)
        return rows

    def expected(self, row: int, bound: float) -> float:
        """:meth:`remaining` of one sequence that has no token yet, without the cost of numpy."""
        begin, cut = self.place(row, bound)
        count, tokens = self._count.item, self._tokens.item
        total = tokens(begin) - tokens(cut) + bound * count(cut)
        return min(max(total / count(begin), 1.0), max(bound, 0.0))

    def p90(self, row: int, bound: float) -> float:
        """Tokens that nine of ten sequences do not exceed."""
        count = self._count[row]
        beyond = _SUMS - int(count[::-1].searchsorted(0.1 * count.item(0), "right"))
        return max(min(_LENGTHS_LIST[max(beyond - 1, 0)], bound), 0.0)

    def place(self, row: int, bound: float) -> tuple[int, int]:
        """Where a histogram's sums begin, and where they reach the bound."""
        return row * _SUMS, row * _SUMS + bisect_left(_LENGTHS_LIST, bound)

    def reached(self, begin: Indices, progress: Floats) -> tuple[Indices, Floats]:
        """Where sums that begin there reach the progress, and the progress that is beyond that."""
        longer = _LENGTHS.searchsorted(progress, "right")
        return begin + longer, _NEXT[longer]

    def remaining(
        self, alive: Indices, cut: Indices, progress: Floats, bound: Floats, least: Floats
    ) -> Floats:
        """Tokens still to come of each sequence, given those generated and the bound; at least 1
        below the bound. Beyond every length seen, half the progress is expected to follow.

        Args:
            alive: from :meth:`reached`.
            cut: from :meth:`place`.
            progress: tokens generated, at most ``bound``.
            bound: most it may generate.
            least: fewest it will generate.
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


@lru_cache(maxsize=16)
def _spread(edges: tuple[float, ...]) -> Floats:
    """Suffix sums of the lengths that a request of each bucket counts for, equally; engines have
    few kinds of buckets."""
    shares = np.zeros((len(edges), len(_LENGTHS)))
    lower = 0
    for share, edge in zip(shares, edges, strict=True):
        upper = max(bisect_right(_LENGTHS_LIST, edge), lower + 1)
        share[lower:upper] = 1.0 / (upper - lower)
        lower = min(upper, len(_LENGTHS) - 1)
    return _suffix_sums(shares)


def _bucket(tokens: float) -> int:
    bucket = bisect_left(_LENGTHS_LIST, tokens * 2 ** (-0.5 / _PER_DOUBLING))
    return min(bucket, len(_LENGTHS_LIST) - 1)
