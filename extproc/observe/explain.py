"""Decision records as text for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from math import inf

from extproc.ground.address import with_name
from extproc.ground.text import (
    Cells,
    Column,
    count,
    figure,
    paragraph,
    printable,
    row_of,
    share,
    table,
    table_of,
)
from extproc.observe.decision import Candidate, DecisionRecord, Outcome

_DECISIONS: Cells[DecisionRecord] = (
    (Column("time", left=True), lambda one: _time(one).strftime("%H:%M:%S")),
    (Column("request", left=True, most=36), lambda one: printable(one.request_id) or "-"),
    (Column("replica", left=True, most=20), lambda one: printable(one.replica_name)),
    (Column("prompt"), lambda one: count(one.prompt_tokens)),
    (Column("output"), lambda one: count(one.expected_output_tokens)),
    (Column("TTFT s"), lambda one: figure(one.predicted_ttft_s)),
    (Column("actual"), lambda one: figure(one.outcome.ttft_s)),
    (Column("finish s"), lambda one: figure(one.predicted_completion_s)),
    (Column("actual"), lambda one: figure(one.outcome.completion_s)),
)
DECISIONS = tuple(column for column, _ in _DECISIONS)  # of the last decisions
_CANDIDATES: Cells[Candidate] = (
    (Column("replica", left=True, most=18), lambda one: printable(one.name)),
    (Column("requests"), lambda one: count(one.requests)),
    (Column("KV"), lambda one: share(one.kv_usage)),
    (Column("queued"), lambda one: count(one.backlog_tokens)),
    (Column("cached"), lambda one: count(one.cached_tokens)),
    (Column("step"), lambda one: figure(one.terms_s.step_rest)),
    (Column("wait"), lambda one: figure(one.terms_s.queue)),
    (Column("admit"), lambda one: figure(one.terms_s.admission)),
    (Column("adapter"), lambda one: figure(one.terms_s.adapter)),
    (Column("prefill"), lambda one: figure(one.terms_s.prefill)),
    (Column("TTFT"), lambda one: figure(one.predicted_ttft_s)),
    (Column("decode"), lambda one: figure(one.terms_s.decode)),
    (Column("×"), lambda one: "-" if one.stretch is None else f"{one.stretch:.2f}"),
    (Column("finish"), lambda one: figure(one.predicted_completion_s)),
    (Column("others"), lambda one: figure(one.terms_s.cost_to_others)),
    (Column("weight"), lambda one: share(one.cost_weight)),
    (Column("wasted"), lambda one: figure(one.terms_s.avoidable)),
    (Column("score"), lambda one: figure(one.score)),
)
_LEGEND = (
    "requests: in flight.  KV: of the cache in use.  queued: prompt tokens to prefill.  "
    "Times in seconds:",
    "step: rest of the one in progress.  admit: wait for KV space or a place in the batch.  "
    "others: what they lose.",
    "TTFT = step + admit + prefill.  finish = TTFT + decode.",
)
_COMPLETION_SCORE = "  score = finish + weight * others."
_OPTIONAL: tuple[tuple[set[str], Callable[[Candidate], object], str], ...] = (
    # Columns that are shown where the figure is not zero for a candidate, and their legend.
    (
        {"wait"},
        lambda one: one.terms_s.queue,
        "wait: at the router, until the replica has room; TTFT has the longer of wait and admit.",
    ),
    (
        {"×"},
        lambda one: abs((one.stretch or 1.0) - 1.0) >= 0.005,
        "×: actual ÷ predicted decode time of its last requests, by which decode is multiplied.",
    ),
    (
        {"adapter", "wasted"},
        lambda one: one.terms_s.adapter,
        "adapter: wait for a place of its LoRA adapter in the batch, and to load it; "
        "TTFT has it in.\nwasted: what others lose by that; the score has it in.",
    ),
    (
        {"cached", "wasted"},
        lambda one: one.cached_tokens,
        "cached: prompt tokens in its prefix cache.  wasted: time to prefill what another has "
        "cached; the score has it in.",
    ),
)
_LABEL = 10


def decisions(records: Sequence[DecisionRecord]) -> str:
    """Format decisions as a table, two lines each: figures, then the model and why."""
    if not records:
        return "no decisions yet"
    lines = table_of(_DECISIONS, records)
    notes = ["model: why", *map(reason_of, records)]
    pairs = ((line, *paragraph(note, _LABEL)) for line, note in zip(lines, notes, strict=True))
    return "\n".join(chain.from_iterable(pairs))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Decision in words and as a table of its candidates."""

    facts: dict[str, str]
    columns: list[Column]
    rows: list[list[str]]  # of candidates by score, the chosen one first
    legend: list[str]
    left_out: list[tuple[str, str]]  # name and reason of excluded replicas


