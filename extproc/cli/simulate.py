"""``extproc simulate``: a simulated vLLM replica."""

import argparse
import logging
from collections.abc import Callable
from dataclasses import fields

import uvloop

from extproc.cli.arguments import CommandError, UsageError, above_zero, probability, whole
from extproc.ground.address import join_address
from extproc.ground.runtime import until_signalled
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import start
from extproc.predict.step import PROFILES

logger = logging.getLogger(__name__)

_COUNT = whole(1)
_PORT = whole(0, 65535)
_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "speed": (above_zero, "times as fast as the profile"),
    "kv-tokens": (_COUNT, "KV cache, in tokens (default: the profile's)"),
    "max-num-seqs": (_COUNT, "sequences in a step (default: the profile's)"),
    "max-model-len": (_COUNT, "context length, in tokens"),
    "block-size": (_COUNT, "tokens in a KV block"),
    "output-median": (_COUNT, "median output length, in tokens"),
    "seed": (int, "of output lengths and drafts"),
    "draft-tokens": (_COUNT, "decode speculatively: tokens drafted for a sequence in each step"),
    "acceptance": (probability, "probability that a drafted token is accepted, 0 to 1"),
    "max-loras": (_COUNT, "adapters in a batch"),
    "lora-load-seconds": (above_zero, "what it takes to load an adapter"),
}
"""Options that are a number, by name: its type, and what it is."""
_FIELDS = {"lora-load-seconds": "adapter_load_s"}  # those whose setting is not called as they are


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command; vLLM's have its names."""
    default = ReplicaSettings()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=_PORT, default=8000, help="port to listen on; 0 picks a free one"
    )
    parser.add_argument("--model", default=default.model, help="model name it serves")
    parser.add_argument(
        "--profile",
        default=default.profile,
        choices=PROFILES,
        metavar="PROFILE",
        help=f"hardware it simulates: {', '.join(PROFILES)}",
    )
    for name, (kind, what) in _NUMBERS.items():
        field = _FIELDS.get(name, name.replace("-", "_"))
        value = getattr(default, field)
        shown = f" (default: {value})" if value else ""
        parser.add_argument(
            f"--{name}", type=kind, dest=field, default=value, metavar="N", help=what + shown
        )
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default=default.scheduling_policy,
        help=f"the order of requests, as vLLM's (default: {default.scheduling_policy})",
    )
    parser.add_argument(
        "--lora-modules",
        dest="adapters",
        nargs="+",
        default=(),
        metavar="NAME",
        help="LoRA adapters of the model",
    )
    parser.add_argument(
        "--no-enable-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="compute every prompt whole",
    )
    parser.add_argument(
        "--enable-prompt-tokens-details",
        action="store_true",
        help="report cached prompt tokens in the usage, as vLLM does with this flag",
    )
    parser.add_argument(
        "--kv-events-ports",
        type=_PORT,
        nargs=2,
        metavar=("PORT", "REPLAY_PORT"),
        help="tell of KV blocks over ZMQ, as vLLM does with --kv-events-config",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT."""
    settings = ReplicaSettings(
        **{one.name: getattr(args, one.name) for one in fields(ReplicaSettings)}
    )
    try:
        replica = Replica(settings)
    except ValueError as error:
        raise UsageError(error) from None
    try:
        uvloop.run(until_signalled(_serve(replica, args.host, args.port)))
    except ExceptionGroup as group:
        (failure,) = group.exceptions
        if isinstance(failure, OSError):
            address = join_address(args.host, args.port)
            raise CommandError(f"cannot listen on {address}: {failure}") from None
        logger.critical("the engine failed: the replica ends", exc_info=failure)
        return CommandError.status
    return 0


async def _serve(replica: Replica, host: str, port: int) -> None:
    serving = await start(replica, host, port)
    print(f"replica ready on http://{join_address(host, serving.port)}", flush=True)
    try:
        await serving.engine
    finally:
        await serving.runner.cleanup()
