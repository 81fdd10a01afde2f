"""Makes the tables of ``docs/compare.md`` and the README's picture from ``benchmarks/results/``.

    python -m benchmarks.compare.page

With ``--measure DIR`` it measures everything before, with the contenders that are installed: some
50 minutes on two idle cores. It goes on after an interruption: files in DIR are not made again.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments
from benchmarks.compare.measured import COST, ELSEWHERE, HARM, OUTCOME, measure
from benchmarks.compare.terminal import median_and_range
from benchmarks.report.figures import HEADLINES, Spread
from benchmarks.report.markdown import table_of

_DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = _DOCS / "compare.md", _DOCS / "compare.png"
BEGIN, END = (f"<!-- {what}: python -m benchmarks.compare.page -->" for what in ("made by", "end"))
_OURS, _THIS = "router:completion", "this router"
_PANELS = {  # of the picture: part and figure
    "Unequal GPUs: completion, p99": (OUTCOME["cold-mixed"], "Completion, p99"),
    "Equal GPUs: completion, p99": (OUTCOME["cold-equal"], "Completion, p99"),
    "Overload: completion, p99": (OUTCOME["overload"], "Completion, p99"),
}
_COSTS = {
    "p50_ms": "p50, ms",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "requests_per_s": "requests/s",
    "cpu_us": "CPU of a request, µs",
    "stream_kb": "memory, kB",
    "failed": "failed",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("compare.page", __doc__)
    where = "measure what this folder lacks, and keep the figures of all"
    parser.add_argument("--measure", type=Path, metavar="DIR", help=where)
    programs = "where epp (llm-d) and gateway-plugins (AIBrix) are [PATH]"
    parser.add_argument("--programs", type=Path, metavar="DIR", help=programs)
    args = parser.parse_args(argv)
    if args.measure and not measure(args.measure, args.programs):
        return 1
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")
    PICTURE.write_bytes(picture())
    return 0


def parts(text: str) -> tuple[str, str, str]:
    """Page before, in and after the generated lines."""
    before, _, rest = text.partition(BEGIN + "\n")
    made, _, after = rest.partition(END)
    return before, made.removesuffix("\n"), after


def tables() -> str:
    return "\n".join((*_outcome(), *_faults(), *_cost(), *_elsewhere()))


def picture() -> bytes:
    """PNG with a panel for each of ``_PANELS``, a bar for each product's best contender."""
    from benchmarks.report.pictures import glance  # needs matplotlib

    panels: dict[str, dict[str, tuple[Spread, str]]] = {}
    for title, (part, metric) in _PANELS.items():
        of, best = part.kept, panels.setdefault(title, {})
        for name, one in of["figures"]["contenders"].items():
            if one[metric]:
                product = _THIS if name == _OURS else name.partition(":")[0]
                bar = Spread(**one[metric]), _doubt(name, of)
                best[product] = min(bar, best.get(product, bar), key=lambda bar: bar[0].median)
    return glance(panels, _THIS)


def _outcome() -> Iterator[str]:
    for part in OUTCOME.values():
        of = part.kept
        measured = of["figures"]["contenders"]
        rows = [
            [
                _name(name) + _doubt(name, of),
                *_headlines(measured[name]),
                f"{one['failed']} of {one['requests']:,}",
            ]
            for name, one in of["contenders"].items()
        ]
        beside = of["figures"]["beside_best"]
        ratios = {name: one and one["ratio"] for name, one in beside.items()}
        rows.append(["this router ÷ the best other of a turn", *_headlines(ratios), ""])
        yield f"### {part.heading}\n"
        yield from table_of(["", *(one.name for one in HEADLINES), "failed"], rows)
        yield from _origin(of)


def _headlines(of: Mapping[str, Any]) -> Iterator[str]:
    for metric in HEADLINES:
        yield median_and_range(Spread(**one) if (one := of[metric.name]) else None)


def _faults() -> Iterator[str]:
    measured = {fault.replace("-", " "): part.kept for fault, part in HARM.items()}
    names = dict.fromkeys(name for of in measured.values() for name in of["contenders"])
    rows = [[_name(name), *(_harm(name, of) for of in measured.values())] for name in names]
    yield "### One part fails: four A100, conversations\n"
    yield from table_of(["", *measured], rows)
    yield from _origin(*measured.values())


def _harm(name: str, of: Mapping[str, Any]) -> str:
    """Cell of a contender, which has no run if it lacks the part."""
    if (one := of["contenders"].get(name)) is None:
        return "has none"
    (harm,) = one["harm"]
    failed = f"{harm['failed']} of {one['requests']} ({harm['hit']} hit)"
    return f"{failed}, {harm['slowest_s']:.1f} s{_doubt(name, of)}"


def _doubt(name: str, of: Mapping[str, Any]) -> str:
    return " !" if of["figures"]["contenders"][name]["in_doubt"] else ""


def _cost() -> Iterator[str]:
    of, rounds = COST.kept, defaultdict[str, list[Mapping[str, float]]](list)
    for one in of["setups"]:
        rounds[one["name"]].append(one)
    rows = [
        [name, *(median_and_range(Spread.of(one[key] for one in each)) for key in _COSTS)]
        for name, each in rounds.items()
    ]
    yield "### What it adds to a request, and what a request costs\n"
    yield from table_of(["", *_COSTS.values()], rows)
    yield from _origin(of)


def _elsewhere() -> Iterator[str]:
    """Figures that need programs built from source, measured elsewhere."""
    of = ELSEWHERE.kept
    yield f"### {of['heading']}\n\n{of['about']}\n"
    for table in of["tables"]:
        yield from table_of(["", *table["head"]], table["rows"])
        yield ""


def _name(contender: str) -> str:
    return f"**{_THIS}**" if contender == _OURS else contender.replace(":", " ")


def _origin(*of: Mapping[str, Any]) -> Iterator[str]:
    about = of[0]["about"]
    used = {name: version for one in of for name, version in one["about"]["versions"].items()}
    versions = ", ".join(map(" ".join, used.items()))
    commits = ", ".join(dict.fromkeys(one["about"]["commit"] for one in of))
    yield f"\n{about['date'][:10]}, commit {commits}; {about['machine']}; {versions}:\n"
    yield "\n".join(["```", *(one["about"]["command"] for one in of), "```\n"])


if __name__ == "__main__":
    sys.exit(main())
