"""Measures how much longer requests take without each part of the prediction and the policy.

    python -m benchmarks.ablation --json DIR [--cells equal,lone] [--parts "near ties,adapters"]

To switch off a part, a neutral function or constant replaces it. A cell is a fleet and a trace,
which is cut into ten segments, each with its own seed. Each segment is played once with all parts,
and once without each part. The table has the differences in %, with the 95% interval over the ten
segments. DIR stores finished runs by commit; a stored run is not played again, unless files differ
from their commit.
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
from itertools import chain, product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks import arguments, fleet, trace
from benchmarks.arguments import about
from benchmarks.discrete import FleetSimulation
from benchmarks.report.markdown import table_of
from benchmarks.summary import summary
from benchmarks.trace import TracedRequest
from extproc.lab.replay.figures import progress
from extproc.predict.inputs import Floats

PAIRS = 10
_T95 = 2.262  # quantile of Student's t: two-sided, 9 degrees of freedom
_REQUESTS = 500  # of a segment, at most
_HERE = Path(__file__).parent
_FIGURES = (("e2e_s", "mean"), ("e2e_s", "p99"), ("ttft_s", "mean"), ("ttft_s", "p99"))
_HEAD = ("without", "cell", "completion, mean", "p99", "TTFT, mean", "p99")


@dataclass(frozen=True, slots=True)
class AblatedPart:
    target: str  # module:attribute or module:class.attribute
    neutral: Callable[[Any], Any]  # makes the replacement of the target

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
    """Makes a replacement that returns its argument number ``at`` unchanged."""
    return lambda _: lambda *args: args[at]


def _zeros(_: Any) -> Callable[..., Floats]:
    """Makes a replacement that returns a zero for each candidate of its first argument, a view."""
    return lambda view, *_: np.zeros(len(view))


def _weight(weight_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a replacement of ``Prediction.cost_weight``: ``weight_of(prediction)``, except that the
    weight stays 1 if the first token does not matter."""
    return lambda _: property(lambda it: weight_of(it) if it.first_token_matters else 1.0)


_visible = partial(structs.replace, first_token_matters=True)  # the first token always matters


def _first_token_weight(prediction: Any) -> float:
    share = prediction.first_token_share
    return share / (1.0 - share) if share < 0.5 else 1.0


