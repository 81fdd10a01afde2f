"""Sends the requests of a trace to a server, each at its time, and measures the answers.

    python -m benchmarks.load --url http://127.0.0.1:8080 \\
        --trace benchmarks/traces/azure-2023-conv.jsonl.gz --speed 4 --duration 60

The server is a router, a gateway or a replica with OpenAI's API. The exit status is 0 if every
request was answered completely, 1 if requests failed, 2 if the run could not begin.
"""

import argparse
import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from secrets import token_hex
from time import process_time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks import arguments, trace
from benchmarks.arguments import about
from benchmarks.load.plan import (
    OBJECTIVE_HEADER,
    PATHS,
    URGENT,
    TargetError,
    ask_server,
    plan,
    with_urgent,
)
from benchmarks.load.summary import Effort, record, summary, table
from extproc.cli.arguments import above_zero, probability
from extproc.ground.clock import monotonic
from extproc.ground.runtime import allow_many_connections
from extproc.lab.harness.traffic import POLICY_HEADER, Client
from extproc.lab.replay.figures import progress

SENDING = "sending"  # printed before the first request
_EVERY_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        arguments.check_outputs(args)
        origin = about("benchmarks.load", argv)
        requests = trace.read(args.trace, args.speed, args.requests, args.skip, args.duration)
        result = uvloop.run(_run(args, requests, origin))
    except (OSError, ValueError, TargetError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nload: interrupted, no figures were written", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells count
    print(table(result["summary"]))
    arguments.keep(args, result)
    return 1 if result["summary"]["failed"] else 0


async def _run(
    args: argparse.Namespace, requests: Sequence[trace.TracedRequest], origin: dict[str, Any]
) -> dict[str, Any]:
    salt, run = str(args.seed), f"load-{token_hex(4)}"
    headers = {POLICY_HEADER: args.policy_header} if args.policy_header else {}
    allow_many_connections()
    target = await ask_server(args.url, args.endpoint, args.model, salt)
    target = replace(target, context=args.context or target.context)
    planned = plan(requests, target, args.stream_share, args.known_lengths, Random(args.seed))
    planned = with_urgent(planned, args.urgent, Random(f"{args.seed} urgent"))
    if not planned:
        raise ValueError(f"no request fits into the context of {target.context} tokens")
    gc.freeze()
    async with Client(args.url, args.timeout) as client:
        print(SENDING, flush=True)
        started, began = datetime.now(UTC), monotonic()
        sending = client.run(entry.request(target, salt, run, headers) for entry in planned)
        effort = await _watch(client, asyncio.ensure_future(sending), len(planned))
        took = monotonic() - began
    records = [record(*pair) for pair in zip(planned, client.answers.values(), strict=True)]
    return {
        "run": {
            "name": args.policy_header or "default",
            "url": args.url,
            "model": target.model,
            "trace": ",".join(map(str, args.trace)),
            "speed": args.speed,
            "from_s": args.skip,
            "stream_share": args.stream_share,
            "policy": args.policy_header,
            "known_lengths": args.known_lengths,
            "urgent": args.urgent,
            "seed": args.seed,
            "started": started.isoformat(timespec="milliseconds"),
            "duration_s": took,
            **origin,
        },
        "summary": summary(records, client, effort, took, len(requests) - len(planned)),
        "requests": records,
    }


async def _watch(client: Client, work: asyncio.Future[Any], planned: int) -> Effort:
    """Shows the progress until the work is done; returns the CPU time that the client used."""
    show = progress("load")
    begun_cpu = last_cpu = process_time()
    last, busiest = monotonic(), 0.0
    while not work.done():
        await asyncio.wait({work}, timeout=_EVERY_S)
        now, cpu = monotonic(), process_time()
        if now - last > _EVERY_S / 2 or not busiest:  # a short interval says little
            busiest = max(busiest, (cpu - last_cpu) / max(now - last, 1e-9))
        last, last_cpu = now, cpu
        counts = f"{client.in_flight} in flight, {client.failed} failed"
        show(client.ended / planned, f"{len(client.answers)} of {planned} sent, {counts}")
    work.result()
    return Effort(last_cpu - begun_cpu, busiest)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "%(prog)s --url URL --trace FILE[,FILE] [options]"
    parser = arguments.command("load", __doc__, usage=usage)
    add = parser.add_argument
    add("--url", type=_url, required=True, help="http://host:port, with or without /v1")
    add("--trace", type=arguments.paths, required=True, metavar="FILE[,FILE]")
    arguments.add_part(parser, "--from")
    share = "share of the requests that are streamed, 0 to 1 [1]"
    add("--stream-share", type=probability, default=1.0, metavar="F", help=share)
    add("--policy-header", metavar="P", help="policy to ask the router for")
    urgent = f"share of the requests with the header {OBJECTIVE_HEADER}: {URGENT} [0]"
    add("--urgent", type=probability, default=0.0, metavar="SHARE", help=urgent)
    add("--model", metavar="NAME", help="needed if the server has several models")
    both, some = list(PATHS), arguments.some_of(PATHS)
    add("--endpoint", type=some, default=both, metavar=",".join(both), help="[both]")
    context = "leave out requests of more than N tokens [context of the server]"
    add("--context", type=arguments.count, metavar="N", help=context)
    known = "ask for the trace's answer lengths (max_tokens, ignore_eos): for real vLLM servers"
    add("--known-lengths", action="store_true", help=known)
    add("--timeout", type=above_zero, default=300.0, metavar="S", help="longest answer [300]")
    drawn = "seed of the prompts' words and of the choice of streams and chats [0]"
    add("--seed", type=int, default=0, help=drawn)
    arguments.add_outputs(parser)
    return parser.parse_args(argv)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        sensible = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a port
        sensible = False
    if not sensible:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8080")
    return text.rstrip("/").removesuffix("/v1")


if __name__ == "__main__":
    sys.exit(main())
