"""Compares the simulator with a real vLLM server, request by request.

With an existing recording, by default one of ``benchmarks/recordings``:

    python -m benchmarks.fit [--recording FILE]

With a new recording of a server that does nothing else:

    python -m benchmarks.fit --server IP:PORT --model NAME --hardware "one H100" --recording FILE

Each run is simulated twice: with step times measured on other requests, and with step times learned
from the counters polled during the run, as a router learns them.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import arguments, trace
from benchmarks.arguments import about
from benchmarks.fit.replay import (
    EngineLimits,
    Fitted,
    RecordedRequest,
    RecordedRun,
    Recording,
    bursts,
    described,
    fit,
    read_recording,
    write_recording,
)
from benchmarks.trace import TracedRequest
from extproc.cli.arguments import above_zero
from extproc.ground.clock import monotonic
from extproc.ground.text import Column, table
from extproc.lab.harness import traffic
from extproc.lab.harness.pages import get_json
from extproc.lab.replay.figures import FIGURES
from extproc.poll.metrics_text import ScrapeError
from extproc.poll.scrape import open_session, scrape
from extproc.predict.windows import EngineCounts

_LONGEST_PROMPT, _LONGEST_OUTPUT = 3000, 1000  # tokens, within the server's context
_TOKEN_IDS = range(16, 1000)  # in every vocabulary; special tokens have lower ids
_POLL_INTERVAL_S = 0.25
_GIVE_UP_S = 600.0
_PAUSE_S = 0.2  # between two bursts, until the server is idle


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    trace: Path
    requests: int  # of each run
    speeds: Sequence[float]  # one for each run, which plays the next slice of the trace
    shrink_prompts: int  # divisor of the lengths of prompts
    shrink_answers: int  # divisor of the lengths of answers

    def __str__(self) -> str:
        prompts, answers = self.shrink_prompts, self.shrink_answers
        return f"{self.trace.name}, prompts ÷ {prompts}, answers ÷ {answers}"

    def runs(self) -> list[list[TracedRequest]]:
        """Requests of each run; times count from the run's first request. Raises OSError or
        ValueError for a bad trace."""
        slices = [
            trace.read([self.trace], speed, (number + 1) * self.requests)[number * self.requests :]
            for number, speed in enumerate(self.speeds)
        ]
        if len(slices[-1]) < self.requests:
            raise ValueError(f"{self.trace} has too few requests for {len(slices)} runs")
        if any(part[0].at == part[-1].at for part in slices):
            raise ValueError(f"{self.trace}: a run's requests all arrive at once: raise --requests")
        return [[self._shrunk(request, part[0].at) for request in part] for part in slices]

    def _shrunk(self, request: TracedRequest, start: float) -> TracedRequest:
        prompt = min(max(request.prompt_tokens // self.shrink_prompts, 1), _LONGEST_PROMPT)
        output = min(max(request.output_tokens // self.shrink_answers, 1), _LONGEST_OUTPUT)
        return TracedRequest(request.at - start, prompt, output, max_tokens=None)


async def record(args: argparse.Namespace) -> Recording:
    """Sends requests to ``args.server``, and records the answers and the server's counters."""
    server, plan = args.server, RecordingPlan(args.trace, args.requests, args.speed, *args.shrink)
    planned, here = plan.runs(), about("benchmarks.fit", [])
    async with open_session(_GIVE_UP_S) as session:
        page = await scrape(session, server, health=False)
    version = (await get_json(f"http://{server}/version") or {}).get(
        "version", "of unknown version"
    )
    recorder = RecordingClient(server, args.model, Random(0))
    print("recording requests for the calibration", flush=True)
    calibration = await recorder.play("calibration", bursts())
    runs = []
    for requests in planned:
        seconds = requests[-1].at
        name = f"{len(requests) / seconds:.2f} requests/s"
        print(f"recording {len(requests)} requests, {name}, {seconds:.0f} s", flush=True)
        runs.append(await recorder.play(name, [requests]))
    origin = {
        "server": f"vLLM {version}, {args.hardware}",
        "machine": here["machine"],
        "date": here["date"],
        "requests": str(plan),
    }
    limits = EngineLimits(args.max_num_seqs, args.token_budget, page.block_size, page.kv_tokens)
    return Recording(origin, limits, calibration, runs)


