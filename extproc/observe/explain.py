"""Decision records as text for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from math import inf

from extproc.ground.address import with_name
from extproc.ground.clock import time_of_day
from extproc.ground.text import Cells, Column, count, figure, paragraph, printable, share, table_of
from extproc.observe.decision import Candidate, DecisionRecord, RequestOutcome

DECISIONS: Cells[DecisionRecord] = (
    (Column("time", left=True), lambda record: time_of_day(record.decided_at)),
    (Column("request", left=True, most=36), lambda record: printable(record.request_id) or "-"),
    (Column("replica", left=True, most=20), lambda record: printable(record.replica_name)),
    (Column("prompt"), lambda record: count(record.prompt_tokens)),
    (Column("output"), lambda record: count(record.expected_output_tokens)),
    (Column("TTFT s"), lambda record: figure(record.predicted_ttft_s)),
    (Column("actual"), lambda record: figure(record.outcome.ttft_s)),
    (Column("finish s"), lambda record: figure(record.predicted_completion_s)),
    (Column("actual"), lambda record: figure(record.outcome.completion_s)),
)
_CANDIDATES: Cells[Candidate] = (
    (Column("replica", left=True, most=18), lambda candidate: printable(candidate.name)),
    (Column("requests"), lambda candidate: count(candidate.requests)),
    (Column("KV"), lambda candidate: share(candidate.kv_usage)),
    (Column("queued"), lambda candidate: count(candidate.backlog_tokens)),
    (Column("cached"), lambda candidate: count(candidate.cached_tokens)),
    (Column("wait"), lambda candidate: figure(candidate.terms_s.queue)),
    (Column("admit"), lambda candidate: figure(candidate.terms_s.admission)),
    (Column("adapter"), lambda candidate: figure(candidate.terms_s.adapter)),
    (Column("prefill"), lambda candidate: figure(candidate.terms_s.prefill)),
    (Column("TTFT"), lambda candidate: figure(candidate.predicted_ttft_s)),
    (Column("decode"), lambda candidate: figure(candidate.terms_s.decode)),
    (
        Column("×"),
        lambda candidate: "-" if candidate.stretch is None else f"{candidate.stretch:.2f}",
    ),
    (Column("finish"), lambda candidate: figure(candidate.predicted_completion_s)),
    (Column("others"), lambda candidate: figure(candidate.terms_s.cost_to_others)),
    (Column("weight"), lambda candidate: share(candidate.cost_weight)),
    (Column("wasted"), lambda candidate: figure(candidate.terms_s.avoidable)),
    (Column("score"), lambda candidate: figure(candidate.score)),
)
_LEGEND = (
    "requests: in flight.  KV: share of the KV cache in use.  queued: prompt tokens to prefill.  "
    "Times in seconds:",
    "admit: wait for KV blocks or a batch slot.  others: delay of other requests.",
    "TTFT = admit + prefill.  finish = TTFT + decode.",
)
_OPTIONAL: tuple[tuple[set[str], Callable[[Candidate], object], str], ...] = (
    # Columns that are shown if any candidate has a figure other than zero, and their legends.
    (
        {"wait"},
        lambda candidate: candidate.terms_s.queue,
        "wait: in the router's queue until the replica has room; TTFT includes the longer of wait "
        "and admit.",
    ),
    (
        {"×"},
        lambda candidate: abs((candidate.stretch or 1.0) - 1.0) >= 0.005,
        "×: actual ÷ predicted decode time of the replica's last requests; a factor of decode.",
    ),
    (
        {"adapter", "wasted"},
        lambda candidate: candidate.terms_s.adapter,
        "adapter: wait for a slot of the LoRA adapter, and its loading; part of TTFT.\n"
        "wasted: delay of other requests by the adapter; part of the score.",
    ),
    (
        {"cached", "wasted"},
        lambda candidate: candidate.cached_tokens,
        "cached: prompt tokens in the prefix cache.  wasted: time to prefill what another replica "
        "has cached; part of the score.",
    ),
)
_LABEL = 10


def decisions(records: Sequence[DecisionRecord], routers: Sequence[str] = ()) -> str:
    """Format decisions as a table: for each decision, a line of figures, then model and reason.

    ``routers``: the router of each decision, to be named before the model.
    """
    if not records:
        return "no decisions yet"
    lines = table_of(DECISIONS, records)
    notes = ["model: why", *map(reason_of, records)]
    if routers:
        named = zip(("router", *routers), notes, strict=True)
        notes = [printable(f"{router}, {note}") for router, note in named]
    pairs = ((line, *paragraph(note, _LABEL)) for line, note in zip(lines, notes, strict=True))
    return "\n".join(chain.from_iterable(pairs))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A decision in words, and a table of its candidates."""

    facts: dict[str, str]
    cells: Cells[Candidate]  # of the table
    candidates: list[Candidate]  # by score, the chosen replica first
    legend: list[str]
    excluded: list[tuple[str, str]]  # name and reason of each excluded replica


