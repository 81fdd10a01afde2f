"""Results in sentences, and figures as people read them."""

from collections.abc import Iterator, Sequence

from benchmarks.report import faults
from benchmarks.report.figures import HEADLINES, Beside, Contender, beside_best, rivals, spread
from benchmarks.report.results import Overhead, Results

_TOLD = (
    "Warning: requests told how long their answers would be (max_tokens with ignore_eos), which "
    "callers seldom do: whoever predicts from them predicts better than with yours."
)


def outcome(results: Results, contenders: Sequence[Contender]) -> list[str]:
    """Sentences on where our contender wins and loses, on failures and on warnings."""
    said = [faults.what(results)] if results.fault else list(comparison(results, contenders))
    if results.about.get("known_lengths"):
        said.append(_TOLD)
    failed = [f"{one.name} {one.failed:,} of {one.counted:,}" for one in contenders if one.failed]
    if failed:
        said.append(f"Failed requests: {', '.join(failed)}. Figures are of those answered.")
    warnings = ((run.name, text) for run in results.runs for text in run.warnings)
    return said + [f"Warning, {name}: {text}" for name, text in dict.fromkeys(warnings)]


def added(overhead: Overhead) -> list[str]:
    """Latency beyond the first setup's, and what failed."""
    alone, *others = overhead.setups
    return [
        f"{one.name.removeprefix('+ ')}: adds {one.p50_ms - alone.p50_ms:.1f} ms at p50 "
        f"and {one.p99_ms - alone.p99_ms:.1f} ms at p99 to {alone.name}, and answers "
        f"{one.requests_per_s:,.0f} requests a second."
        for one in others
    ] + [
        f"{one.name}: {one.failed:,} requests FAILED; its figures are of those answered."
        for one in overhead.setups
        if one.failed
    ]


def comparison(results: Results, contenders: Sequence[Contender]) -> Iterator[str]:
    """Sentences on our contender beside the best of the others, and on turns in doubt."""
    subject, others = rivals(contenders, results.ours)
    if subject is None:
        yield f"{results.ours[0]} has no run: nothing is compared."
    elif not any(subject.figures.values()):
        yield f"{subject.name}: no request was answered."
    else:
        yield from _about(subject, others)
    doubtful = [f"{one.name} in {of_turns(one)}" for one in contenders if one.doubtful]
    if doubtful:
        yield f"In doubt: {', '.join(doubtful)}. Comparisons leave these turns out."


def of_turns(one: Contender) -> str:
    """Share of a contender's turns that are in doubt, as ``1 of 3 turns``."""
    return f"{len(one.doubtful)} of {len(one.runs)} turn{'s' * (len(one.runs) > 1)}"


def _about(subject: Contender, others: Sequence[Contender]) -> Iterator[str]:
    compared = [beside_best(subject, others, metric) for metric in HEADLINES]
    for metric, beside in zip(HEADLINES, compared, strict=True):
        its = spread(subject, metric)
        if beside is not None:
            yield (
                f"{metric.name}: {subject.name} is {ratio(beside.ratio.median)} the best other "
                f"({', '.join(beside.names)}), {_verdict(beside)}. "
                f"{seconds(beside.mine.median)} against {seconds(beside.best.median)}."
            )
        elif its is not None:
            yield f"{metric.name}: {seconds(its.median)}."
    if others and not any(compared):
        yield f"Nothing is compared: in no turn are both {subject.name} and another without doubt."


def _verdict(beside: Beside) -> str:
    turns = beside.ratio.turns
    if turns == 1:
        return "in one turn, which shows no spread"
    spread = ratios(beside.ratio.least, beside.ratio.most)
    where = f" ({spread})" if spread else ""
    if beside.better is None:
        return f"better in {beside.less} of {turns} turns{where}: no clear difference"
    return f"{'better' if beside.better else 'worse'} in all {turns} turns{where}"


# -- units ----------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Time to three digits, in the unit that suits: ``7.20 ms``, ``412 ms``, ``6.61 s``."""
    return f"{_digits(1000 * value)} ms" if value < 0.9995 else f"{_digits(value)} s"


def between(least: float, most: float) -> str:
    """Range with its unit once, ``6.15 – 7.02 s``; empty if both ends are alike."""
    scale, unit = (1000, "ms") if most < 0.9995 else (1, "s")
    return _range(_digits(scale * least), _digits(scale * most), f" {unit}")


def ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def ratios(least: float, most: float) -> str:
    """Range of ratios, ``0.45 – 0.52×``; empty if both ends are alike."""
    return _range(ratio(least)[:-1], ratio(most)[:-1], "×")


def _range(least: str, most: str, unit: str) -> str:
    return "" if least == most else f"{least} – {most}{unit}"


def _digits(value: float) -> str:
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"
