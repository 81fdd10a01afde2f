"""How much longer than predicted requests take at the most, but for one of ten."""

from math import exp, inf, log

_ASKED = 0.9
"""Share of the requests that are to take no longer."""
_STEP = 0.03
"""Of the logarithm, for each request: it follows the last hundred or so."""


class Margin:
    """Actual ÷ predicted of a time: the quantile ``_ASKED`` of those seen.

    By stochastic approximation (Robbins and Monro, 1951): each that exceeds it moves it up, and
    each that does not a ninth as far down.
    """

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def ratio(self) -> float:
        """1 where nothing was seen yet."""
        return exp(self._log)

    def observe(self, predicted: float, actual: float) -> None:
        """A request took ``actual`` seconds."""
        if 0.0 < predicted < inf and actual > 0.0:
            exceeds = log(actual / predicted) > self._log
            self._log += _STEP * (exceeds - 1.0 + _ASKED)


class Margins:
    """One for each time that a request may have a target for."""

    def __init__(self) -> None:
        self.ttft = Margin()
        self.tpot = Margin()
        self.completion = Margin()
