"""Makes the tables of ``docs/compare.md`` and the README's picture from ``benchmarks/results/``.

    python -m benchmarks.compare.page

``--measure DIR`` first measures all tables except those made by hand or on a GPU, with the
installed contenders: some 50 minutes on two idle cores. After an interruption, the same command
continues where it stopped: files in DIR are reused.
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
from benchmarks.compare.__main__ import contender_named
from benchmarks.compare.play import FAULTS
from benchmarks.report.figures import HEADLINES, TurnSpread, contenders
from benchmarks.report.markdown import table_of
from benchmarks.report.results import read
from benchmarks.report.words import harm, median_and_range

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
PAGE, PICTURE = _ROOT / "docs" / "compare.md", _ROOT / "docs" / "compare.png"
BEGIN = "<!-- made by: python -m benchmarks.compare.page -->"
END = "<!-- end: python -m benchmarks.compare.page -->"
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
_BY_LOAD = (
    *("router", "envoy", "vllm-router", "smg", "sglang-router"),
    *("llm-d:scorers", "aibrix:least-request"),
)
_BY_PREFIX = (
    *("router", "envoy", "vllm-router:cache_aware", "smg:cache_aware", "sglang-router"),
    *("llm-d:scorers", "aibrix:prefix-cache"),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str  # of its file in ``RESULTS``
    options: str = ""
    heading: str = ""
    contenders: Sequence[str] = _BY_LOAD  # contenders that are not installed are left out
    module: str = "compare"

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads((RESULTS / f"{self.name}.json").read_bytes())
        return figures


_MIXED, _EQUAL, _A10 = (
    f"--fleet benchmarks/fleets/live-{name}.yaml" for name in ("mixed", "equal", "a10")
)
_AGENTS = "--trace benchmarks/traces/agents.jsonl.gz --speed 1.2 --from 150 --duration 60"
# Measured once, on a machine with a GPU: :func:`measure` leaves them as they are.
ON_GPU = (
    Measurement("h100-conversations", heading="Conversations, real vLLM on an H100"),
    Measurement("h100-agents", heading="Agents, real vLLM on an H100"),
)
_MIDWAY = "--speed 3.5 --duration 10 --at 4 --repeats 1"
OUTCOME = (
    Measurement(
        "cold-mixed",
        f"{_MIXED} --speed 4 --duration 10",
        "Conversations, two H100 and two A10; only Envoy's weights know which are fast",
        (*_BY_LOAD, "envoy:least_request_weighted"),
    ),
    Measurement("cold-equal", f"{_EQUAL} --speed 3.5 --duration 10", "Conversations, four A100"),
    Measurement(
        "warm-mixed",
        f"{_MIXED} {_AGENTS} --repeats 1",
        "Agents, whose prompts are largely cached, two H100 and two A10",
        _BY_PREFIX,
    ),
    Measurement("warm-equal", f"{_EQUAL} {_AGENTS} --repeats 1", "Agents, four A100", _BY_PREFIX),
    Measurement(
        "overload",
        f"{_A10} --speed 2.5 --duration 20 --repeats 1",
        "Overload: conversations, four A10, more than they can carry",
    ),
)
HARM = tuple(Measurement(fault, f"{_EQUAL} {_MIDWAY} --fault {fault}") for fault in FAULTS)
COST = Measurement(
    "overhead", "--replicas 8,100 --seconds 5 --rounds 4", contenders=(), module="overhead"
)
MEASUREMENTS = (*OUTCOME, *HARM, COST)
_ELSEWHERE = Measurement("elsewhere")  # measured once, by hand: the file says where and how
_METRIC = "completion, p99"
_PANELS = {
    "Unequal vLLM": "h100-conversations",
    "Unequal GPUs": "cold-mixed",
    "Equal GPUs": "cold-equal",
    "Overload": "overload",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("compare.page", __doc__)
    where = "measure everything that has no file in this folder"
    parser.add_argument("--measure", type=Path, metavar="DIR", help=where)
    arguments.add_programs(parser)
    args = parser.parse_args(argv)
    if args.measure and not measure(args.measure, args.programs):
        return 1
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")
    PICTURE.write_bytes(picture())
    return 0


# -- measuring ------------------------------------------------------------------------------


def measure(folder: Path, programs: Path | None) -> bool:
    """Makes the measurements that have no file in the folder, and stores the figures of all.

    Returns False if a measurement fails; the figures of earlier measurements are stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = ["--programs", str(programs)] if programs else []
    for measurement in MEASUREMENTS:
        file = folder / f"{measurement.name}.json"
        unfinished = file.with_suffix(".unfinished")
        if not file.exists():
            print(f"\n== {measurement.name}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{measurement.module}"]
            command += measurement.options.split()
            if measurement.contenders:
                command += ["--contenders", ",".join(_installed(measurement, programs)), *where]
            command += ["--json", str(unfinished.absolute())]
            # Status 1: measured, but a run went wrong, which the figures say.
            if subprocess.call(command, cwd=_ROOT) not in (0, 1):
                return False
            unfinished.rename(file)
        stored = json.dumps(figures(json.loads(file.read_bytes())), indent=1)
        (RESULTS / file.name).write_text(stored + "\n")
    return True


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a ``--json`` file that is stored: figures and origin, but no requests."""
    origin = measured["overhead" if "setups" in measured else "compare"]
    about = {key: origin[key] for key in ("date", "commit")}
    about["machine"] = origin["machine"].rpartition(", ")[0]  # without its kernel
    about["versions"] = {
        name: version for name, version in origin["versions"].items() if name not in _LIBRARIES
    }
    about["command"] = re.sub(r" --(json|report|programs) \S+", "", origin["command"])
    if "setups" in measured:
        setups = [setup["rate"] | setup for setup in measured["setups"]]
        costs = [{key: setup[key] for key in ("name", *_COSTS)} for setup in setups]
        return {"about": about, "setups": costs}
    by_name = {}
    for contender in contenders(read(measured)):
        harms = [harm(run) for run in contender.runs if run.fault]
        by_name[contender.name] = {
            "requests": contender.counted,
            "failed": contender.failed,
            "harm": [
                {"hit": turn.hit, "failed": turn.failed, "slowest_s": turn.slowest_s}
                for turn in harms
            ],
        }
    return {"about": about, "contenders": by_name, "figures": measured["figures"]}


def _installed(measurement: Measurement, programs: Path | None) -> Iterator[str]:
    for name in measurement.contenders:
        try:
            yield contender_named(name, programs).name
        except ValueError as error:
            print(f"left out: {error}")


# -- the page -------------------------------------------------------------------------------


def parts(text: str) -> tuple[str, str, str]:
    """Splits a page into the text before the generated lines, these lines, and the text after."""
    before, _, rest = text.partition(BEGIN + "\n")
    generated, _, after = rest.partition(END)
    return before, generated.removesuffix("\n"), after


def tables() -> str:
    return "\n".join((*_outcome(), *_faults(), *_cost(), *_elsewhere()))


def picture() -> bytes:
    """PNG with a panel for each of ``_PANELS``, with a bar for each product's best policy."""
    from benchmarks.report.pictures import bars  # needs matplotlib

    panels: dict[str, dict[str, tuple[TurnSpread, str]]] = {}
    for title, name in _PANELS.items():
        measured, best = Measurement(name).figures(), panels.setdefault(f"{title}: {_METRIC}", {})
        for contender, values in measured["figures"]["contenders"].items():
            if turns := values["Completion, p99"]:
                product = _THIS if contender == _OURS else contender.partition(":")[0]
                bar = TurnSpread(**turns), _doubt(contender, measured)
                best[product] = min(bar, best.get(product, bar), key=lambda bar: bar[0].median)
    return bars(panels, _THIS)


