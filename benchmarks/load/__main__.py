"""Sends the requests of a trace to a server, each at its time, and says what came of them.

    python -m benchmarks.load --url http://127.0.0.1:8080 \\
        --trace benchmarks/traces/azure-2023-conv.jsonl.gz --speed 4 --duration 60

The server is a router, a gateway or a replica with OpenAI's API. The exit status is 0 when every
request was answered whole, 1 when some failed, 2 when it could not begin.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks import arguments, report, trace
from benchmarks.about import about
from benchmarks.limits import allow_many_connections
from benchmarks.load.client import Client, Traffic, connections
from benchmarks.load.effort import watch
from benchmarks.load.plan import plan
from benchmarks.load.summary import summary, table
from benchmarks.load.target import PATHS, TargetError, ask
from benchmarks.progress import progress
from extproc.clock import monotonic
from extproc.demo.traffic import POLICY_HEADER


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _arguments(argv)
    try:
        if args.json:
            args.json.open("a").close()  # now, not after minutes
        if args.report:
            report.writable(args.report)
        origin = about("benchmarks.load", argv)
        requests = trace.read(args.trace, args.speed, args.requests, args.start, args.duration)
        result = uvloop.run(_run(args, requests, origin))
    except (OSError, ValueError, TargetError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nload: interrupted, nothing was kept", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells count
    print(table(result["summary"]))
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if args.report:
        print(report.write(result, args.report))
    return 1 if result["summary"]["failed"] else 0


async def _run(
    args: argparse.Namespace, requests: Sequence[trace.TracedRequest], origin: dict[str, Any]
) -> dict[str, Any]:
    """The result, as --json writes it."""
    salt = str(args.seed)
    headers = {POLICY_HEADER: args.policy_header} if args.policy_header else {}
    allow_many_connections()
    async with connections(args.timeout) as session:
        target = await ask(session, args.url, args.endpoint, args.model, salt)
        if args.context:
            target = replace(target, context=args.context)
        planned = plan(requests, target, args.stream_share, args.known_lengths, Random(args.seed))
        if not planned:
            raise ValueError(f"no request fits into the context of {target.context} tokens")
        client = Client(session, args.url, target, salt, token_hex(4), headers, monotonic)
        gc.freeze()
        started = datetime.now(UTC)
        shown = _shown(client.traffic, len(planned))
        effort = await watch(client.run(planned), shown, monotonic)
    traffic = client.traffic
    return {
        "run": {
            "name": args.policy_header or "default",
            "url": args.url,
            "model": target.model,
            "trace": ",".join(map(str, args.trace)),
            "speed": args.speed,
            "from_s": args.start,
            "stream_share": args.stream_share,
            "policy": args.policy_header,
            "known_lengths": args.known_lengths,
            "seed": args.seed,
            "started": started.isoformat(timespec="milliseconds"),
            "duration_s": traffic.ended_at_s,
            **origin,
        },
        "summary": summary(traffic, effort, len(requests) - len(planned)),
        "requests": [asdict(one) for one in traffic.sent],
    }


def _shown(traffic: Traffic, planned: int) -> Callable[[], None]:
    """Shows how far it has come, whenever it is called."""
    show = progress("load")
    return lambda: show(
        traffic.ended / planned,
        f"{len(traffic.sent)} of {planned} sent, {traffic.in_flight} in flight, "
        f"{traffic.failed} failed",
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        usage="%(prog)s --url URL --trace FILE[,FILE] [options]",
        description=__doc__,
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--url", type=_url, required=True, help="http://host:port, with or without /v1")
    add("--trace", type=arguments.paths, required=True, metavar="FILE[,FILE]")
    add(
        "--speed",
        type=arguments.positive,
        default=1.0,
        metavar="X",
        help="times as fast as the trace",
    )
    add(
        "--from",
        type=arguments.time,
        default=0.0,
        dest="start",
        metavar="S",
        help="leave out what arrives in the first S seconds; time counts from there",
    )
    add(
        "--duration",
        type=arguments.positive,
        default=inf,
        metavar="S",
        help="send what arrives in the first S seconds",
    )
    add("--requests", type=arguments.count, metavar="N", help="send the first N of the trace")
    add(
        "--stream-share",
        type=arguments.share,
        default=1.0,
        metavar="F",
        help="share of the requests that are streamed, 0 to 1 [1]",
    )
    add("--policy-header", metavar="P", help="ask the router for this policy")
    add("--model", metavar="NAME", help="where the server has several")
    add(
        "--endpoint",
        type=_endpoints,
        default=list(PATHS),
        metavar="chat,completions",
        help="one or both",
    )
    add(
        "--context",
        type=arguments.count,
        metavar="N",
        help="leave out what needs more than N tokens [as the server says]",
    )
    add(
        "--known-lengths",
        action="store_true",
        help="max_tokens is what the trace generated, with ignore_eos: for servers other than "
        "simulated replicas, which end an answer where they like",
    )
    add(
        "--timeout",
        type=arguments.positive,
        default=300.0,
        metavar="S",
        help="for a whole answer [300]",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the prompts' words, and which are streamed and which are chats [0]",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures and every request")
    add("--report", type=Path, metavar="DIR", help="write a page with pictures: needs matplotlib")
    return parser.parse_args(argv)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        sensible = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is none
        sensible = False
    arguments.require(sensible, text, "a URL such as http://127.0.0.1:8080")
    return text.rstrip("/").removesuffix("/v1")


def _endpoints(text: str) -> list[str]:
    return arguments.among(text, list(PATHS))


if __name__ == "__main__":
    sys.exit(main())
