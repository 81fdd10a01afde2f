"""``extproc simulate``: a simulated vLLM replica."""

import argparse
import logging

import uvloop

from extproc.address import join_address
from extproc.cli.arguments import above_zero, number, whole
from extproc.cli.errors import CommandError, UsageError
from extproc.predict.hardware import PROFILES
from extproc.signals import until_signalled
from extproc.simulator.replica import Replica, ReplicaSettings
from extproc.simulator.server import start

logger = logging.getLogger(__name__)

_DEFAULT = ReplicaSettings()
_COUNT = whole(1)
_PORT = whole(0, 65535)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=_PORT, default=8000, help="port to listen on; 0 picks a free one"
    )
    parser.add_argument("--model", default=_DEFAULT.model, help="model name it serves")
    parser.add_argument(
        "--profile", default=_DEFAULT.profile, choices=PROFILES, help="hardware it simulates"
    )
    parser.add_argument(
        "--speed", type=above_zero, default=1.0, help="times as fast as the profile"
    )
    parser.add_argument("--kv-tokens", type=_COUNT, help="KV cache, in tokens [profile's]")
    parser.add_argument("--max-num-seqs", type=_COUNT, help="sequences in a step [profile's]")
    parser.add_argument("--max-model-len", type=_COUNT, help="context length, in tokens")
    parser.add_argument(
        "--block-size", type=_COUNT, default=_DEFAULT.block_size, help="tokens in a KV block"
    )
    parser.add_argument(
        "--output-median",
        type=_COUNT,
        default=_DEFAULT.output_median,
        help="median output length, in tokens",
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, help="seed of output lengths and drafts"
    )
    parser.add_argument(
        "--draft-tokens",
        type=_COUNT,
        default=_DEFAULT.draft_tokens,
        help="decode speculatively: tokens drafted for a sequence in each step",
    )
    parser.add_argument(
        "--acceptance",
        type=number,
        default=_DEFAULT.acceptance,
        help="probability that a drafted token is accepted, 0 to 1",
    )
    parser.add_argument(
        "--lora-modules", nargs="+", default=[], metavar="NAME", help="LoRA adapters of the model"
    )
    parser.add_argument(
        "--max-loras", type=_COUNT, default=_DEFAULT.max_loras, help="adapters in a batch"
    )
    parser.add_argument(
        "--lora-load-seconds",
        type=above_zero,
        default=_DEFAULT.adapter_load_s,
        help="what it takes to load an adapter",
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
    """Serves until SIGTERM or SIGINT.

    Raises:
        CommandError: the address is taken, the engine failed, or the options contradict each other.
    """
    settings = ReplicaSettings(
        model=args.model,
        profile=args.profile,
        speed=args.speed,
        kv_tokens=args.kv_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        output_median=args.output_median,
        seed=args.seed,
        draft_tokens=args.draft_tokens,
        acceptance=args.acceptance,
        prefix_caching=args.prefix_caching,
        adapters=tuple(args.lora_modules),
        max_loras=args.max_loras,
        adapter_load_s=args.lora_load_seconds,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        kv_events_ports=args.kv_events_ports and tuple(args.kv_events_ports),
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
