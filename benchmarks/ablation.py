"""Switches off each part of the prediction and of the policy, and prints what each is worth.

    python -m benchmarks.ablation --json DIR [--cells equal,lone] [--parts ties,admission]

A part is one function or constant; a neutral one takes its place. Each cell is ten disjoint
segments of a trace, each with a seed of its own, played once with every part and once without each.
The table has how much longer requests take without a part, with the 95% interval over the ten
pairs. Runs are kept in DIR by the commit, and a run that is there is not made again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from importlib import import_module
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arguments, fleet, trace
from benchmarks.arguments import about
from benchmarks.discrete import Simulation
from benchmarks.report.markdown import table_of
from benchmarks.summary import summary
from benchmarks.trace import TracedRequest
from extproc.lab.replay.figures import progress
from extproc.predict.inputs import Floats

PAIRS = 10
_T95 = 2.262  # two-sided, 9 degrees of freedom
_REQUESTS = 500  # most of a run
_HERE = Path(__file__).parent
_FIGURES = (("e2e_s", "mean"), ("e2e_s", "p99"), ("ttft_s", "mean"), ("ttft_s", "p99"))
_HEAD = ("without", "cell", "completion, mean", "p99", "first token, mean", "p99")


@dataclass(frozen=True, slots=True)
class Part:
    target: str  # module:attribute or module:class.attribute
    neutral: Callable[[Any], Any]  # makes of the target what takes its place

    @contextmanager
    def off(self) -> Iterator[None]:
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        owner = reduce(getattr, parents, import_module(module))
        target = vars(owner)[name]
        setattr(owner, name, self.neutral(target))
        try:
            yield
        finally:
            setattr(owner, name, target)


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _returning(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args, **named: value


def _passing(at: int) -> Callable[[Any], Any]:
    """A function that returns its argument ``at``."""
    return lambda _: lambda *args: args[at]


def _zeros(_: Any) -> Callable[..., Floats]:
    """A function of a view, its first argument, that returns zero for every candidate."""
    return lambda view, *_: np.zeros(len(view))


def _weight(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A weight of the cost to others where first tokens are seen, computed of a prediction."""
    return lambda _: property(lambda one: of(one) if one.first_token_matters else 1.0)


def _first_token_weight(prediction: Any) -> float:
    share = prediction.first_token_share
    return share / (1.0 - share) if share < 0.5 else 1.0


