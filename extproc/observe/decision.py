"""Decisions as JSON: routers write them; ``explain``, the dashboard and the demo read them."""

from enum import StrEnum

from msgspec import Struct, ValidationError, convert

Figure = float | None  # null if the value is unknown or infinite


class Terms(Struct):
    """Parts of a prediction, in seconds."""

    queue: Figure  # wait in the router's queue; 0: the replica can start the request at once
    admission: Figure  # wait in the engine; TTFT includes the longer of queue and admission
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
    """Replica that the policy could not choose."""

    replica: str
    name: str
    why: str


class NotFollowed(StrEnum):
    """Reason why a replica other than the chosen one served a request."""

    RETRY = "retry"  # the chosen replica failed, or was too slow for a hedge
    UNKNOWN_ADDRESS = "unknown_address"  # Envoy skipped the address: not a member of its cluster
    OTHER_FILTER = "other_filter"  # another filter of Envoy changed the choice
    FALLBACK = "fallback"  # the choice did not reach Envoy, or the cluster does not read it


class RequestOutcome(Struct):
    """Outcome of a routed request; a value is None if the router did not see it."""

    queued_s: float = 0.0  # in the router's queue, before dispatch
    queue_reason: str = ""
    served_by: str | None = None  # ip:port of the replica that answered, after retries
    not_followed: str = ""  # a NotFollowed; empty if the chosen replica answered
    status: int | None = None
    ttft_s: Figure = None  # since the decision; needs a response whose chunks the router reads
    completion_s: Figure = None  # since the decision
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # of all sequences, as the replica reported


class DecisionRecord(Struct):
    """Routed request: the prediction, the choice with its reason, and the outcome."""

    number: int  # counts decisions from 1
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
    outcome: RequestOutcome
    observed: bool = False  # Envoy alone chose the replica that served

    def name_of(self, replica: str) -> str:
        """Return the name of a replica, or its address if the replica was no candidate."""
        candidate = self.candidate(replica)
        return replica if candidate is None else candidate.name

    def candidate(self, replica: str) -> Candidate | None:
        return next((found for found in self.candidates if found.replica == replica), None)


def read_decisions(answer: object) -> list[DecisionRecord]:
    """Convert decoded JSON to records; ignores unknown fields.

    Raises:
        ValueError: a field is missing or has another type.
    """
    try:
        return convert(answer, list[DecisionRecord])
    except ValidationError as error:
        raise ValueError(
            f"the decisions cannot be read ({error}): the router may have another version; "
            "try --json"
        ) from None
