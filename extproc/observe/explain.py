"""Decision records as text for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

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
_STRETCH_LEGEND = (
    "×: actual ÷ predicted decode time of its last requests, by which decode is multiplied."
)
_ADAPTER_LEGEND = (
    "adapter: wait for a place of its LoRA adapter in the batch, and to load it; TTFT has it in.",
    "wasted: what others lose by that; the score has it in.",
)
_CACHED_LEGEND = (
    "cached: prompt tokens in its prefix cache.  wasted: time to prefill what another has cached; "
    "the score has it in."
)
_NO_STRETCH = 0.005
_COMPLETION_SCORE = "  score = finish + weight * others."
_LABEL = 10


def decisions(records: Sequence[DecisionRecord]) -> str:
    """The decisions as a table, two lines each: figures, then the model and why."""
    if not records:
        return "no decisions yet"
    header, *rows = table_of(_DECISIONS, records)
    lines = [header, *paragraph("model: why", _LABEL)]
    for row, record in zip(rows, records, strict=True):
        lines += [row, *paragraph(reason_of(record), _LABEL)]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One decision in words, with all that was compared."""

    facts: dict[str, str]  # what was asked, chosen and done, in order
    columns: list[Column]
    rows: list[list[str]]  # a row a candidate, in the order of their scores; first the chosen one
    legend: list[str]  # what the columns are
    left_out: list[tuple[str, str]]  # name of each replica that was left out, and why


def compare(record: DecisionRecord) -> Comparison:
    """All that is told of one decision."""
    facts = {
        "request": record.request_id,
        "time": _time(record).strftime("%Y-%m-%d %H:%M:%S %z"),
        "asks for": _asks(record),
        "policy": record.policy,
        "chosen": _chosen(record),
        "why": record.why,
        "happened": _happened(record),
    }
    return Comparison(
        {name: printable(text) or "-" for name, text in facts.items()},
        *_compared(record),
        _legend(record),
        [(printable(one.name), printable(one.why)) for one in record.excluded],
    )


def comparison(record: DecisionRecord) -> str:
    """The same as text."""
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
    """Model, why the replica was chosen, and what went otherwise than intended."""
    return printable(f"{record.model}: {record.why}{_remark(record)}")


def figures_of(record: DecisionRecord) -> list[str]:
    """A decision in the columns of ``DECISIONS``."""
    return row_of(_DECISIONS, record)


def _compared(record: DecisionRecord) -> tuple[list[Column], list[list[str]]]:
    """The table of candidates."""
    candidates = sorted(record.candidates, key=lambda one: _rank(one, record))
    hidden = set() if _stretched(record) else {"×"}
    hidden |= set() if _cached(record) else {"cached"}
    hidden |= set() if _adapted(record) else {"adapter"}
    hidden |= set() if _cached(record) or _adapted(record) else {"wasted"}
    shown = [(column, cell) for column, cell in _CANDIDATES if column.header not in hidden]
    rows = [
        [">" if one.replica == record.replica else "", *row_of(shown, one)] for one in candidates
    ]
    return [Column("", left=True), *(column for column, _ in shown)], rows


def _legend(record: DecisionRecord) -> list[str]:
    legend = list(_LEGEND)
    if record.policy == "completion":
        legend[-1] += _COMPLETION_SCORE
    legend += [_STRETCH_LEGEND] if _stretched(record) else []
    legend += _ADAPTER_LEGEND if _adapted(record) else ()
    return [*legend, _CACHED_LEGEND] if _cached(record) else legend


def _stretched(record: DecisionRecord) -> bool:
    """Whether predictions of any candidate were off as of late."""
    return any(abs((one.stretch or 1.0) - 1.0) >= _NO_STRETCH for one in record.candidates)


def _cached(record: DecisionRecord) -> bool:
    """Whether any candidate should have some of the prompt in its prefix cache."""
    return any(one.cached_tokens for one in record.candidates)


def _adapted(record: DecisionRecord) -> bool:
    """Whether its LoRA adapter makes a difference."""
    return any(one.terms_s.adapter for one in record.candidates)


def _rank(candidate: Candidate, record: DecisionRecord) -> tuple[bool, float]:
    """The chosen one, then by score."""
    score = float("inf") if candidate.score is None else candidate.score
    return candidate.replica != record.replica, score


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


def _chosen(record: DecisionRecord) -> str:
    chosen = _named(record, record.replica)
    return f"{chosen}; for a retry {_named(record, record.second)}" if record.second else chosen


def _named(record: DecisionRecord, replica: str) -> str:
    return with_name(replica, record.name_of(replica))


def _remark(record: DecisionRecord) -> str:
    """What went otherwise than intended."""
    outcome = record.outcome
    odd = _waited(outcome)
    if outcome.served_by not in (None, record.replica):
        odd.append(f"served by {record.name_of(str(outcome.served_by))}")
    if outcome.status is not None and outcome.status >= 400:
        odd.append(f"answered with status {outcome.status}")
    return f" [{', '.join(odd)}]" if odd else ""


def _happened(record: DecisionRecord) -> str:
    outcome = record.outcome
    parts = _waited(outcome)
    if outcome.served_by is None:
        return ", ".join([*parts, "no answer yet, or none that was seen"])
    parts.append(f"served by {_named(record, outcome.served_by)} with status {outcome.status}")
    parts += _times(record, outcome)
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


def _times(record: DecisionRecord, outcome: Outcome) -> list[str]:
    parts = []
    if outcome.ttft_s is not None:
        predicted = figure(record.predicted_ttft_s)
        parts.append(f"first token after {figure(outcome.ttft_s)} s (predicted {predicted} s)")
    if outcome.completion_s is None:
        parts.append("not finished yet, or its end was not seen")
    else:
        predicted = figure(record.predicted_completion_s)
        parts.append(f"finished after {figure(outcome.completion_s)} s (predicted {predicted} s)")
    return parts
