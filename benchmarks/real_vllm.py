"""Compares predicted with actual times on real vLLM servers, through a real Envoy.

    python -m benchmarks.real_vllm 127.0.0.1:8101 127.0.0.1:8102 --model NAME

The command runs Redis, poller, router and Envoy beside the servers. The router starts from the
hardware profile of another GPU, and learns from the /metrics of the servers.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from benchmarks import arguments
from benchmarks.fit.replay import described
from benchmarks.summary import rank_correlation
from extproc.cli.arguments import above_zero, probability, whole
from extproc.ground.text import Column, table
from extproc.lab.harness.pages import decisions, get_json
from extproc.lab.harness.processes import ProcessError
from extproc.lab.harness.samples import Lengths, Sample, SampleKind, samples
from extproc.lab.harness.stack import SimulatedReplica, Stack
from extproc.lab.harness.traffic import Answer, send_all
from extproc.lab.replay.figures import distribution
from extproc.predict.step import DEFAULT_PROFILE, PROFILES, StepModel
from extproc.route.policies import POLICIES

_PROMPT = Lengths(80, 1.0, 8, 1000)
_KNOWN_SHARE = 0.5
_OUTPUT_MEDIAN = 80
_LOOSE_BOUND = 13  # bound of an answer of unknown length ÷ the median length

Row = Mapping[str, Any]  # predicted and actual times of a request, in seconds
Accuracy = dict[str, float]  # errors of predictions, relative to the actual times


def requests(
    model: str,
    rate: float,
    random: Random,
    output_median: int = _OUTPUT_MEDIAN,
    known_share: float = _KNOWN_SHARE,
) -> Iterator[Sample]:
    """Endless Poisson process of requests with short prompts, ``rate`` a second.

    Requests of the kind ``known`` generate exactly their bound. The model ends the answers of the
    kind ``unknown``.
    """
    shortest, longest = max(round(0.1 * output_median), 1), 5 * output_median
    output, loose = Lengths(output_median, 0.7, shortest, longest), [_LOOSE_BOUND * output_median]
    known = SampleKind("known", known_share, _PROMPT, output, loose, 0.0, known=True)
    unknown = SampleKind("unknown", 1.0 - known_share, _PROMPT, output, loose, 0.0)
    return samples(model, rate, random, [known, unknown])


def join(
    sent: Iterable[Sample], answered: Iterable[Answer], records: Iterable[Row]
) -> list[dict[str, Any]]:
    """Predicted and actual times of each request that was decided and completely answered."""
    decided = {record["request_id"]: record for record in records}
    predicted = ("predicted_ttft_s", "predicted_completion_s")
    copied = ("prompt_tokens", "expected_output_tokens", *predicted)
    return [
        {
            "request_id": answer.request_id,
            "replica": record["replica_name"],
            "known": sample.kind == "known",
            **{key: record[key] for key in copied},
            "ttft_s": answer.ttft_s,
            "completion_s": answer.completion_s,
        }
        for sample, answer in zip(sent, answered, strict=True)
        if answer.ok and (record := decided.get(answer.request_id)) is not None
    ]


def accuracy(predicted: Sequence[float], actual: Sequence[float]) -> Accuracy | None:
    """Relative errors of predicted times; None for fewer than two. If the bias is positive, the
    predictions were too long."""
    if len(actual) < 2:
        return None
    signed = np.array(predicted) / np.array(actual) - 1.0
    median, p90 = np.percentile(np.abs(signed), (50, 90))
    return {
        "requests": len(actual),
        "median_error": float(median),
        "p90_error": float(p90),
        "median_bias": float(np.median(signed)),
        "rank_correlation": rank_correlation(predicted, actual),
    }


def measures(served: Sequence[Row]) -> dict[str, Accuracy | None]:
    """Accuracy of the completion, of TTFT, and of the time from the first to the last token."""
    streamed = [row for row in served if row["ttft_s"] is not None]

    def accuracy_of(rows: Sequence[Row], key: str) -> Accuracy | None:
        return accuracy([row[f"predicted_{key}"] for row in rows], [row[key] for row in rows])

    return {
        "completion": accuracy_of(served, "completion_s"),
        "ttft": accuracy_of(streamed, "ttft_s"),
        "decode": accuracy(
            [row["predicted_completion_s"] - row["predicted_ttft_s"] for row in streamed],
            [row["completion_s"] - row["ttft_s"] for row in streamed],
        ),
    }


def groups(served: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by group: all; of known and of unknown length, in total and for each replica."""
    found: dict[str, list[Row]] = {"all": list(served)}
    for row in served:
        length = "known length" if row["known"] else "unknown length"
        for name in (length, f"{row['replica']}, {length}"):
            found.setdefault(name, []).append(row)
    return dict(sorted(found.items(), key=lambda item: ("," in item[0], item[0])))


