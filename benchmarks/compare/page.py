"""Makes the tables of ``docs/compare.md`` and the README's picture from ``benchmarks/results/``.

    python -m benchmarks.compare.page

With ``--measure DIR`` it measures everything before, with the contenders that are installed: some
50 minutes on two idle cores. It goes on after an interruption: files in DIR are not made again.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import arguments
from benchmarks.compare.__main__ import contender
from benchmarks.compare.play import FAULTS
from benchmarks.report.figures import HEADLINES, Spread, contenders
from benchmarks.report.markdown import table_of
from benchmarks.report.results import read
from benchmarks.report.words import harm, median_and_range

_ROOT = Path(__file__).parents[2]
KEPT = _ROOT / "benchmarks" / "results"
PAGE, PICTURE = _ROOT / "docs" / "compare.md", _ROOT / "docs" / "compare.png"
BEGIN, END = (f"<!-- {what}: python -m benchmarks.compare.page -->" for what in ("made by", "end"))
_OURS, _THIS = "router:completion", "this router"
_LIBRARIES = ("extproc", "grpcio", "numpy")
_COSTS = {
    "p50_ms": "p50, ms",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "requests_per_s": "requests/s",
    "cpu_us": "CPU of a request, µs",
    "stream_kb": "memory, kB",
    "failed": "failed",
}
_KEPT = ("name", *_COSTS)
_BY_LOAD = (
    *("router", "envoy", "vllm-router", "smg", "sglang-router"),
    *("llm-d:scorers", "aibrix:least-request"),
)
_BY_PREFIX = (
    *("router", "envoy", "vllm-router:cache_aware", "smg:cache_aware", "sglang-router"),
    *("llm-d:scorers", "aibrix:prefix-cache"),
)


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    options: str = ""
    heading: str = ""
    contenders: Sequence[str] = _BY_LOAD  # of these, those that are installed
    module: str = "compare"

    @property
    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((KEPT / f"{self.name}.json").read_bytes())
        return found


_MIXED, _EQUAL, _A10 = (
    f"--fleet benchmarks/fleets/live-{name}.yaml" for name in ("mixed", "equal", "a10")
)
_AGENTS = "--trace benchmarks/traces/agents.jsonl.gz --speed 1.2 --from 150 --duration 60"
_MIDWAY = "--speed 3.5 --duration 10 --at 4 --repeats 1"
OUTCOME = (
    Part(
        "cold-mixed",
        f"{_MIXED} --speed 4 --duration 10",
        "Conversations, two H100 and two A10; only Envoy's weights know which are fast",
        (*_BY_LOAD, "envoy:least_request_weighted"),
    ),
    Part("cold-equal", f"{_EQUAL} --speed 3.5 --duration 10", "Conversations, four A100"),
    Part(
        "warm-mixed",
        f"{_MIXED} {_AGENTS} --repeats 1",
        "Agents, whose prompts are largely cached, two H100 and two A10",
        _BY_PREFIX,
    ),
    Part("warm-equal", f"{_EQUAL} {_AGENTS} --repeats 1", "Agents, four A100", _BY_PREFIX),
    Part(
        "overload",
        f"{_A10} --speed 2.5 --duration 20 --repeats 1",
        "Overload: conversations, four A10, more than they can carry",
    ),
)
HARM = tuple(Part(fault, f"{_EQUAL} {_MIDWAY} --fault {fault}") for fault in FAULTS)
COST = Part("overhead", "--replicas 8,100 --seconds 5 --rounds 4", contenders=(), module="overhead")
MEASURED = (*OUTCOME, *HARM, COST)
_ELSEWHERE = Part("elsewhere")  # measured by hand, once: its file says where and how
_PANELS = {"Unequal GPUs": "cold-mixed", "Equal GPUs": "cold-equal", "Overload": "overload"}


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


# -- measuring ------------------------------------------------------------------------------


def measure(folder: Path, programs: Path | None) -> bool:
    """Measures parts without a file in the folder, and keeps the figures of every part.

    Returns False if a part could not be measured; the parts before it are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = ["--programs", str(programs)] if programs else []
    for part in MEASURED:
        file, unfinished = folder / f"{part.name}.json", folder / f"{part.name}.unfinished"
        if not file.exists():
            print(f"\n== {part.name}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{part.module}", *part.options.split()]
            if part.contenders:
                command += ["--contenders", ",".join(_installed(part, programs)), *where]
            command += ["--json", str(unfinished.absolute())]
            if subprocess.call(command, cwd=_ROOT) not in (0, 1):
                return False  # 1: something went wrong in it, which its figures tell
            unfinished.rename(file)
        kept = json.dumps(figures(json.loads(file.read_bytes())), indent=1)
        (KEPT / file.name).write_text(kept + "\n")
    return True


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Figures to keep of a ``--json`` file: all but its requests."""
    made = measured["overhead" if "setups" in measured else "compare"]
    about = {key: made[key] for key in ("date", "commit")}
    about["machine"] = made["machine"].rpartition(", ")[0]  # without its kernel
    about["versions"] = {
        name: one for name, one in made["versions"].items() if name not in _LIBRARIES
    }
    about["command"] = re.sub(r" --(json|report|programs) \S+", "", made["command"])
    if "setups" in measured:
        setups = [one["rate"] | one for one in measured["setups"]]
        return {"about": about, "setups": [{key: one[key] for key in _KEPT} for one in setups]}
    every = {
        one.name: {
            "requests": one.counted,
            "failed": one.failed,
            "harm": [
                {"hit": of.hit, "failed": of.failed, "slowest_s": of.slowest_s}
                for of in (harm(run) for run in one.runs if run.fault)
            ],
        }
        for one in contenders(read(measured))
    }
    return {"about": about, "contenders": every, "figures": measured["figures"]}


def _installed(part: Part, programs: Path | None) -> Iterator[str]:
    for name in part.contenders:
        try:
            yield contender(name, programs).name
        except ValueError as error:
            print(f"left out: {error}")


# -- the page -------------------------------------------------------------------------------


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
    for title, part in _PANELS.items():
        of, best = Part(part).kept, panels.setdefault(f"{title}: completion, p99", {})
        for name, one in of["figures"]["contenders"].items():
            if its := one["Completion, p99"]:
                product = _THIS if name == _OURS else name.partition(":")[0]
                bar = Spread(**its), _doubt(name, of)
                best[product] = min(bar, best.get(product, bar), key=lambda bar: bar[0].median)
    return glance(panels, _THIS)


def _outcome() -> Iterator[str]:
    for part in OUTCOME:
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
    measured = {part.name.replace("-", " "): part.kept for part in HARM}
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
    of = _ELSEWHERE.kept
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
