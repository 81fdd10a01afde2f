"""Schema of the benchmarks' JSON."""

from collections.abc import Mapping
from typing import Any

from pydantic import AliasPath, BaseModel, ConfigDict, Field, PositiveFloat


class RequestResult(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    at_s: float  # planned arrival, in seconds from the start
    streamed: bool | None = None  # None: unknown
    late_s: float = 0.0  # from the planned arrival until the request was sent
    ttft_s: PositiveFloat | None = None
    completion_s: PositiveFloat | None = None
    gaps_s: dict[str, float] | None = None  # between the chunks of the response: `mean`, …
    error: str | None = None
    failed_after_s: float | None = None
    counted: bool = True  # false: the request loads its replica, but is in no figure
    struck: bool = False  # in flight on the failing part at the time of the fault

    @property
    def answered(self) -> bool:
        return self.error is None and self.completion_s is not None

    @property
    def token_s(self) -> float | None:
        """Mean seconds between two chunks of this response."""
        return self.gaps_s["mean"] if self.gaps_s else None

    @property
    def sent_s(self) -> float:
        return self.at_s + self.late_s

    @property
    def ended_s(self) -> float | None:
        """Time at which the answer ended or the request failed."""
        lasted = self.completion_s if self.answered else self.failed_after_s
        return None if lasted is None else self.sent_s + lasted


class Fault(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str  # `part-way`, for example `picker-killed`
    at_s: float  # from the start

    @property
    def part(self) -> str:
        return self.name.partition("-")[0]

    @property
    def way(self) -> str:
        return self.name.partition("-")[2]


class RunResult(BaseModel):
    name: str = Field("this run", validation_alias=AliasPath("run", "name"))
    repeat: int = Field(0, validation_alias=AliasPath("run", "repeat"))
    # An oracle, which cannot exist in production: no contender is compared with it.
    reference: bool = Field(False, validation_alias=AliasPath("run", "reference"))
    requests: list[RequestResult]
    fault: Fault | None = None
    warnings: list[str] = Field([], validation_alias=AliasPath("summary", "warnings"))
    complaints: list[str] = []  # deviations from the plan, including failed requests
    # Reasons to believe that the machine, not the contender, made the figures worse.
    doubts: list[str] = Field([], validation_alias=AliasPath("validity", "doubts"))

    @property
    def in_doubt(self) -> bool:
        return bool(self.complaints or self.doubts)

    @property
    def counted(self) -> list[RequestResult]:
        return [request for request in self.requests if request.counted]

    @property
    def answered(self) -> list[RequestResult]:
        return [request for request in self.counted if request.answered]


class Results(BaseModel):
    """Runs of one or several contenders, made by ``load``, ``compare`` or ``simulate``."""

    kind: str
    about: dict[str, Any]
    runs: list[RunResult] = Field(min_length=1)
    ours: list[str] = []  # this router's contenders, the main one first; empty: the first run's
    fault: Fault | None = Field(None, validation_alias=AliasPath("about", "fault"))  # of every run
    without_part: list[str] = Field([], validation_alias=AliasPath("about", "without_part"))


def read(results: Mapping[str, Any]) -> Results:
    """Results from the object that ``--json`` writes."""
    for kind in ("compare", "simulate"):
        if kind in results:
            about = results[kind]
            fields = {**results, "kind": kind, "about": about, "ours": about.get("ours", [])}
            return Results.model_validate(fields)
    return Results.model_validate({"kind": "load", "about": results["run"], "runs": [results]})
