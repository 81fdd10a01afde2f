"""``extproc simulate``: a simulated vLLM replica."""

import argparse
import logging
from collections.abc import Callable
from dataclasses import asdict, fields

import uvloop

from extproc.cli.arguments import CommandError, UsageError, above_zero, probability, whole
from extproc.ground.address import join_address
from extproc.ground.runtime import until_signalled
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import serving
from extproc.predict.step import PROFILES

logger = logging.getLogger(__name__)

_COUNT, _WHOLE = whole(1), whole(0)
_PORT = whole(0, 65535)
_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {  # options: type, meaning
    "speed": (above_zero, "times as fast as the profile (default: %(default)s)"),
    "kv-tokens": (_COUNT, "KV cache, in tokens (default: the profile's)"),
    "max-num-seqs": (_COUNT, "most sequences in a step (default: the profile's)"),
    "max-model-len": (_COUNT, "context length, in tokens"),
    "max-num-queued-reqs": (_WHOLE, "requests that may run or wait; the rest get 503"),
    "max-num-queued-tokens": (_WHOLE, "prompt tokens that may wait; further requests get 503"),
    "block-size": (_COUNT, "tokens in a KV block (default: %(default)s)"),
    "output-median": (_COUNT, "median output length, in tokens (default: %(default)s)"),
    "seed": (int, "seed of output lengths and drafts"),
    "draft-tokens": (_COUNT, "decode speculatively: tokens drafted for a sequence in each step"),
    "acceptance": (
        probability,
        "probability that a drafted token is accepted, 0 to 1 (default: %(default)s)",
    ),
    "max-loras": (_COUNT, "most adapters in a batch (default: %(default)s)"),
    "cold-steps": (_WHOLE, "number of first steps that take twice as long, as if kernels compiled"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_PORT, default=8000, help="port to listen on; 0 picks a free one")
    add("--model", help="name of the model")
    profiles = f"hardware to simulate: {', '.join(PROFILES)}"
    add("--profile", choices=PROFILES, metavar="PROFILE", help=profiles)
    for name, (kind, text) in _NUMBERS.items():
        add(f"--{name}", type=kind, metavar="N", help=text)
    load = "time to load an adapter (default: %(default)s)"
    add("--lora-load-seconds", dest="adapter_load_s", type=above_zero, metavar="N", help=load)
    order = "order of requests, as in vLLM (default: %(default)s)"
    add("--scheduling-policy", choices=("fcfs", "priority"), help=order)
    adapters = "LoRA adapters of the model"
    add("--lora-modules", dest="adapters", nargs="+", metavar="NAME", help=adapters)
    off = "compute every prompt in full"
    add("--no-enable-prefix-caching", dest="prefix_caching", action="store_false", help=off)
    details = "report cached prompt tokens in the usage, as vLLM does"
    add("--enable-prompt-tokens-details", action="store_true", help=details)
    old = "count cached prompt tokens as vLLM up to 0.15 does: as prefix cache hits only"
    add("--old-counters", action="store_true", help=old)
    events = "publish KV cache events over ZMQ, as vLLM does with --kv-events-config"
    add("--kv-events-ports", type=_PORT, nargs=2, metavar=("PORT", "REPLAY_PORT"), help=events)
    parser.set_defaults(**asdict(ReplicaSettings()))


def run(args: argparse.Namespace) -> int:
    given = {field.name: getattr(args, field.name) for field in fields(ReplicaSettings)}
    try:
        replica = Replica(ReplicaSettings(**given))
    except ValueError as error:
        raise UsageError(error) from None
    try:
        uvloop.run(until_signalled(_serve(replica, args.host, args.port)))
    except OSError as error:
        address = join_address(args.host, args.port)
        raise CommandError(f"cannot listen on {address}: {error}") from None
    except ExceptionGroup as group:
        logger.critical("engine failed: the replica exits", exc_info=group)
        return CommandError.status
    return 0


async def _serve(replica: Replica, host: str, port: int) -> None:
    async with serving(replica, host, port) as (bound_port, engine):
        print(f"replica ready on http://{join_address(host, bound_port)}", flush=True)
        await engine