def compare(record: DecisionRecord) -> Comparison:
    """Describe one decision in full."""
    chosen = _named(record, record.replica)
    if record.second:
        chosen += f"; for a retry {_named(record, record.second)}"
    facts = {
        "request": record.request_id,
        "time": _time(record).strftime("%Y-%m-%d %H:%M:%S %z"),
        "asks for": _asks(record),
        "policy": record.policy,
        "chosen": chosen,
        "why": record.why,
        "happened": _happened(record),
    }
    legend, hidden = list(_LEGEND), set[str]().union(*(columns for columns, _, _ in _OPTIONAL))
    if record.policy == "completion":
        legend[-1] += _COMPLETION_SCORE
    for columns, figure_of, explained in _OPTIONAL:
        if any(map(figure_of, record.candidates)):
            legend += explained.split("\n")
            hidden -= columns
    cells: Cells[Candidate] = (
        (Column("", left=True), lambda one: ">" if one.replica == record.replica else ""),
        *(cell for cell in _CANDIDATES if cell[0].header not in hidden),
    )
    candidates = sorted(
        record.candidates,
        key=lambda one: (one.replica != record.replica, inf if one.score is None else one.score),
    )
    return Comparison(
        facts={name: printable(text) or "-" for name, text in facts.items()},
        columns=[column for column, _ in cells],
        rows=[row_of(cells, one) for one in candidates],
        legend=legend,
        left_out=[(printable(one.name), printable(one.why)) for one in record.excluded],
    )


def comparison(record: DecisionRecord) -> str:
    """Format one decision in full."""
    one, lines = compare(record), list[str]()
    for name, text in one.facts.items():
        lines += paragraph(text, _LABEL, name)
    lines += ["", *table(one.columns, one.rows), "", *one.legend]
    if one.left_out:
        lines += ["", "left out"]
        column = min(max(len(name) for name, _ in one.left_out), 40) + 2
        for name, why in one.left_out:
            lines += paragraph(why, column, name)
    return "\n".join(lines)


def reason_of(record: DecisionRecord) -> str:
    """Model, reason of the choice, and how the outcome differs from the intention."""
    outcome = record.outcome
    odd = _waited(outcome)
    if outcome.served_by not in (None, record.replica):
        odd.append(f"served by {record.name_of(str(outcome.served_by))}")
    if outcome.status is not None and outcome.status >= 400:
        odd.append(f"answered with status {outcome.status}")
    remark = f" [{', '.join(odd)}]" if odd else ""
    return printable(f"{record.model}: {record.why}{remark}")


def figures_of(record: DecisionRecord) -> list[str]:
    """Cells of a decision in the columns ``DECISIONS``."""
    return row_of(_DECISIONS, record)


def _time(record: DecisionRecord) -> datetime:
    return datetime.fromtimestamp(record.decided_at).astimezone()


def _asks(record: DecisionRecord) -> str:
    streamed = ", streamed" if record.stream else ""
    served = f" (served as {record.served_as})" if record.served_as != record.model else ""
    asked = f"{record.endpoint}, model {record.model}{served}{streamed}"
    asked += f", objective {record.objective}" if record.objective else ""
    asked += f", {record.prompt_tokens} prompt tokens"
    if not record.sequences:
        return f"{asked}, nothing to generate"
    each = f" for each of {record.sequences} sequences" if record.sequences > 1 else ""
    bound = "" if record.output_bound is None else f" of at most {record.output_bound}"
    expected = count(record.expected_output_tokens)
    return f"{asked}, {expected} output tokens expected{bound}{each}"


def _named(record: DecisionRecord, replica: str) -> str:
    return with_name(replica, record.name_of(replica))


def _happened(record: DecisionRecord) -> str:
    outcome = record.outcome
    parts = _waited(outcome)
    if outcome.served_by is None:
        return ", ".join([*parts, "no answer yet, or none that was seen"])
    parts.append(f"served by {_named(record, outcome.served_by)} with status {outcome.status}")
    for did, actual, predicted in (
        ("first token", outcome.ttft_s, record.predicted_ttft_s),
        ("finished", outcome.completion_s, record.predicted_completion_s),
    ):
        if actual is not None:
            parts.append(f"{did} after {figure(actual)} s (predicted {figure(predicted)} s)")
        elif did == "finished":
            parts.append("not finished yet, or its end was not seen")
    if outcome.prompt_tokens is not None:
        parts.append(f"{outcome.prompt_tokens} prompt tokens (taken for {record.prompt_tokens})")
    if outcome.cached_tokens is not None:
        expected = count(record.expected_cached_tokens)
        parts.append(f"{outcome.cached_tokens} of them cached ({expected} expected)")
    if outcome.output_tokens:
        parts.append(f"{outcome.output_tokens} output tokens")
    return ", ".join(parts)


def _waited(outcome: Outcome) -> list[str]:
    if not outcome.waited_s:
        return []
    why = outcome.waited_for or "no replica could carry it"
    return [f"waited {figure(outcome.waited_s)} s at the router, as {why}"]