def compare(record: DecisionRecord) -> Comparison:
    """Describe a decision in full."""
    chosen = _named(record, record.replica)
    if record.observed:
        chosen += "; observed only: Envoy chose by itself"
    elif record.second:
        chosen += f"; for a retry {_named(record, record.second)}"
    facts = {
        "request": record.request_id,
        "time": f"{datetime.fromtimestamp(record.decided_at).astimezone():%Y-%m-%d %H:%M:%S %z}",
        "asks for": _request(record),
        "policy": record.policy,
        "chosen": chosen,
        "why": record.why,
        "happened": _happened(record),
    }
    legend, hidden = list(_LEGEND), set[str]().union(*(columns for columns, _, _ in _OPTIONAL))
    if record.policy == "completion":
        first_token = record.first_token_weight
        ttft = f" + {figure(first_token)} * TTFT" if first_token else ""
        legend[-1] += f"  score = finish{ttft} + weight * others."
    for columns, figure_of, explanation in _OPTIONAL:
        if any(map(figure_of, record.candidates)):
            legend += explanation.split("\n")
            hidden -= columns
    cells: Cells[Candidate] = (
        (Column("", left=True), lambda row: ">" if row.replica == record.replica else ""),
        *(cell for cell in _CANDIDATES if cell[0].header not in hidden),
    )
    candidates = sorted(
        record.candidates,
        key=lambda row: (row.replica != record.replica, inf if row.score is None else row.score),
    )
    return Comparison(
        facts={name: printable(text) or "-" for name, text in facts.items()},
        cells=cells,
        candidates=candidates,
        legend=legend,
        excluded=[(printable(each.name), printable(each.why)) for each in record.excluded],
    )


def comparison(record: DecisionRecord, router: str = "") -> str:
    """Format a decision in full. ``router``: name of the router that decided; empty: not shown."""
    compared, lines = compare(record), list[str]()
    facts = {"router": printable(router)} if router else {}
    for name, text in (facts | compared.facts).items():
        lines += paragraph(text, _LABEL, name)
    lines += ["", *table_of(compared.cells, compared.candidates), "", *compared.legend]
    if compared.excluded:
        lines += ["", "excluded"]
        column = min(max(len(name) for name, _ in compared.excluded), 40) + 2
        for name, why in compared.excluded:
            lines += paragraph(why, column, f"{name}  ")
    return "\n".join(lines)


def reason_of(record: DecisionRecord) -> str:
    """Format the model, the reason of the choice, and remarks on an unexpected outcome."""
    outcome = record.outcome
    remarks = _waited(outcome)
    if outcome.served_by not in (None, record.replica):
        replica = record.name_of(str(outcome.served_by))
        reason = f" ({outcome.not_followed})" if outcome.not_followed else ""
        chose = f"Envoy chose {replica}" if record.observed else f"served by {replica}{reason}"
        remarks.append(chose)
    if outcome.status is not None and outcome.status >= 400:
        remarks.append(f"answered with status {outcome.status}")
    note = f" [{', '.join(remarks)}]" if remarks else ""
    return printable(f"{record.model}: {record.why}{note}")


def _request(record: DecisionRecord) -> str:
    streamed = ", streamed" if record.stream else ""
    served = f" (served as {record.served_as})" if record.served_as != record.model else ""
    objective = f", objective {record.objective}" if record.objective else ""
    text = (
        f"{record.endpoint}, model {record.model}{served}{streamed}{objective}, "
        f"{record.prompt_tokens} prompt tokens"
    )
    if not record.sequences:
        return f"{text}, no output tokens"
    each = f" for each of {record.sequences} sequences" if record.sequences > 1 else ""
    bound = "" if record.output_bound is None else f" of at most {record.output_bound}"
    return f"{text}, {count(record.expected_output_tokens)} output tokens expected{bound}{each}"


def _named(record: DecisionRecord, replica: str) -> str:
    return with_name(replica, record.name_of(replica))


def _happened(record: DecisionRecord) -> str:
    outcome = record.outcome
    parts = _waited(outcome)
    if outcome.served_by is None:
        answer = (
            "no response yet, or the router did not see it"
            if outcome.status is None
            else f"answered with status {outcome.status}, by no known replica"
        )
        return ", ".join([*parts, answer])
    parts.append(f"served by {_named(record, outcome.served_by)} with status {outcome.status}")
    # A request that is only observed has predictions for both choices.
    there = record.candidate(outcome.served_by) if record.observed else None
    first, last = (there or record).predicted_ttft_s, (there or record).predicted_completion_s
    for event, actual, predicted, by_router in (
        ("first token", outcome.ttft_s, first, record.predicted_ttft_s),
        ("finished", outcome.completion_s, last, record.predicted_completion_s),
    ):
        if actual is not None:
            figures = f"predicted {figure(predicted)} s"
            if record.observed and outcome.served_by != record.replica:
                figures += f", {figure(by_router)} s on {record.replica_name}"
            parts.append(f"{event} after {figure(actual)} s ({figures})")
        elif event == "finished":
            parts.append("not finished yet, or the router did not see the end")
    if outcome.prompt_tokens is not None:
        parts.append(f"{outcome.prompt_tokens} prompt tokens (estimated {record.prompt_tokens})")
    if outcome.cached_tokens is not None:
        expected = count(record.expected_cached_tokens)
        parts.append(f"{outcome.cached_tokens} of them cached ({expected} expected)")
    if outcome.output_tokens:
        parts.append(f"{outcome.output_tokens} output tokens")
    return ", ".join(parts)


def _waited(outcome: RequestOutcome) -> list[str]:
    if not outcome.queued_s:
        return []
    why = outcome.queue_reason or "no replica had room"
    return [f"waited {figure(outcome.queued_s)} s at the router: {why}"]