async def measure(stack: Stack, policy: str, name: str, sent: Sequence[Sample]) -> dict[str, Any]:
    """Sends the requests under a policy; returns figures and every request."""
    load_before = os.getloadavg()[0]
    newest = await get_json(f"{stack.router_admin}/decisions")
    answered = await send_all(stack.url, sent, name, policy)
    records = await decisions(stack.router_admin, newest[-1]["number"] if newest else 0)
    fleet = await get_json(f"{stack.router_admin}/fleet")
    served = join(sent, answered, records)
    return {
        "policy": policy,
        "sent": len(sent),
        "load_average": (load_before, os.getloadavg()[0]),
        "learned": {replica["name"]: replica["learned"] for replica in fleet["replicas"]},
        "accuracy": {group: measures(members) for group, members in groups(served).items()},
        "served": served,
    }


async def _compare(args: argparse.Namespace, logs: Path) -> list[dict[str, Any]]:
    """Runs a warm-up, then the same requests under each policy."""

    def drawn(seed: int, count: int) -> list[Sample]:
        random = Random(seed)
        endless = requests(args.model, args.rate, random, args.output_median, args.known_share)
        return list(islice(endless, count))

    warm_up, sent = drawn(args.seed, args.warm_up), drawn(args.seed + 1, args.requests)
    plan = [("warm-up", args.policy[0], warm_up)] if warm_up else []
    plan += [(policy, policy, sent) for policy in args.policy]
    runs = []
    servers = arguments.servers_by_name(args.servers)
    replicas = [
        SimulatedReplica(name, args.profile, address=address) for name, address in servers.items()
    ]
    async with Stack(logs, replicas) as stack:
        for name, policy, planned in plan:
            runs.append(await measure(stack, policy, name, planned))
            _print(name, runs[-1])
    return runs


def _print(name: str, run: Mapping[str, Any]) -> None:
    load = " → ".join(f"{average:.1f}" for average in run["load_average"])
    answered = f"{len(run['served'])} of {run['sent']} requests routed and answered"
    print(f"\n{name}: {answered}, load average {load}")
    if times := distribution([row["completion_s"] for row in run["served"]]):
        print("completion " + ", ".join(f"{key} {times[key]:.2f} s" for key in times))
    first = [Column("predicted against actual", left=True), Column("", left=True)]
    rows = []
    for group, kinds in run["accuracy"].items():
        for kind, found in kinds.items():
            if found is not None:
                errors = f"{found['median_error']:.1%}", f"{found['p90_error']:.1%}"
                more = f"{found['median_bias']:+.1%}", f"{found['rank_correlation']:.2f}"
                rows.append([group, kind, str(found["requests"]), *errors, *more])
    print(*table([*first, *map(Column, ("n", "median", "p90", "bias", "rank"))], rows), sep="\n")
    for replica, learned in run["learned"].items():
        model = TypeAdapter(StepModel | None).validate_python(learned)
        print(f"{replica} learned: {described(model) if model else 'nothing yet'}", flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("real_vllm", __doc__)
    add = parser.add_argument
    add("servers", nargs="+", type=arguments.address, metavar="IP:PORT")
    add("--model", default=arguments.MODEL, help="name of the model on the servers")
    add("--requests", type=arguments.count, default=300, metavar="N")
    uncounted = "requests that are sent first and not counted"
    add("--warm-up", type=whole(0), default=60, metavar="N", help=uncounted)
    add("--rate", type=above_zero, default=1.0, metavar="X", help="requests a second [1]")
    tokens = f"median tokens of an answer [{_OUTPUT_MEDIAN}]"
    add("--output-median", type=arguments.count, default=_OUTPUT_MEDIAN, metavar="N", help=tokens)
    known = f"share of requests that generate exactly their bound [{_KNOWN_SHARE}]"
    add("--known-share", type=probability, default=_KNOWN_SHARE, metavar="X", help=known)
    add("--policy", type=arguments.some_of(POLICIES), default=["completion"], metavar="a,b,c")
    add("--profile", choices=PROFILES, default=DEFAULT_PROFILE, metavar="NAME")
    add("--seed", type=int, default=0)
    arguments.add_json(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    logs = Path(tempfile.mkdtemp(prefix="extproc-real-vllm-"))
    try:
        arguments.check_outputs(args)
        runs = asyncio.run(_compare(args, logs))
    except (ProcessError, OSError) as error:
        print(f"real_vllm: {error}\nlogs: {logs}", file=sys.stderr)
        return 1
    shutil.rmtree(logs, ignore_errors=True)
    arguments.keep(args, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
