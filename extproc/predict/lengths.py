"""How many tokens a request will generate, learned from the ones that ended."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
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
_MOST_ROWS = 1024  # kinds of requests told apart; later ones share the rows of coarser kinds
_MOST_TENANT_ROWS = 512  # of these, kinds that name a tenant: clients may make names up
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


class OutputLengths:
    """Decaying histograms of output lengths, per kind of request.

    A kind is a model, an endpoint of it, whether it streams and how it is bounded, and a tenant. Of
    a kind that nothing was seen of yet, the next coarser one tells; its first histogram starts from
    that one's.

    What remains of a request follows from its progress, not from an estimate made at its start:
    ``E[min(L, bound) − g | L > g]`` after ``g`` tokens. Suffix sums of the histogram make that a
    constant-time look-up, for one request or for all in flight at once.
    """

    def __init__(self) -> None:
        self._rows: dict[_Kind, int] = {}
        self._keep(_prior()[:, None])

    def _keep(self, sums: Floats) -> None:
        """Histograms are kept as suffix sums, of sequences and of their tokens, a row a kind."""
        self._sums = sums
        self._count: Floats = sums[0]
        self._tokens: Floats = sums[1]

    def row(self, profile: RequestProfile) -> int:
        """The histogram of the finest kind that requests like this were seen of; 0: of all."""
        for kind in reversed(_kinds(profile)):
            if kind in self._rows:
                return self._rows[kind]
        return 0

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
            row = self._rows.get(kind)
            if row is None:
                of_tenant = len(kind) > _UNTENANTED
                if len(self._count) > (_MOST_TENANT_ROWS if of_tenant else _MOST_ROWS):
                    break
                row = self._rows[kind] = len(self._count)
                start = self._sums[:, rows[-1:]]
                start = start * (_PRIOR_WEIGHT / start[0, 0, 0])
                self._keep(np.concatenate([self._sums, start], axis=1))
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
