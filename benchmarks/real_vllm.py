"""Predicted against actual on real vLLM servers, through a real Envoy.

Servers that run already:

    python -m benchmarks.real_vllm 127.0.0.1:8101 127.0.0.1:8102 --model NAME

Or servers it starts itself, one core each (needs `vllm`, with its CPU backend, on PATH):

    python -m benchmarks.real_vllm --serve DIR,DIR --max-num-seqs 16,8 \\
        --options '' --options '--speculative-config {"method":"ngram","num_speculative_tokens":4}'

Redis, poller, router and Envoy are started beside them, and stopped at the end. The router starts
from a hardware profile that is not theirs; what it knows of them it learns from their /metrics.
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from math import log
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
from pydantic import BaseModel, TypeAdapter

from benchmarks import arguments
from benchmarks.attached import Attached
from extproc.address import split_address
from extproc.demo.ports import pick_ports
from extproc.demo.processes import Process, ProcessError, answers
from extproc.demo.samples import Sample
from extproc.demo.stack import Stack
from extproc.demo.traffic import Answer, send_all
from extproc.predict.hardware import DEFAULT_PROFILE, PROFILES
from extproc.predict.step import StepModel
from extproc.route.policies import POLICIES

_SERVED_NAME = "model"
_MAX_MODEL_LEN = 4096
_KV_BLOCKS = 256
"""Of 128 tokens on a CPU: room for a full batch."""
_START_S = 300.0
_STOP_S = 30.0

_CHAT_SHARE = 0.5
_STREAMED_SHARE = 0.5
_KNOWN_SHARE = 0.5
_PROMPT = (80, 1.0, 8, 1000)
"""Log-normal words: median, spread, least, most."""
_OUTPUT = (0.7, 0.1, 5.0)
"""Log-normal tokens: spread, and least and most as a multiple of the median."""
_OUTPUT_MEDIAN = 80
_LOOSE_BOUND = 13
"""The bound of an unknown length, as a multiple of the median."""
_WORDS = "about after before could every first found great house large might never other people"


# -- requests -------------------------------------------------------------------------------


def requests(
    model: str,
    rate: float,
    random: Random,
    output_median: int = _OUTPUT_MEDIAN,
    known_share: float = _KNOWN_SHARE,
) -> Iterator[Sample]:
    """Mixed requests without end, `rate` a second on average, arriving independently.

    Their kind is `known` where they generate exactly their bound, else `unknown`: these end when
    the model ends them.
    """
    at = 0.0
    while True:
        yield _request(model, at, random, output_median, known_share)
        at += random.expovariate(rate)


def _request(
    model: str, at: float, random: Random, output_median: int, known_share: float
) -> Sample:
    chat = random.random() < _CHAT_SHARE
    known = random.random() < known_share
    spread, least, most = _OUTPUT
    shortest, longest = round(least * output_median), round(most * output_median)
    output = _length((output_median, spread, max(shortest, 1), longest), random)
    body = {
        "model": model,
        "stream": random.random() < _STREAMED_SHARE,
        "max_tokens": output if known else _LOOSE_BOUND * output_median,
        "ignore_eos": known,
    }
    prompt = " ".join(random.choices(_WORDS.split(), k=_length(_PROMPT, random)))
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Sample(at, "known" if known else "unknown", output, path, body, prompt)


def _length(distribution: tuple[float, float, int, int], random: Random) -> int:
    median, spread, least, most = distribution
    return min(max(round(random.lognormvariate(log(median), spread)), least), most)


# -- servers --------------------------------------------------------------------------------


@asynccontextmanager
async def vllm_servers(
    models: Sequence[Path],
    max_num_seqs: Sequence[int],
    directory: Path,
    options: Sequence[Sequence[str]] = (),
) -> AsyncIterator[dict[str, str]]:
    """Runs a vLLM server for each model, each on a core of its own; yields name → `ip:port`.

    `options`: further ones of each server, where there are any.

    Raises:
        ProcessError: one could not be started, or did not get ready.
    """
    names = [f"vllm-{number}" for number in range(1, len(models) + 1)]
    ports = pick_ports(dict.fromkeys(names, 0))
    async with AsyncExitStack() as running:

        async def start(core: int, name: str) -> None:
            argv, env = vllm_command(models[core], ports[name], core, max_num_seqs[core])
            argv += options[core] if options else ()
            ready = answers(f"http://127.0.0.1:{ports[name]}/health")
            log_file = directory / f"{name}.log"
            process = await Process.start(
                name, argv, log=log_file, ready=ready, ready_s=_START_S, env=env
            )
            running.push_async_callback(process.stop, _STOP_S)

        try:
            async with asyncio.TaskGroup() as tasks:
                for core, name in enumerate(names):
                    tasks.create_task(start(core, name))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one reason is enough
        yield {name: f"127.0.0.1:{ports[name]}" for name in names}


def vllm_command(
    model: Path, port: int, core: int, max_num_seqs: int
) -> tuple[list[str], dict[str, str]]:
    """The command of one server, and what it needs in its environment."""
    options = {
        "served-model-name": _SERVED_NAME,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": _MAX_MODEL_LEN,
        "max-num-seqs": max_num_seqs,
        "num-gpu-blocks-override": _KV_BLOCKS,
        "dtype": "float32",  # bfloat16 is 30 times slower where the processor has none
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    return ["vllm", "serve", str(model), *flags, "--enforce-eager"], env


# -- what came of them ----------------------------------------------------------------------


class Record(BaseModel):
    """What is read of a decision record."""

    number: int
    request_id: str
    replica_name: str
    prompt_tokens: int
    expected_output_tokens: float
    predicted_ttft_s: float
    predicted_completion_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """One request: what the router predicted, and what its client saw."""

    request_id: str
    replica: str
    known: bool
    """Whether its bound said how long the answer would be."""
    prompt_tokens: int
    expected_output_tokens: float
    predicted_ttft_s: float
    ttft_s: float | None
    """None where the answer was not streamed."""
    predicted_completion_s: float
    completion_s: float


def join(
    sent: Iterable[Sample], answered: Iterable[Answer], records: Iterable[Record]
) -> list[Served]:
    """Every request that was routed and answered whole."""
    decided = {record.request_id: record for record in records}
    return [
        Served(
            request_id=answer.request_id,
            replica=record.replica_name,
            known=sample.kind == "known",
            prompt_tokens=record.prompt_tokens,
            expected_output_tokens=record.expected_output_tokens,
            predicted_ttft_s=record.predicted_ttft_s,
            ttft_s=answer.ttft_s,
            predicted_completion_s=record.predicted_completion_s,
            completion_s=answer.completion_s,
        )
        for sample, answer in zip(sent, answered, strict=True)
        if answer.ok and (record := decided.get(answer.request_id)) is not None
    ]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How near predictions came; errors are relative to what happened."""

    requests: int
    median_error: float
    p90_error: float
    median_bias: float
    """Above zero: predicted longer than it took."""
    rank_correlation: float
    """Spearman's."""


