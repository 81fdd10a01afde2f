"""Parts of ``docs/compare.md``: the command of each, and the figures that are kept of it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.__main__ import contender
from benchmarks.compare.faults import FAULTS
from benchmarks.report.faults import harm
from benchmarks.report.figures import contenders
from benchmarks.report.results import Overhead, read

_ROOT = Path(__file__).parents[2]
KEPT = _ROOT / "benchmarks" / "results"
_LIBRARIES = ("extproc", "grpcio", "numpy")
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
    options: str
    heading: str = ""
    contenders: Sequence[str] = _BY_LOAD  # of these, those that are installed
    module: str = "compare"

    @property
    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((KEPT / f"{self.name}.json").read_bytes())
        return found


def _by_name(*parts: Part) -> dict[str, Part]:
    return {part.name: part for part in parts}


_MIXED, _EQUAL, _A10 = (
    f"--fleet benchmarks/fleets/live-{name}.yaml" for name in ("mixed", "equal", "a10")
)
_AGENTS = "--trace benchmarks/traces/agents.jsonl.gz --speed 1.2 --from 150 --duration 60"
OUTCOME = _by_name(
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
_MIDWAY = "--speed 3.5 --duration 10 --at 4 --repeats 1"
HARM = _by_name(*(Part(fault, f"{_EQUAL} {_MIDWAY} --fault {fault}") for fault in FAULTS))
COST = Part("overhead", "--replicas 8,100 --seconds 5 --rounds 4", contenders=(), module="overhead")
ELSEWHERE = Part("elsewhere", options="")  # measured by hand, once: its file says where and how


def measure(folder: Path, programs: Path | None) -> bool:
    """Measures parts without a file in the folder, and keeps the figures of every part.

    Returns False if a part could not be measured; the parts before it are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = ["--programs", str(programs)] if programs else []
    for part in (*OUTCOME.values(), *HARM.values(), COST):
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
    results = read(measured)
    about = {key: results.about[key] for key in ("date", "commit")}
    about["machine"] = results.about["machine"].rpartition(", ")[0]  # without its kernel
    versions = results.about["versions"]
    about["versions"] = {name: one for name, one in versions.items() if name not in _LIBRARIES}
    about["command"] = re.sub(r" --(json|report|programs) \S+", "", results.about["command"])
    if isinstance(results, Overhead):
        setups = [one.model_dump() | {"failed": one.failed} for one in results.setups]
        return {"about": about, "setups": setups}
    every = {
        one.name: {
            "requests": one.counted,
            "failed": one.failed,
            "harm": [
                {"hit": of.hit, "failed": of.failed, "slowest_s": of.slowest_s}
                for of in (harm(run) for run in one.runs if run.fault)
            ],
        }
        for one in contenders(results)
    }
    return {"about": about, "contenders": every, "figures": measured["figures"]}


def _installed(part: Part, programs: Path | None) -> Iterator[str]:
    for name in part.contenders:
        try:
            yield contender(name, programs).name
        except ValueError as error:
            print(f"left out: {error}")