@dataclass(frozen=True, slots=True)
class RecordingClient:
    """Sends requests to a server; ``ignore_eos`` and ``max_tokens`` fix the answers' lengths.

    Prompts are random token ids: no two share a prefix, and the server tokenizes nothing.
    """

    server: str  # `ip:port`
    model: str
    random: Random  # draws the prompts

    async def play(self, name: str, parts: Sequence[Sequence[TracedRequest]]) -> RecordedRun:
        """Sends the parts one after the other, and the requests within a part at their times.

        The server must be idle before the run, and is polled during the run. Raises RuntimeError if
        a request fails.
        """
        served: list[RecordedRequest] = []
        prepared = [[self._request(*numbered) for numbered in enumerate(part)] for part in parts]
        async with _polls(self.server) as polls:
            started = monotonic()
            for part, requests in zip(parts, prepared, strict=True):
                async with traffic.Client(f"http://{self.server}", _GIVE_UP_S) as client:
                    answers = await client.run(requests)
                served += [_recorded(*pair, started) for pair in zip(part, answers, strict=True)]
                await asyncio.sleep(_PAUSE_S)
        return RecordedRun(name, served, [replace(poll, at=poll.at - started) for poll in polls])

    def _request(self, number: int, traced: TracedRequest) -> traffic.TimedRequest:
        body = {
            "model": self.model,
            "prompt": self.random.choices(_TOKEN_IDS, k=traced.prompt_tokens),
            "max_tokens": traced.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = json.dumps(body).encode()
        return traffic.TimedRequest(
            traced.at, f"fit-{number}", "/v1/completions", sent, stream=True
        )


def _recorded(traced: TracedRequest, answer: traffic.Answer, started: float) -> RecordedRequest:
    lengths = answer.tokens("prompt"), answer.tokens("completion")
    if not answer.ok or answer.ttft_s is None:
        raise RuntimeError(f"a request failed: {answer.account}")
    if lengths != (traced.prompt_tokens, traced.output_tokens):
        raise RuntimeError(f"the server counts {lengths} tokens, the trace has {traced}")
    times = answer.ttft_s, answer.completion_s
    return RecordedRequest(
        answer.sent_at - started, traced.prompt_tokens, traced.output_tokens, *times
    )


@asynccontextmanager
async def _polls(server: str) -> AsyncIterator[list[EngineCounts]]:
    polls: list[EngineCounts] = []

    async def poll() -> None:
        due = monotonic()
        async with open_session(_GIVE_UP_S) as session:
            while True:
                figures = await scrape(session, server, health=False)
                polls.append(figures.counts(monotonic()))
                due = max(due + _POLL_INTERVAL_S, monotonic())
                await asyncio.sleep(due - monotonic())

    polling = asyncio.create_task(poll())
    try:
        yield polls
    finally:
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling


_HERE = Path(__file__).parents[1]
RECORDED = _HERE / "recordings" / "vllm-cpu-29m.json.gz"
_TRACE = _HERE / "traces" / "azure-2023-conv.jsonl.gz"


def _print(recorded: Recording, fitted: list[Fitted]) -> None:
    print("; ".join(recorded.about.values()))
    first = [Column("step times", left=True), Column("simulated ÷ real, s", left=True)]
    head = [*first, *map(Column, FIGURES), Column("requests")]
    for fit_of_run in fitted:
        print(f"\n{fit_of_run.run.name}, {len(fit_of_run.run.requests)} requests")
        compared = [
            [name, kind, *_cells(comparison)]
            for name, simulated in fit_of_run.simulated.items()
            for kind, comparison in simulated.comparisons.items()
        ]
        print(*table(head, compared), sep="\n")
        for name, simulated in fit_of_run.simulated.items():
            print(f"{name}: {described(simulated.step)}", flush=True)


def _cells(comparison: Mapping[str, Any]) -> Iterator[str]:
    for name in FIGURES:
        quotient = f"{comparison['simulated'][name]:.2f} ÷ {comparison['real'][name]:.2f}"
        yield f"{quotient} {comparison['errors'][name]:+4.0%}"
    yield f"{comparison['request_error']:.0%}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("fit", __doc__)
    parser.add_argument("--recording", type=Path, default=RECORDED, metavar="FILE")
    arguments.add_json(parser)
    add = parser.add_argument_group("making a recording").add_argument
    add("--server", type=arguments.address, metavar="IP:PORT")
    add("--model", default=arguments.MODEL, help="name of the model on that server")
    hardware = "what the server runs on, in words"
    add("--hardware", metavar="TEXT", help=hardware)
    add("--max-num-seqs", type=arguments.count, default=256, metavar="N")
    budget = "max_num_batched_tokens of the server [8192, vLLM's default on an H100]"
    add("--token-budget", type=arguments.count, default=8192, metavar="N", help=budget)
    add("--trace", type=Path, default=_TRACE, metavar="FILE")
    add("--requests", type=arguments.count, default=300, metavar="N", help="of each run [300]")
    speeds, runs = [1.0, 1.6], "a run for each speed of the trace [1 1.6]"
    add("--speed", type=above_zero, nargs="+", default=speeds, metavar="X", help=runs)
    by, names = "divide lengths of prompts by P, of answers by A [1 1]", ("P", "A")
    add("--shrink", type=arguments.count, nargs=2, default=[1, 1], metavar=names, help=by)
    args = parser.parse_args(argv)
    if args.server and (args.recording == RECORDED or not args.hardware):
        parser.error("a new recording needs its file and its hardware: --recording, --hardware")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        arguments.check_outputs(args)
        if args.server:
            write_recording(asyncio.run(record(args)), args.recording)
        recorded = read_recording(args.recording)
    except (ScrapeError, RuntimeError, OSError, ValueError) as error:
        print(f"fit: {error}", file=sys.stderr)
        return 1
    fitted = fit(recorded)
    _print(recorded, fitted)
    runs = [run.to_json() for run in fitted]
    arguments.keep(args, {"about": recorded.about, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
