"""What the benchmarks' JSON holds, checked."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError


class Gaps(BaseModel):
    """Times between the chunks of one response, seconds."""

    mean: float


class Request(BaseModel):
    """One request; times in seconds."""

    model_config = ConfigDict(allow_inf_nan=False)

    at_s: float
    """Planned arrival, from the start."""
    streamed: bool | None = None
    """None where nobody says."""
    late_s: float = 0.0
    """It was sent so much after that."""
    ttft_s: PositiveFloat | None = None
    completion_s: PositiveFloat | None = None
    gaps_s: Gaps | None = None
    error: str | None = None
    failed_after_s: float | None = None
    replica: str | None = None
    predicted_completion_s: PositiveFloat | None = None
    counted: bool = True
    """False: it was load on its replica, but no figure is of it."""

    @property
    def answered(self) -> bool:
        return self.error is None and self.completion_s is not None

    @property
    def sent_s(self) -> float:
        return self.at_s + self.late_s

    @property
    def lasted_s(self) -> float | None:
        """From sending to the end, good or bad; None where nobody knows."""
        return self.completion_s if self.answered else self.failed_after_s


class Busy(BaseModel):
    """Requests on a replica at one moment."""

    running: float = 0.0
    waiting: float = 0.0


class RunAbout(BaseModel):
    """Whose run it is."""

    model_config = ConfigDict(extra="allow")

    name: str = "this run"
    repeat: int = 0
    reference: bool = False
    """It cannot be had in production (an oracle), so nobody is measured against it."""


class Summary(BaseModel):
    """Of a run's own summary, what cannot be computed from its requests."""

    warnings: list[str] = []


class Validity(BaseModel):
    """What the machine did in a run."""

    doubts: list[str] = []
    """Why figures are the machine's rather than the contender's."""


class Run(BaseModel):
    """One contender, one repeat."""

    run: RunAbout
    requests: list[Request]
    load: list[dict[str, float | Busy]] = []
    """Samples of the replicas: ``{"at_s": 1.2, replica: {"running": 3, "waiting": 0}, …}``."""
    summary: Summary = Summary()
    complaints: list[str] = []
    """What did not go as it should; failed requests, too."""
    validity: Validity = Validity()

    @property
    def in_doubt(self) -> bool:
        """Nothing is to be concluded from it."""
        return bool(self.complaints or self.validity.doubts)

    @property
    def counted(self) -> list[Request]:
        return [one for one in self.requests if one.counted]

    @property
    def answered(self) -> list[Request]:
        return [one for one in self.counted if one.answered]


class Event(BaseModel):
    """Something that happened to the fleet."""

    at_s: float
    text: str


class Results(BaseModel):
    """Runs of one or several contenders, of ``load``, ``compare`` or ``simulate``."""

    kind: str
    about: dict[str, Any]
    runs: list[Run] = Field(min_length=1)
    ours: list[str] = []
    """This project's contenders, the one that matters first; empty: the first against all."""
    events: list[Event] = []


class Latency(BaseModel):
    """What the client of ``overhead`` saw."""

    answered: int
    failed: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


class Setup(BaseModel):
    """One line of ``overhead``: Envoy alone, or with something behind it."""

    name: str
    rate: Latency
    """At a fixed rate."""
    at_once: Latency
    """At a fixed number in flight."""
    held: Latency
    requests_per_s: float
    cpu_us: float
    stream_kb: float

    @property
    def failed(self) -> int:
        return self.rate.failed + self.at_once.failed + self.held.failed


class Overhead(BaseModel):
    """What ``overhead`` measured, Envoy alone first."""

    about: dict[str, Any]
    setups: list[Setup] = Field(min_length=1)


def read(results: Mapping[str, Any]) -> Results | Overhead:
    """The object that a benchmark writes with ``--json``.

    Raises:
        ValueError: it is none; the message says where it differs.
    """
    if not isinstance(results, Mapping):
        raise ValueError("not a benchmark's result: not an object")
    try:
        return _read(results)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a benchmark's result: {where}: {first['msg']}") from None


def _read(results: Mapping[str, Any]) -> Results | Overhead:
    if "overhead" in results:
        return Overhead.model_validate(
            {"about": results["overhead"], "setups": results.get("setups")}
        )
    if "run" in results:
        about = {key: value for key, value in _object(results["run"]).items() if key != "name"}
        return Results.model_validate({"kind": "load", "about": about, "runs": [results]})
    for kind in ("compare", "simulate"):
        if kind in results:
            about = _object(results[kind])
            fields = {"runs": results.get("runs"), "events": results.get("events", [])}
            named = {"kind": kind, "about": about, "ours": about.get("ours", [])}
            return Results.model_validate(named | fields)
    raise ValueError(
        "not a benchmark's result: it has neither of run, compare, simulate and overhead"
    )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"not a benchmark's result: {value!r:.40} where an object is wanted")
    return dict(value)