def accuracy(predicted: Sequence[float], actual: Sequence[float]) -> Accuracy | None:
    """None of fewer than two predictions."""
    if len(actual) < 2:
        return None
    signed = np.array(predicted) / np.array(actual) - 1.0
    median, p90 = np.percentile(np.abs(signed), (50, 90))
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, actual)]
    return Accuracy(
        requests=len(actual),
        median_error=float(median),
        p90_error=float(p90),
        median_bias=float(np.median(signed)),
        rank_correlation=float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
    )


def measures(served: Sequence[Served]) -> dict[str, Accuracy | None]:
    """Accuracy of the completion, the first token, and the time from it to the last."""
    streamed = [(one, one.ttft_s) for one in served if one.ttft_s is not None]
    return {
        "completion": accuracy(
            [one.predicted_completion_s for one in served], [one.completion_s for one in served]
        ),
        "ttft": accuracy(
            [one.predicted_ttft_s for one, _ in streamed], [ttft for _, ttft in streamed]
        ),
        "decode": accuracy(
            [one.predicted_completion_s - one.predicted_ttft_s for one, _ in streamed],
            [one.completion_s - ttft for one, ttft in streamed],
        ),
    }


def groups(served: Sequence[Served]) -> dict[str, list[Served]]:
    """All of them, those of known and of unknown length, and each of these by replica."""
    found: dict[str, list[Served]] = {"all": list(served)}
    for one in served:
        length = "known length" if one.known else "unknown length"
        for name in (length, f"{one.replica}, {length}"):
            found.setdefault(name, []).append(one)
    return dict(sorted(found.items(), key=lambda item: ("," in item[0], item[0])))


