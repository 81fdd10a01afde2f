"""Speed of a replica that no poll has measured yet, learned from its first tokens."""

from dataclasses import dataclass

_PRIOR_S = 0.03  # δ: times to first token well below this change little
_MOST = 5.0  # bound of the slowness and of its inverse
_ENOUGH = 4  # first tokens after which the router reads no further streams for this purpose


@dataclass(slots=True)
class ProvisionalSpeed:
    """Slowness of an unmeasured replica: actual ÷ predicted time to first token.

    Polls need a second to measure a replica. A fresh pool gets dozens of requests in that second,
    and slow replicas would get as many as fast ones. First tokens arrive sooner::

        slowness = (Σ actual + δ) / (Σ predicted + δ)
    """

    first_tokens: int = 0
    usual_steps: float = 0.0  # Σ predicted time to first token ÷ ``usual_step`` of the replica
    seconds: float = 0.0  # Σ actual time to first token

    def observe(self, usual_steps: float, seconds: float) -> None:
        """Adds one first token. ``usual_steps``: predicted time to it ÷ ``usual_step`` of the
        replica; ``seconds``: actual time."""
        self.first_tokens += 1
        self.usual_steps += usual_steps
        self.seconds += seconds

    def slowness(self, usual_step: float) -> float:
        """Returns the slowness relative to a step-time model whose usual step takes ``usual_step``
        seconds."""
        slowness = (self.seconds + _PRIOR_S) / (self.usual_steps * usual_step + _PRIOR_S)
        return min(max(slowness, 1.0 / _MOST), _MOST)

    @property
    def wanted(self) -> bool:
        """True until enough first tokens are known."""
        return self.first_tokens < _ENOUGH