def _predicting(name: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator of ``predict`` that sets field ``name`` of its result to ``value(result)``."""

    def neutral(predict: Any) -> Any:
        def predicted(*args: Any) -> Any:
            prediction = predict(*args)
            setattr(prediction, name, value(prediction))
            return prediction

        return predicted

    return neutral


def _unpredicted_queue(_: Any) -> Any:
    """Makes a replacement of ``add_queue_wait`` that adds no wait to the predicted times."""

    def add(prediction: Any, _view: Any, wait: Floats, *_: Any) -> None:
        prediction.queue = wait

    return add


_ESTIMATOR = "extproc.predict.estimator"
_CORRECTION, _LENGTHS = "extproc.predict.correction", "extproc.predict.lengths"
_COMPLETION, _POLICIES = "extproc.predict.completion", "extproc.route.policies"
_ROUTER, _FLEET = "extproc.route.router", "extproc.fleet.fleet:Fleet"
_SPEEDS = "extproc.fleet.speeds:Speeds"
_PREFIXES, _NEW = "extproc.fleet.prefix_index", "extproc.fleet.eligibility:Eligibility"
_POLLS = "extproc.fleet.reconcile:Reconciliation"
_WEIGHT = f"{_COMPLETION}:Prediction.cost_weight"
PARTS = {
    "learned step times": AblatedPart(f"{_ESTIMATOR}:Estimator.poll", _returning(None)),
    "speed of the last seconds": AblatedPart(f"{_ESTIMATOR}:Estimator._scale", _constant(1.0)),
    "proportions of step times": AblatedPart(f"{_ESTIMATOR}:_PROPORTIONS", _constant(1e3)),
    "prior of the fleet": AblatedPart(f"{_ESTIMATOR}:FleetPrior.report", _returning(None)),
    "speed by the size of the KV cache": AblatedPart(
        "extproc.predict.step:HardwareProfile.expected_step", _constant(lambda self, _: self.step)
    ),
    "solo rows": AblatedPart("extproc.predict.windows:Windows._solo_request", _returning([])),
    "limit on new replicas": AblatedPart(f"{_NEW}._without_full", _passing(1)),
    "trial of new replicas": AblatedPart(f"{_SPEEDS}.favour_untried", _returning(None)),
    "first tokens of new replicas": AblatedPart(f"{_SPEEDS}.learn_first_token", _returning(None)),
    "decode correction": AblatedPart(
        f"{_CORRECTION}:Corrections.ratios", _constant(lambda self, *_: np.ones(len(self._sums.T)))
    ),
    "first-token offsets": AblatedPart(f"{_CORRECTION}:FirstTokens.observe", _returning(None)),
    "wait for admission": AblatedPart(f"{_COMPLETION}:admission", _zeros),
    "wait at the router": AblatedPart(f"{_ROUTER}:add_queue_wait", _unpredicted_queue),
    "no wait beside an idle replica": AblatedPart(f"{_ROUTER}:_without_idle_wait", _passing(0)),
    "learned lengths": AblatedPart(f"{_LENGTHS}:OutputLengths.observe", _returning(None)),
    "kinds of lengths": AblatedPart(f"{_LENGTHS}:_kinds", _returning([])),
    "cost to others": AblatedPart(_WEIGHT, _constant(0.0)),
    "KV pressure": AblatedPart(_WEIGHT, _weight(_first_token_weight)),
    "first token in the weight": AblatedPart(
        _WEIGHT, _weight(lambda prediction: prediction.kv_pressure**2)
    ),
    "whole cost of invisible first tokens": AblatedPart(
        _WEIGHT, lambda weight: property(lambda prediction: weight.fget(_visible(prediction)))
    ),
    "avoidable prefill": AblatedPart(
        f"{_ROUTER}:predict",
        _predicting("avoidable", lambda prediction: np.zeros_like(prediction.ttft)),
    ),
    "weight of the first token": AblatedPart(f"{_COMPLETION}:_FIRST_TOKEN", _constant(0.0)),
    "near ties": AblatedPart(f"{_POLICIES}:_NEAR_TIE", _constant(0.0)),
    "prefix caches": AblatedPart(
        f"{_PREFIXES}:PrefixIndex.hits",
        lambda _: lambda self, prefix, rows: import_module(_PREFIXES)._nothing(len(rows)),
    ),
    "trust in the prefix index": AblatedPart(f"{_PREFIXES}:_Cache.learn_trust", _returning(1.0)),
    "adapters": AblatedPart("extproc.fleet.adapters:AdapterSlots.times", _returning(None)),
    "digests of other routers": AblatedPart(f"{_FLEET}.receive_digest", _returning(None)),
    "prompts of other routers": AblatedPart(f"{_FLEET}.receive_prompts", _returning(None)),
    "load that only polls show": AblatedPart(f"{_POLLS}._correct_external", _returning(None)),
    "prefills by polls": AblatedPart(f"{_POLLS}._correct_prefills", _returning(None)),
}


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str
    fleet: str
    speed: float
    options: Mapping[str, Any] = field(default_factory=dict)  # more arguments of `FleetSimulation`
    events: float = 1.0  # factor of the times of the fleet's events: segments are short
    frontend: float = 0.0  # seconds that a request spends outside the engine's steps
    longest: tuple[float, float] = (inf, inf)  # tokens of a prompt and of an answer, at most

    def requests(self, pair: int, most: int) -> list[TracedRequest]:
        """First ``most`` requests of segment ``pair``; times count from the segment's beginning."""
        every = trace.read([_HERE / f"traces/{self.trace}.jsonl.gz"], self.speed)
        length = every[-1].at / PAIRS
        prompt, output = self.longest
        return [
            replace(request, at=request.at - pair * length)
            for request in every
            if pair * length <= request.at < (pair + 1) * length
            and request.prompt_tokens <= prompt
            and request.output_tokens <= output
        ][:most]

    def play(self, requests: Sequence[TracedRequest], seed: int) -> dict[str, Any]:
        file = fleet.read(_HERE / f"fleets/{self.fleet}.yaml")
        events = [event.model_copy(update={"at": event.at * self.events}) for event in file.events]
        file = file.model_copy(update={"events": tuple(events)})
        simulation = FleetSimulation(file, "completion", seed=seed, **self.options)
        for machine in simulation.machines.values():
            machine.runs_at(replace(machine.profile.step, frontend=self.frontend))
        run = summary(simulation, list(simulation.run(requests)))
        return {key: run[key] for key in ("requests", "failed", "ttft_s", "e2e_s")}


_CONV, _FOUR = "azure-2023-conv", {"routers": 4, "share_lag": 0.02}
CELLS = {
    "equal": Cell(_CONV, "equal", 1.5),
    "mixed": Cell(_CONV, "mixed", 4),
    "busy mixed": Cell(_CONV, "mixed", 6),
    "wrong ×0.25": Cell(_CONV, "mixed", 4, {"profile_error": 0.25}),
    "wrong ×4": Cell(_CONV, "mixed", 4, {"profile_error": 4.0}),
    "wrong and unlike": Cell(_CONV, "live-mixed", 2.5),
    "slow front end": Cell(_CONV, "mixed", 4, frontend=0.03),
    "cold": Cell(_CONV, "cold", 2.5),
    "cold and equal": Cell(_CONV, "cold-equal", 2.5),
    "cold and inverse": Cell(_CONV, "cold-inverse", 2.5),
    "newcomer": Cell(_CONV, "newcomer", 1.2, events=0.1),
    "throttled": Cell(_CONV, "throttled", 1.2, events=0.05),
    "flapping": Cell(_CONV, "flapping", 1.2, events=0.5),
    "lone": Cell(_CONV, "live-mixed", 1, longest=(600, 80)),
    "adapters": Cell(_CONV, "adapters", 1.2, {"adapters": 24}),
    "full": Cell(_CONV, "equal", 2.4, {"hold": True}),
    "four routers": Cell(_CONV, "mixed", 4, _FOUR),
    "load from elsewhere": Cell(_CONV, "mixed", 4, {"past_router": True}),
    "agents": Cell("agents", "a100", 2),
    "busy agents": Cell("agents", "a100", 3),
    "agents and four routers": Cell("agents", "mixed", 1.5, _FOUR),
    "mooncake": Cell("mooncake-synthetic", "a100", 1),
}
Task = tuple[str, int]  # cell and pair
Figures = dict[str, dict[str, Any]]  # of a segment, by the part that was off; "": no part


def play(folder: Path | None, most: int, parts: Sequence[str], task: Task) -> Figures:
    """Plays a segment once with all parts, and once without each of ``parts``."""
    cell, pair = task
    requests = CELLS[cell].requests(pair, most)
    figures = {}
    for name in ("", *parts):
        file = folder and folder / f"{cell} {pair} {most} {name or 'all'}.json"
        if file and file.exists():
            figures[name] = json.loads(file.read_text())
            continue
        with PARTS[name].off() if name else nullcontext():
            figures[name] = CELLS[cell].play(requests, pair)
        if file:
            file.write_text(json.dumps(figures[name]))
    return figures


def worth(pairs: Sequence[Figures], part: str) -> Floats:
    """Logarithms of (figure without a part ÷ figure with all parts); shape (pairs, figures)."""

    def figures(off: str) -> Floats:
        return np.array([[pair[off][times][name] for times, name in _FIGURES] for pair in pairs])

    return np.log(figures(part) / figures(""))


def difference(logs: Floats, least: float = 0.0) -> str:
    """Difference in % and its 95% interval; empty if the interval contains zero, or if the
    difference is smaller than ``least``."""
    middle = logs.mean()
    half = _T95 * logs.std(ddof=1) / np.sqrt(len(logs))
    low, mean, high = 100.0 * np.expm1([middle - half, middle, middle + half])
    if abs(middle) <= half or abs(mean) < least:
        return ""
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")


def rows(found: Mapping[str, Sequence[Figures]], part: str) -> list[list[str]]:
    """Rows of a part in the table: the mean over all cells, and each cell in which the part makes a
    difference of at least 1%. Empty if there is no such cell."""
    logs = {cell: worth(pairs, part) for cell, pairs in found.items()}
    cells = [
        ["", cell, *map(difference, values.T)]
        for cell, values in logs.items()
        if any(difference(figures, least=1.0) for figures in values.T)
    ]
    mean = np.mean([*logs.values()], axis=0)
    return [[part, "all", *map(difference, mean.T)], *cells] if cells else []


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    origin = about("benchmarks.ablation", argv)
    commit = origin["commit"] or "-dirty"
    # Files that differ from their commit may change until the next run.
    name = f"{commit} {origin['date']}" if commit.endswith("-dirty") else commit
    folder = args.json and args.json / name
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
    table = {part: rows(found, part) for part in args.parts}
    print("\n".join(table_of(_HEAD, chain.from_iterable(table.values()))))
    print("\n% by which requests take longer without the part (95% interval),")
    print(f"{origin['date'][:10]}, commit {origin['commit']}.")
    print(f"No cell differs by 1% without: {', '.join(p for p in table if not table[p]) or '-'}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("ablation", __doc__)
    add = parser.add_argument
    add("--cells", type=arguments.some_of(CELLS), default=[*CELLS], metavar="a,b", help="[all]")
    add("--parts", type=arguments.some_of(PARTS), default=[*PARTS], metavar="a,b", help="[all]")
    most = f"requests of a segment, at most [{_REQUESTS}]"
    add("--requests", type=arguments.count, default=_REQUESTS, metavar="N", help=most)
    add("--jobs", type=arguments.count, default=2, metavar="N", help="segments in parallel [2]")
    add("--json", type=Path, metavar="DIR", help="store the figures of finished runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
