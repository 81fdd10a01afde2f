"""Decisions as JSON: routers write them; ``explain``, the dashboard and the demo read them."""

from msgspec import Struct, ValidationError, convert

Figure = float | None  # null where a value is unknown or infinite


class Terms(Struct):
    """Parts of a prediction, in seconds."""

    step_rest: Figure
    queue: Figure  # wait at the router until the replica has room; 0: it can start the request
    admission: Figure  # wait in the engine; the first token has the longer of the two
    adapter: Figure
    prefill: Figure
    decode: Figure
    cost_to_others: Figure
    avoidable: Figure


class Candidate(Struct):
    """Replica that the policy compared."""

    replica: str  # ip:port
    name: str
    score: Figure
    requests: Figure
    waiting: Figure
    kv_usage: Figure
    backlog_tokens: Figure
    cached_tokens: Figure  # of the prompt, expected in the prefix cache
    predicted_ttft_s: Figure
    predicted_completion_s: Figure
    terms_s: Terms
    stretch: Figure  # recent actual ÷ predicted decode time; terms_s.decode includes it
    cost_weight: Figure
    kv_pressure: Figure


class ExcludedCandidate(Struct):
    """Replica that could not be chosen."""

    replica: str
    name: str
    why: str


class Outcome(Struct):
    """End of a routed request; None for what the router did not see."""

    waited_s: float = 0.0  # at the router, before it was sent
    waited_for: str = ""
    served_by: str | None = None  # ip:port that answered, after retries
    status: int | None = None
    ttft_s: Figure = None  # since the decision, where the router read the response's chunks
    completion_s: Figure = None  # since the decision
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # over all sequences, as the replica reported


class DecisionRecord(Struct):
    """Routed request: the prediction, the choice with its reason, and the outcome."""

    number: int  # grows by one a decision, from 1
    request_id: str
    pool: str
    decided_at: float  # seconds since the epoch
    policy: str
    endpoint: str
    model: str
    served_as: str
    stream: bool
    objective: str
    prompt_tokens: int
    output_bound: int | None
    sequences: int
    expected_output_tokens: Figure
    p90_output_tokens: Figure
    replica: str
    replica_name: str
    second: str | None
    why: str
    fallback: str
    others_age_s: Figure
    expected_cached_tokens: Figure
    predicted_ttft_s: Figure
    predicted_completion_s: Figure
    compared: int
    candidates: list[Candidate]
    excluded: list[ExcludedCandidate]
    outcome: Outcome

    def name_of(self, replica: str) -> str:
        """Return the replica's name, or its address where it was no candidate."""
        return next((one.name for one in self.candidates if one.replica == replica), replica)


def read_decisions(answer: object) -> list[DecisionRecord]:
    """Convert decoded JSON; ignores unknown fields.

    Raises:
        ValueError: a field is missing or has another type.
    """
    try:
        return convert(answer, list[DecisionRecord])
    except ValidationError as error:
        raise ValueError(
            f"the decisions cannot be read ({error}): is the router of another version? Try --json"
        ) from None