@dataclass(frozen=True, slots=True)
class Run:
    """The requests under one policy."""

    policy: str
    sent: int
    served: list[Served]
    learned: dict[str, StepModel | None]
    """Step times of each replica as the poller had learned them at the end."""
    load: tuple[float, float]
    """The machine's load average over a minute, before and after."""

    def to_json(self) -> dict[str, Any]:
        """The figures, and every request."""
        accuracies = {name: measures(members) for name, members in groups(self.served).items()}
        return {
            "policy": self.policy,
            "sent": self.sent,
            "load_average": self.load,
            "learned": {name: model and asdict(model) for name, model in self.learned.items()},
            "accuracy": {
                group: {name: value and asdict(value) for name, value in values.items()}
                for group, values in accuracies.items()
            },
            "served": [asdict(one) for one in self.served],
        }


# -- running --------------------------------------------------------------------------------


async def measure(
    stack: Stack, session: aiohttp.ClientSession, policy: str, name: str, sent: Sequence[Sample]
) -> Run:
    """Sends the requests under a policy and reads what was predicted."""
    before = os.getloadavg()[0]
    newest = await _get(session, f"{stack.router_admin}/decisions")
    answered = await send_all(stack.url, sent, name, policy)
    records = await _decisions(session, stack, newest[-1]["number"] if newest else 0)
    fleet = await _get(session, f"{stack.router_admin}/fleet")
    learned = TypeAdapter(StepModel | None)
    models = {one["name"]: learned.validate_python(one["learned"]) for one in fleet["replicas"]}
    served = join(sent, answered, records)
    return Run(policy, len(sent), served, models, (before, os.getloadavg()[0]))


async def _decisions(session: aiohttp.ClientSession, stack: Stack, after: int) -> list[Record]:
    page = TypeAdapter(list[Record])
    records: list[Record] = []
    while True:
        last = records[-1].number if records else after
        new = page.validate_python(
            await _get(session, f"{stack.router_admin}/decisions?after={last}")
        )
        if not new:
            return records
        records += new


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def _compare(args: argparse.Namespace, servers: Mapping[str, str], logs: Path) -> list[Run]:
    """A warm-up, then the same requests under each policy."""

    def mixed(seed: int, count: int) -> list[Sample]:
        random = Random(seed)
        endless = requests(args.model, args.rate, random, args.output_median, args.known_share)
        return list(islice(endless, count))

    warm_up, sent = mixed(args.seed, args.warm_up), mixed(args.seed + 1, args.requests)
    plan = [("warm-up", args.policy[0], warm_up)] if warm_up else []
    plan += [(policy, policy, sent) for policy in args.policy]
    runs = []
    async with (
        Attached(logs, servers, dict.fromkeys(servers, args.profile)) as stack,
        aiohttp.ClientSession() as session,
    ):
        for name, policy, these in plan:
            runs.append(await measure(stack, session, policy, name, these))
            _print(name, runs[-1])
    return runs


async def _run(args: argparse.Namespace, logs: Path) -> list[Run]:
    if args.servers:
        names = {f"vllm-{number}": address for number, address in enumerate(args.servers, 1)}
        return await _compare(args, names, logs)
    async with vllm_servers(args.serve, args.max_num_seqs, logs, args.options) as started:
        return await _compare(args, started, logs)


# -- the terminal ---------------------------------------------------------------------------


