"""Demo run: starts the processes, sends requests, shows their routes, stops the processes."""

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random

from extproc.lab.demo.journal import Entry, Journal
from extproc.lab.demo.report import Report, Run
from extproc.lab.harness.processes import Process, ProcessError
from extproc.lab.harness.samples import samples
from extproc.lab.harness.stack import MODEL, USUAL_PORTS, Stack
from extproc.lab.harness.traffic import POLICY_HEADER, send_all

_SEED = 1
_OPENING_REQUESTS = 60
_OPENING_RATE = 6.0
_GENTLE_RATE = 1.0
_REFRESH_S = 0.25
_INTERRUPTED = 130  # exit status after Ctrl-C, as in shells: 128 + SIGINT
_PREDICTIONS_ERR = (
    "Predictions do not choose here, and may be far off: slow replicas fill up, and no prediction "
    "knows the requests that arrive later."
)
_print = partial(print, flush=True)


async def demo(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status; SIGINT or SIGTERM stops every process.

    Its files are in a new folder, which is deleted at the end, but kept after a failure.

    Raises:
        ProcessError: a program is missing, a process died, or a run of ``--once`` failed.
    """
    stop = asyncio.Event()  # an event, so that a second Ctrl-C does not interrupt the shutdown
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    directory = Path(tempfile.mkdtemp(prefix="extproc-demo-"))
    work = asyncio.create_task(_with_stack(args, directory))
    work.add_done_callback(lambda _: stop.set())
    await stop.wait()
    work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        _print("\nstopped")
    except BrokenPipeError:  # nobody reads the output any more
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except (ProcessError, OSError) as error:
        raise ProcessError(f"{error}\nlogs: {directory}") from None
    shutil.rmtree(directory, ignore_errors=True)
    return _INTERRUPTED if args.once and work.cancelled() else 0


async def _with_stack(args: argparse.Namespace, directory: Path) -> None:
    _print("Starting Redis, 4 simulated vLLM replicas, poller, router and Envoy …")
    async with Stack(directory, usual_ports=USUAL_PORTS) as stack:
        _print(f"Ready after {stack.ready_s:.1f} s: Envoy listens on {stack.url}")
        for name, port in USUAL_PORTS.items():
            if stack.ports[name] != port:
                _print(f"Port {port} is taken: {name} has {stack.ports[name]} instead.")
        journal = Journal(stack)
        if args.once:
            await _compare(args, stack, journal)
        else:
            await _show(stack, journal)


async def _show(stack: Stack, journal: Journal) -> None:
    random = Random(_SEED)
    async with _printed(stack, journal):
        opening = islice(samples(MODEL, _OPENING_RATE, random), _OPENING_REQUESTS)
        await send_all(stack.url, opening, "sample")
    _print(instructions(stack))
    async with _printed(stack, journal):
        for minute in count(1):
            gentle = islice(samples(MODEL, _GENTLE_RATE, random), int(60 * _GENTLE_RATE))
            await send_all(stack.url, gentle, f"gentle-{minute}")
            journal.entries.clear()  # or its memory would grow without end


async def _compare(args: argparse.Namespace, stack: Stack, journal: Journal) -> None:
    async def run(name: str, policy: str | None) -> Run:
        under = policy or "the default policy"
        _print(f"\n{args.requests} requests, {args.rate:g}/s, under {under}")
        if policy is not None:
            _print(_PREDICTIONS_ERR)
        requests = islice(samples(MODEL, args.rate, Random(_SEED)), args.requests)
        async with _printed(stack, journal):
            answers = await send_all(stack.url, requests, name, policy)
        entries = await journal.settle([answer.request_id for answer in answers])
        return Run(answers, entries, stack.names)

    report = Report(stack.ready_s, await run("default", None), await run("again", "round_robin"))
    _print(f"\n{report}")
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if report.failure:
        raise ProcessError(report.failure)


@asynccontextmanager
async def _printed(stack: Stack, journal: Journal) -> AsyncIterator[None]:
    """Prints a line for each request and each process that ends while the block runs."""

    async def step() -> None:
        ended = await journal.refresh()
        for process in stack.ended():
            _print(_exit_report(process, stack))
        for entry in ended:
            _print(_line(entry, stack))

    async def follow() -> None:
        while True:
            await step()
            await asyncio.sleep(_REFRESH_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follow())
            yield
            following.cancel()
            await asyncio.sleep(_REFRESH_S)  # Envoy writes its log with some delay
            await step()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _line(entry: Entry, stack: Stack) -> str:
    decision, access = entry.decision, entry.access
    replica = stack.name_of(access.upstream) or "-"
    predicted = decision.predicted_completion_s if decision else None
    times = "-" if predicted is None else f"{predicted:.2f} s", f"{access.duration_s:.2f} s"
    head = f"{access.request_id:<16} → {replica:<7} predicted {times[0]:>8}  actual {times[1]:>8}"
    return f"{head}  {entry.why}"


def _exit_report(process: Process, stack: Stack) -> str:
    event = f"{process.name} ended with status {process.returncode}"
    if process.name == "envoy":
        raise ProcessError(f"{event}; the end of {process.log}:\n{process.last_lines()}")
    if process.name == "router" and process.returncode in (-signal.SIGKILL, -signal.SIGTERM, 0):
        return f"{event}: Envoy's fallback serves. To restart the router: {stack.router_command}"
    return f"{event}; the end of {process.log}:\n{process.last_lines(5)}"


def instructions(stack: Stack) -> str:
    """Shell commands to try in another terminal, each with its purpose."""
    router = stack.address("router-admin")
    return f"""
To try in another terminal: a chat, a streamed chat, a chat routed by another policy:

{_chat(stack)}
{_chat(stack, stream=True)}
{_chat(stack, policy="round_robin")}

In a browser, {stack.router_admin}/ shows fleet, decisions and warnings, live. In a terminal:

  {stack.command("top", "--router", router)}

The last decisions with their reasons (add a request id to see all replicas compared for it):

  {stack.command("explain", "--router", router)}

The replicas as Redis has them; also to drain a replica and to undrain it:

  {stack.command("replicas", "list", "--config", stack.config_file)}

The same as JSON; the router's view of the fleet; Envoy's view:

  curl -s '{stack.router_admin}/decisions?after=0'
  curl -s {stack.router_admin}/fleet
  curl -s {stack.envoy_admin}/clusters

Kill the router: Envoy's fallback serves. Start it again: the router routes again:

  kill -9 {stack.process("router").pid}
  {stack.router_command}

Light traffic continues until Ctrl-C."""


def _chat(stack: Stack, stream: bool = False, policy: str = "") -> str:
    options = {"stream": True} if stream else {}
    body = {"model": MODEL, **options, "messages": [{"role": "user", "content": "Hello!"}]}
    words = [f"curl -sN {stack.url}/v1/chat/completions -H 'content-type: application/json'"]
    if policy:
        words.append(f"-H {shlex.quote(f'{POLICY_HEADER}: {policy}')}")
    words.append(f"-d {shlex.quote(json.dumps(body, separators=(',', ':')))}")
    return "  " + " \\\n    ".join(words)
