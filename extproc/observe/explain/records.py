"""The decision records of a router, as its admin address shows them."""

from pydantic import BaseModel, TypeAdapter, ValidationError

from extproc.observe.client import AskError

Figure = float | None
"""None: not known, or beyond all figures."""


class Terms(BaseModel):
    """What a prediction is made of, in seconds."""

    step_rest: Figure
    admission: Figure
    adapter: Figure = 0.0
    prefill: Figure
    decode: Figure
    cost_to_others: Figure
    avoidable: Figure


class Candidate(BaseModel):
    """A replica that was compared."""

    replica: str
    """``ip:port``."""
    name: str
    score: Figure
    requests: Figure
    kv_usage: Figure
    backlog_tokens: Figure
    cached_tokens: Figure
    """Of the prompt's, those that it should have in its prefix cache."""
    predicted_ttft_s: Figure
    predicted_completion_s: Figure
    terms_s: Terms
    stretch: Figure
    """Actual ÷ predicted decode time, as of late; the decode time has it in."""
    cost_weight: Figure


class Excluded(BaseModel):
    """A replica that was left out."""

    replica: str
    name: str
    why: str


class Shadow(BaseModel):
    """What another policy would have chosen, and the times predicted there."""

    policy: str
    replica: str
    name: str
    ttft_s: Figure
    completion_s: Figure
    cost_to_others_s: Figure


class Outcome(BaseModel):
    """What happened; None where it was not seen."""

    waited_s: Figure = 0.0
    """At the router, before it was sent."""
    waited_for: str = ""
    served_by: str | None
    status: int | None
    ttft_s: Figure
    completion_s: Figure
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class Record(BaseModel):
    """One decision."""

    number: int
    request_id: str
    decided_at: float
    """Seconds since the epoch."""
    policy: str
    endpoint: str
    model: str
    served_as: str
    stream: bool
    objective: str = ""
    prompt_tokens: int
    output_bound: int | None
    sequences: int
    expected_output_tokens: Figure
    expected_cached_tokens: Figure
    replica: str
    replica_name: str
    second: str | None
    why: str
    predicted_ttft_s: Figure
    predicted_completion_s: Figure
    shadow: Shadow | None = None
    candidates: list[Candidate]
    excluded: list[Excluded]
    outcome: Outcome

    def name_of(self, replica: str) -> str:
        """What people call it; the address itself where it was no candidate."""
        return next((one.name for one in self.candidates if one.replica == replica), replica)


_RECORDS = TypeAdapter(list[Record])


def read_records(answer: object) -> list[Record]:
    """What routers answered."""
    try:
        return _RECORDS.validate_python(answer)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise AskError(
            f"the decisions cannot be read ({where}): is the router of another version? Try --json"
        ) from None