def _predicting(name: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A prediction that has another value in one field."""

    def neutral(predict: Any) -> Any:
        def predicted(*args: Any) -> Any:
            prediction = predict(*args)
            setattr(prediction, name, value(prediction))
            return prediction

        return predicted

    return neutral


def _queued_unseen(_: Any) -> Any:
    """A wait at the router that holds requests and is in no predicted time."""

    def add(prediction: Any, wait: Floats, *_: Any) -> None:
        prediction.queue = wait

    return add


_ESTIMATOR = "extproc.predict.estimator"
_CORRECTION, _LENGTHS = "extproc.predict.correction", "extproc.predict.lengths"
_COMPLETION, _POLICIES = "extproc.predict.completion", "extproc.route.policies"
_ROUTER, _FLEET = "extproc.route.router", "extproc.fleet.fleet:Fleet"
_PREFIXES, _NEW = "extproc.fleet.prefix_index", "extproc.fleet.eligibility:Eligibility"
_WEIGHT = f"{_COMPLETION}:Prediction.cost_weight"
PARTS = {
    "learned step times": Part(f"{_ESTIMATOR}:Estimator.poll", _returning(None)),
    "speed of the last seconds": Part(f"{_ESTIMATOR}:Estimator._scale", _constant(1.0)),
    "proportions of step times": Part(f"{_ESTIMATOR}:_PROPORTIONS", _constant(1e3)),
    "prior of the fleet": Part(f"{_ESTIMATOR}:FleetPrior.report", _returning(None)),
    "solo rows": Part("extproc.predict.windows:Windows._lone", _returning([])),
    "limit on new replicas": Part(f"{_NEW}.without_full", _passing(1)),
    "trial of new replicas": Part(f"{_NEW}.favour_idle", _returning(None)),
    "decode correction": Part(
        f"{_CORRECTION}:Corrections.ratios", _constant(lambda self, *_: np.ones(len(self._sums.T)))
    ),
    "first-token offsets": Part(f"{_CORRECTION}:FirstTokens.observe", _returning(None)),
    "wait for admission": Part(f"{_COMPLETION}:admission", _zeros),
    "wait at the router": Part(f"{_ROUTER}:add_queue_wait", _queued_unseen),
    "no wait beside an idle replica": Part(f"{_ROUTER}:_without_idle_wait", _passing(0)),
    "learned lengths": Part(f"{_LENGTHS}:OutputLengths.observe", _returning(None)),
    "kinds of lengths": Part(f"{_LENGTHS}:_kinds", _returning([])),
    "cost to others": Part(_WEIGHT, _constant(0.0)),
    "KV pressure": Part(_WEIGHT, _weight(_first_token_weight)),
    "first token in the weight": Part(
        _WEIGHT, _weight(lambda prediction: prediction.kv_pressure**2)
    ),
    "whole cost of first tokens unseen": Part(
        f"{_ROUTER}:predict", _predicting("first_token_matters", lambda _: True)
    ),
    "avoidable prefill": Part(
        f"{_ROUTER}:predict", _predicting("avoidable", lambda one: np.zeros_like(one.ttft))
    ),
    "near ties": Part(f"{_POLICIES}:_NEAR_TIE", _constant(0.0)),
    "equal first tokens": Part(f"{_POLICIES}:_SAME_TTFT", _constant(0.0)),
    "prefix caches": Part(
        f"{_PREFIXES}:PrefixIndex.hits",
        lambda _: lambda self, prefix, rows: import_module(_PREFIXES)._nothing(len(rows)),
    ),
    "belief in prefix caches": Part(f"{_PREFIXES}:_Belief.observe", _returning(None)),
    "adapters": Part(f"{_FLEET}.adapter_times", _returning(None)),
    "digests of other routers": Part(f"{_FLEET}.receive_digest", _returning(None)),
    "prompts of other routers": Part(f"{_FLEET}.receive_prompts", _returning(None)),
    "load that only polls show": Part(
        "extproc.fleet.reconcile:Reconciliation._correct_external", _returning(None)
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str
    fleet: str
    speed: float
    options: Mapping[str, Any] = field(default_factory=dict)  # of the simulation
    events: float = 1.0  # factor of the times of the fleet's events: a segment is shorter
    frontend: float = 0.0  # seconds of a request beside the engine's steps
    longest: tuple[float, float] = (inf, inf)  # prompt and answer in tokens, others are left out

    def requests(self, pair: int, most: int) -> list[TracedRequest]:
        """The first requests of a segment, whose time begins with it."""
        every = trace.read([_HERE / f"traces/{self.trace}.jsonl.gz"], self.speed)
        lasts = every[-1].at / PAIRS
        prompt, output = self.longest
        return [
            replace(one, at=one.at - pair * lasts)
            for one in every
            if pair * lasts <= one.at < (pair + 1) * lasts
            and one.prompt_tokens <= prompt
            and one.output_tokens <= output
        ][:most]

    def play(self, requests: Sequence[TracedRequest], seed: int) -> dict[str, Any]:
        file = fleet.read(_HERE / f"fleets/{self.fleet}.yaml")
        events = [one.model_copy(update={"at": one.at * self.events}) for one in file.events]
        file = file.model_copy(update={"events": tuple(events)})
        simulation = Simulation(file, "completion", seed=seed, **self.options)
        for machine in simulation.machines.values():
            machine.runs_at(replace(machine.profile.step, frontend=self.frontend))
        run = summary(simulation, list(simulation.run(requests)))
        return {key: run[key] for key in ("requests", "failed", "ttft_s", "e2e_s")}


_CONV, _FOUR = "azure-2023-conv", {"routers": 4, "share_lag": 0.02}
CELLS = {
    "equal": Cell(_CONV, "equal", 1.5),
    "mixed": Cell(_CONV, "mixed", 4),
    "mixed, busy": Cell(_CONV, "mixed", 6),
    "wrong ×0.25": Cell(_CONV, "mixed", 4, {"profile_error": 0.25}),
    "wrong ×4": Cell(_CONV, "mixed", 4, {"profile_error": 4.0}),
    "wrong, unlike": Cell(_CONV, "live-mixed", 2.5),
    "slow front end": Cell(_CONV, "mixed", 4, frontend=0.03),
    "cold": Cell(_CONV, "cold", 2.5),
    "newcomer": Cell(_CONV, "newcomer", 1.2, events=0.1),
    "throttled": Cell(_CONV, "throttled", 1.2, events=0.05),
    "flapping": Cell(_CONV, "flapping", 1.2, events=0.5),
    "lone": Cell(_CONV, "live-mixed", 1, longest=(600, 80)),
    "adapters": Cell(_CONV, "adapters", 1.2, {"adapters": 24}),
    "full": Cell(_CONV, "equal", 2.4, {"hold": True}),
    "four routers": Cell(_CONV, "mixed", 4, _FOUR),
    "agents": Cell("agents", "a100", 2),
    "agents, four routers": Cell("agents", "mixed", 1.5, _FOUR),
    "mooncake": Cell("mooncake-synthetic", "a100", 1),
}
Task = tuple[str, int]  # cell, and number of the pair
Figures = dict[str, dict[str, Any]]  # of a run, by the part that was off; "": none


def play(folder: Path | None, most: int, parts: Sequence[str], task: Task) -> Figures:
    """Plays a segment with every part, and without each of the parts."""
    cell, pair = task
    requests = CELLS[cell].requests(pair, most)
    found = {}
    for name in ("", *parts):
        file = folder and folder / f"{cell} {pair} {most} {name or 'all'}.json"
        if file and file.exists():
            found[name] = json.loads(file.read_text())
            continue
        with PARTS[name].off() if name else nullcontext():
            found[name] = CELLS[cell].play(requests, pair)
        if file:
            file.write_text(json.dumps(found[name]))
    return found


def worth(pairs: Sequence[Figures], part: str) -> Floats:
    """Logarithms of the figures without a part ÷ with it: a row a pair, a column a figure."""

    def figures(of: str) -> Floats:
        return np.array([[one[of][times][name] for times, name in _FIGURES] for one in pairs])

    return np.log(figures(part) / figures(""))


def shown(logs: Floats) -> str:
    """Difference in % and its interval, or ``none`` where that has zero in it."""
    middle = logs.mean()
    half = _T95 * logs.std(ddof=1) / np.sqrt(len(logs))
    if abs(middle) <= half:
        return "none"
    least, there, most = 100.0 * np.expm1([middle - half, middle, middle + half])
    return f"{there:+.1f} ({least:+.1f} to {most:+.1f})"


def rows(found: Mapping[str, Sequence[Figures]], parts: Sequence[str]) -> Iterator[list[str]]:
    """Rows of the table: of each part all cells together, and those where it is worth something."""
    for part in parts:
        each = {cell: worth(pairs, part) for cell, pairs in found.items()}
        cells = {cell: [shown(of) for of in logs.T] for cell, logs in each.items()}
        measured = {cell: row for cell, row in cells.items() if set(row) != {"none"}}
        yield [f"**{part}**", "all", *(shown(of) for of in np.mean([*each.values()], axis=0).T)]
        yield from (["", cell, *row] for cell, row in measured.items())
        if rest := len(cells) - len(measured):
            yield ["", f"{rest} more" if measured else "each", *["none"] * len(_FIGURES)]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    origin = about("benchmarks.ablation", sys.argv[1:] if argv is None else argv)
    folder = args.json and args.json / (origin["commit"] or "no commit")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    tasks = [*product(args.cells, range(PAIRS))]
    show = progress("ablation")
    found: dict[str, list[Figures]] = {cell: [] for cell in args.cells}
    with ProcessPoolExecutor(args.jobs) as pool:
        playing = pool.map(partial(play, folder, args.requests, args.parts), tasks)
        for done, ((cell, _), figures) in enumerate(zip(tasks, playing, strict=True), 1):
            found[cell].append(figures)
            show(done / len(tasks), cell)
    print("\n".join(table_of(_HEAD, rows(found, args.parts))))
    print(f"\nIn % longer (95% interval), {origin['date'][:10]}, commit {origin['commit']}.")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("ablation", __doc__)
    add = parser.add_argument
    add("--cells", type=arguments.some_of(CELLS), default=[*CELLS], metavar="a,b", help="[all]")
    add("--parts", type=arguments.some_of(PARTS), default=[*PARTS], metavar="a,b", help="[all]")
    most = f"most of a run [{_REQUESTS}]"
    add("--requests", type=arguments.count, default=_REQUESTS, metavar="N", help=most)
    add("--jobs", type=arguments.count, default=2, metavar="N", help="runs at a time [2]")
    add("--json", type=Path, metavar="DIR", help="keep the figures of finished runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
