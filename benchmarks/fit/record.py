"""Makes a recording: runs a real vLLM server, and sends it slices of a trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks import trace
from benchmarks.about import about
from benchmarks.fit.calibrate import bursts
from benchmarks.fit.client import Client
from benchmarks.fit.recording import Recording
from benchmarks.fit.server import MODEL, read_limits, read_version, vllm_server
from benchmarks.trace import TracedRequest

_LONGEST_PROMPT, _LONGEST_OUTPUT = 3000, 1000
"""Tokens: together less than the context of the server."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send."""

    trace: Path
    requests: int
    """Of each run."""
    speeds: Sequence[float]
    """Of the trace, a run each; each run goes on in the trace where the last one ended."""
    shrink_prompts: int
    """What the prompts of the trace are divided by."""
    shrink_answers: int
    """The same for what is generated."""
    seed: int = 0
    """Of the prompts' tokens."""

    def __str__(self) -> str:
        prompts, answers = self.shrink_prompts, self.shrink_answers
        return f"{self.trace.name}, prompts ÷ {prompts}, answers ÷ {answers}"

    def runs(self) -> list[list[TracedRequest]]:
        """What each run sends; times are from its first request on.

        Raises:
            OSError: the trace cannot be read.
            ValueError: it is none, or too short.
        """
        slices = [
            trace.read([self.trace], speed, (number + 1) * self.requests)[number * self.requests :]
            for number, speed in enumerate(self.speeds)
        ]
        if len(slices[-1]) < self.requests:
            raise ValueError(f"{self.trace} has too few requests for {len(slices)} runs")
        if any(part[0].at == part[-1].at for part in slices):
            raise ValueError(f"{self.trace}: all requests of a run arrive at once; send more")
        return [[self._shrunk(one, part[0].at) for one in part] for part in slices]

    def _shrunk(self, request: TracedRequest, start: float) -> TracedRequest:
        return TracedRequest(
            at=request.at - start,
            prompt_tokens=min(
                max(request.prompt_tokens // self.shrink_prompts, 1), _LONGEST_PROMPT
            ),
            output_tokens=min(
                max(request.output_tokens // self.shrink_answers, 1), _LONGEST_OUTPUT
            ),
            max_tokens=None,
        )


async def record(model: Path, max_num_seqs: int, plan: Plan, log: Path) -> Recording:
    """Run vLLM with the model in a folder, and record what it does with the requests.

    Raises:
        ProcessError: vLLM could not be started; its output is in ``log``.
        ScrapeError: it has no counters.
        RuntimeError: a request failed.
        OSError, ValueError: the model or the trace cannot be read.
    """
    planned, here = plan.runs(), about("benchmarks.fit", [])
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    async with vllm_server(model, max_num_seqs, log) as server:
        origin = {
            "server": f"vLLM {await read_version(server)}, CPU backend, one core",
            "model": model.name,
            "machine": here["machine"],
            "date": here["date"],
            "requests": str(plan),
        }
        limits = await read_limits(server, max_num_seqs)
        client = Client(server, MODEL, vocabulary, Random(plan.seed))
        print("recording requests for the calibration", flush=True)
        calibration = await client.play_bursts("calibration", bursts())
        runs = []
        for requests in planned:
            seconds = requests[-1].at
            name = f"{len(requests) / seconds:.2f} requests/s"
            print(f"recording {len(requests)} requests, {name}, {seconds:.0f} s", flush=True)
            runs.append(await client.play(name, requests))
    return Recording(origin, limits, calibration, runs)
