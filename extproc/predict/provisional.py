"""Speed of a replica that no poll has measured yet, learned from its first tokens."""

from dataclasses import dataclass

_PRIOR_S = 0.03  # δ: times to first token well below this change little
_MOST = 5.0  # bound of the slowness and of its inverse
_STREAMS = 4  # streams that are read for their first tokens


@dataclass(slots=True)
class ProvisionalSpeed:
    """Slowness of an unmeasured replica: actual ÷ predicted time to first token.

    Polls need a second to measure a replica. A fresh pool gets dozens of requests in that second,
    and slow replicas would get as many as fast ones. First tokens arrive sooner::

        slowness = (Σ actual + δ) / (Σ predicted + δ)
    """

    streams: int = 0  # read so far for their first tokens
    usual_steps: float = 0.0  # Σ predicted time to first token ÷ ``usual_step`` of the replica
    seconds: float = 0.0  # Σ actual time to first token

    def observe(self, usual_steps: float, seconds: float) -> None:
        self.usual_steps += usual_steps
        self.seconds += seconds

    def slowness(self, usual_step: float) -> float:
        """Returns the slowness relative to a step-time model whose usual step takes ``usual_step``
        seconds."""
        slowness = (self.seconds + _PRIOR_S) / (self.usual_steps * usual_step + _PRIOR_S)
        return min(max(slowness, 1.0 / _MOST), _MOST)

    def takes_stream(self) -> bool:
        """Returns True if a stream is to be read for its first token: four times."""
        self.streams += 1
        return self.streams <= _STREAMS
