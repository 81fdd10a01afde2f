"""Decisions as JSON: routers write them; ``explain``, the dashboard and the demo read them."""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct, field

from extproc.predict.inputs import Excluded

FORMAT = 2
"""Version of the JSON of ``/decisions``, ``/fleet`` and the page's events.

The version rises with each change of a field. A field may be added or removed: readers of another
version ignore the fields that they do not know, and read defaults for missing ones. A field whose
meaning or type changes gets another name.
"""

Figure = float | None  # null if the value is unknown or infinite


class Terms(Struct):
    """Parts of a prediction, in seconds."""

    queue: Figure = None  # wait in the router's queue; 0: the replica can start the request at once
    admission: Figure = None  # wait in the engine; TTFT includes the longer of queue and admission
    adapter: Figure = None
    prefill: Figure = None
    decode: Figure = None
    cost_to_others: Figure = None
    avoidable: Figure = None


class Candidate(Struct):
    """Replica that the policy compared."""

    replica: str  # ip:port
    name: str = ""
    score: Figure = None
    requests: Figure = None
    waiting: Figure = None
    kv_usage: Figure = None
    backlog_tokens: Figure = None
    cached_tokens: Figure = None  # tokens of the prompt expected in the prefix cache
    predicted_ttft_s: Figure = None
    predicted_completion_s: Figure = None
    terms_s: Terms = field(default_factory=Terms)
    stretch: Figure = None  # recent actual ÷ predicted decode time; terms_s.decode includes it
    cost_weight: Figure = None
    kv_pressure: Figure = None


class NotFollowed(StrEnum):
    """Reason why a replica other than the chosen one served a request."""

    RETRY = "retry"  # the chosen replica failed, or was too slow for a hedge
    UNKNOWN_ADDRESS = "unknown_address"  # Envoy skipped the address: not a member of its cluster
    OTHER_FILTER = "other_filter"  # another filter of Envoy changed the choice
    FALLBACK = "fallback"  # the choice did not reach Envoy, or the cluster does not read it


class RequestOutcome(Struct):
    """Outcome of a routed request; None stands for a value that the router did not see."""

    queued_s: float = 0.0  # in the router's queue, before dispatch
    queue_reason: str = ""
    served_by: str | None = None  # ip:port of the replica that answered, after retries
    not_followed: str = ""  # a NotFollowed; empty if the chosen replica answered
    status: int | None = None
    ttft_s: Figure = None  # since the decision; only of responses whose chunks the router reads
    completion_s: Figure = None  # since the decision
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # of all sequences, as the replica reported


class DecisionRecord(Struct):
    """Routed request: the prediction, the choice with its reason, and the outcome."""

    number: int  # counts decisions from 1
    request_id: str
    pool: str = ""
    decided_at: float = 0.0  # seconds since the epoch
    policy: str = ""
    endpoint: str = ""
    model: str = ""
    served_as: str = ""
    stream: bool = False
    objective: str = ""
    prompt_tokens: int = 0
    output_bound: int | None = None
    sequences: int = 1
    expected_output_tokens: Figure = None
    p90_output_tokens: Figure = None
    replica: str = ""
    replica_name: str = ""
    second: str | None = None
    why: str = ""
    fallback: str = ""
    others_age_s: Figure = None
    expected_cached_tokens: Figure = None
    predicted_ttft_s: Figure = None
    predicted_completion_s: Figure = None
    first_token_weight: Figure = None  # of TTFT in the score of the policy ``completion``
    compared: int = 0
    candidates: list[Candidate] = []
    excluded: list[Excluded] = []
    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    observed: bool = False  # Envoy alone chose the replica that served
    version: int = 0  # FORMAT of the router; 0: a router from before formats had versions

    def name_of(self, replica: str) -> str:
        """Return the name of a replica, or its address if the replica was no candidate."""
        candidate = self.candidate(replica)
        return replica if candidate is None else candidate.name

    def candidate(self, replica: str) -> Candidate | None:
        return next((found for found in self.candidates if found.replica == replica), None)


def other_format(versions: Iterable[int]) -> str:
    """Return a remark for people if one of the versions of routers' JSON is not :data:`FORMAT`;
    else empty."""
    version = next((version for version in versions if version != FORMAT), None)
    if version is None:
        return ""
    return (
        f"the router has another version (format {version}, here {FORMAT}): fields that only one "
        "of the two versions knows are missing"
    )