def _outcome() -> Iterator[str]:
    for measurement in (*ON_GPU, *OUTCOME):
        measured = measurement.figures()
        figures = measured["figures"]["contenders"]
        rows = [
            [
                _name(name) + _doubt(name, measured),
                *_headlines(figures[name]),
                f"{counts['failed']} of {counts['requests']:,}",
            ]
            for name, counts in measured["contenders"].items()
        ]
        beside = measured["figures"]["beside_best"]
        ratios = {name: values and values["ratio"] for name, values in beside.items()}
        rows.append(["this router ÷ the best other of a run", *_headlines(ratios), ""])
        yield f"### {measurement.heading}\n"
        yield from table_of(["", *(metric.name for metric in HEADLINES), "failed"], rows)
        yield from _origin(measured)


def _headlines(values: Mapping[str, Any]) -> Iterator[str]:
    for metric in HEADLINES:
        turns = values[metric.name]
        yield median_and_range(TurnSpread(**turns) if turns else None)


def _faults() -> Iterator[str]:
    measured = {fault.name.replace("-", " "): fault.figures() for fault in HARM}
    names = dict.fromkeys(name for figures in measured.values() for name in figures["contenders"])
    rows = [
        [_name(name), *(_harm(name, figures) for figures in measured.values())] for name in names
    ]
    yield "### One part fails: four A100, conversations\n"
    yield from table_of(["", *measured], rows)
    yield from _origin(*measured.values())


def _harm(name: str, measured: Mapping[str, Any]) -> str:
    """Cell of the fault table for a contender: ``has none`` if it lacks the part that fails."""
    if (counts := measured["contenders"].get(name)) is None:
        return "has none"
    (turn,) = counts["harm"]
    failed = f"{turn['failed']} of {counts['requests']} ({turn['hit']} hit)"
    return f"{failed}, {turn['slowest_s']:.1f} s{_doubt(name, measured)}"


def _doubt(name: str, measured: Mapping[str, Any]) -> str:
    return " !" if measured["figures"]["contenders"][name]["in_doubt"] else ""


def _cost() -> Iterator[str]:
    measured, rounds = COST.figures(), defaultdict[str, list[Mapping[str, float]]](list)
    for setup in measured["setups"]:
        rounds[setup["name"]].append(setup)
    rows = [
        [
            name,
            *(median_and_range(TurnSpread.of(setup[key] for setup in setups)) for key in _COSTS),
        ]
        for name, setups in rounds.items()
    ]
    yield "### What it adds to a request, and what a request costs\n"
    yield from table_of(["", *_COSTS.values()], rows)
    yield from _origin(measured)


def _elsewhere() -> Iterator[str]:
    """Tables of routers that must be built from source, which were measured once, by hand."""
    measured = _ELSEWHERE.figures()
    yield f"### {measured['heading']}\n\n{measured['about']}\n"
    for table in measured["tables"]:
        yield f"{table['about']}\n"
        yield from table_of(["", *table["head"]], table["rows"])
        yield ""


def _name(contender: str) -> str:
    return f"**{_THIS}**" if contender == _OURS else contender.replace(":", " ")


def _origin(*measured: Mapping[str, Any]) -> Iterator[str]:
    origins = [figures["about"] for figures in measured]
    used = {name: number for origin in origins for name, number in origin["versions"].items()}
    versions = ", ".join(map(" ".join, used.items()))
    commits = ", ".join(dict.fromkeys(origin["commit"] for origin in origins))
    date, machine = origins[0]["date"][:10], origins[0]["machine"]
    yield f"\n{date}, commit {commits}; {machine}; {versions}:\n"
    yield "\n".join(["```", *(origin["command"] for origin in origins), "```\n"])


if __name__ == "__main__":
    sys.exit(main())