def _print(name: str, run: Run) -> None:
    completion = np.array([one.completion_s for one in run.served])
    print(f"\n{name}: {len(run.served)} of {run.sent} answered as routed, load average", end=" ")
    print(" → ".join(f"{load:.1f}" for load in run.load))
    if len(completion):
        p50, p99 = np.percentile(completion, (50, 99))
        print(f"completion mean {completion.mean():.2f} s, p50 {p50:.2f} s, p99 {p99:.2f} s")
    print(f"{'predicted against actual':30}{'':12}{'n':>6}{'median':>9}{'p90':>9}{'bias':>9}  rank")
    for group, members in groups(run.served).items():
        for measure_name, figures in measures(members).items():
            if figures is not None:
                print(
                    f"{group:30}{measure_name:12}{figures.requests:6}{figures.median_error:9.1%}"
                    f"{figures.p90_error:9.1%}{figures.median_bias:+9.1%}"
                    f"{figures.rank_correlation:6.2f}"
                )
    for replica, model in run.learned.items():
        print(f"{replica} learned: {_described(model)}", flush=True)


def _described(model: StepModel | None) -> str:
    if model is None:
        return "nothing yet"
    return (
        f"{model.c0 * 1e3:.2f} ms a step, {model.c_prefill * 1e6:.0f} µs a prompt token, "
        f"{model.c_batch * 1e6:.0f} µs a sequence, {model.c_kv * 1e6:.3f} µs a KV token"
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_vllm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("servers", nargs="*", type=_address, metavar="IP:PORT")
    parser.add_argument("--model", default=_SERVED_NAME, help="what the servers call it")
    parser.add_argument(
        "--serve", type=arguments.paths, default=[], metavar="DIR,DIR", help="models"
    )
    parser.add_argument("--max-num-seqs", type=arguments.counts, default=[16, 8], metavar="N,N")
    parser.add_argument(
        "--options",
        type=shlex.split,
        action="append",
        default=[],
        metavar="TEXT",
        help="further ones of `vllm serve`, given once for each model",
    )
    parser.add_argument("--requests", type=arguments.count, default=300, metavar="N")
    parser.add_argument(
        "--warm-up",
        type=arguments.number,
        default=60,
        metavar="N",
        help="requests sent before, not counted",
    )
    parser.add_argument(
        "--rate", type=arguments.positive, default=1.0, metavar="X", help="requests a second [1]"
    )
    parser.add_argument(
        "--output-median",
        type=arguments.count,
        default=_OUTPUT_MEDIAN,
        metavar="N",
        help=f"tokens of an answer [{_OUTPUT_MEDIAN}]",
    )
    parser.add_argument(
        "--known-share",
        type=arguments.share,
        default=_KNOWN_SHARE,
        metavar="X",
        help=f"of requests that generate exactly their bound [{_KNOWN_SHARE}]",
    )
    parser.add_argument("--policy", type=_policies, default=["completion"], metavar="a,b,c")
    parser.add_argument("--profile", choices=PROFILES, default=DEFAULT_PROFILE, metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if bool(args.servers) == bool(args.serve):
        parser.error("give either the addresses of servers, or --serve")
    if args.serve and len(args.serve) != len(args.max_num_seqs):
        parser.error("--max-num-seqs needs a number for each model of --serve")
    if args.options and len(args.options) != len(args.serve):
        parser.error("--options is given once for each model of --serve, or not at all")
    if args.serve and args.model != _SERVED_NAME:
        parser.error("--model is for servers that run already")
    return args


def _address(text: str) -> str:
    address = text.removeprefix("http://").rstrip("/")
    try:
        split_address(address)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return address


def _policies(text: str) -> list[str]:
    return arguments.among(text, list(POLICIES))


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    logs = Path(tempfile.mkdtemp(prefix="extproc-real-vllm-"))
    try:
        if args.json:
            args.json.open("a").close()  # now, not after minutes
        runs = asyncio.run(_run(args, logs))
    except (ProcessError, OSError) as error:
        print(f"real_vllm: {error}\nlogs: {logs}", file=sys.stderr)
        return 1
    shutil.rmtree(logs, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps([run.to_json() for run in runs], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
