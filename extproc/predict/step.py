"""How long one step of a vLLM engine takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step time in seconds, linear in what the step does.

    ``t = c0 + c_prefill·P + c_batch·B + c_kv·K + c_att·A`` with P prompt tokens prefilled in the
    step, B sequences in it, K KV tokens they hold and A = Σ(chunk × context) over the prefill
    chunks. Fitted on real steps of vLLM 0.32, the first four terms have a median error of 6%; the
    attention term takes the bias on long prefills from −8% to ±3%.
    """

    c0: float
    """Seconds per step."""
    c_prefill: float
    """Seconds per prompt token prefilled."""
    c_batch: float
    """Seconds per sequence in the step."""
    c_kv: float
    """Seconds per KV token held by the sequences in the step."""
    c_att: float = 0.0
    """Seconds per (prefill token × token of its context): of the simulator's engines alone, for it
    leaves no trace in the counters that a router learns from."""
    frontend: float = 0.0
    """Seconds of each request that no step takes: HTTP, tokens, the way to the engine and back."""

    def step_time(self, prefill: float, batch: float, kv: float, attention: float = 0.0) -> float:
        """Seconds for a step over ``prefill`` tokens, ``batch`` sequences and ``kv`` KV tokens."""
        return (
            self.c0
            + self.c_prefill * prefill
            + self.c_batch * batch
            + self.c_kv * kv
            + self.c_att * attention
        )

    def slowed(self, factor: float) -> "StepModel":
        """The same engine, every step ``factor`` times as long."""
        return StepModel(
            self.c0 * factor,
            self.c_prefill * factor,
            self.c_batch * factor,
            self.c_kv * factor,
            self.c_att * factor,
            self.frontend,
        )
