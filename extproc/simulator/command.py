"""``extproc replica``: a simulated vLLM replica."""

import argparse
import asyncio
import logging
import signal
import sys

import uvloop

from extproc.address import join_address
from extproc.predict.hardware import PROFILES
from extproc.simulator.replica import Replica, ReplicaSettings
from extproc.simulator.server import start

logger = logging.getLogger(__name__)

_DEFAULT = ReplicaSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=_port, default=8000, help="port to listen on; 0 picks a free one"
    )
    parser.add_argument("--model", default=_DEFAULT.model, help="model name it serves")
    parser.add_argument(
        "--profile", default=_DEFAULT.profile, choices=PROFILES, help="hardware it simulates"
    )
    parser.add_argument(
        "--speed", type=_positive_float, default=1.0, help="times as fast as the profile"
    )
    parser.add_argument("--kv-tokens", type=_positive, help="KV cache, in tokens [profile's]")
    parser.add_argument("--max-num-seqs", type=_positive, help="sequences in a step [profile's]")
    parser.add_argument("--max-model-len", type=_positive, help="context length, in tokens")
    parser.add_argument(
        "--block-size", type=_positive, default=_DEFAULT.block_size, help="tokens in a KV block"
    )
    parser.add_argument(
        "--output-median",
        type=_positive,
        default=_DEFAULT.output_median,
        help="median output length, in tokens",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of output lengths and drafts")
    parser.add_argument(
        "--draft-tokens",
        type=_positive,
        default=_DEFAULT.draft_tokens,
        help="decode speculatively: tokens drafted for a sequence in each step",
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=_DEFAULT.acceptance,
        help="probability that a drafted token is accepted, 0 to 1",
    )
    parser.add_argument(
        "--lora-modules", nargs="+", default=[], metavar="NAME", help="LoRA adapters of the model"
    )
    parser.add_argument(
        "--max-loras", type=_positive, default=_DEFAULT.max_loras, help="adapters in a batch"
    )
    parser.add_argument(
        "--lora-load-seconds",
        type=_positive_float,
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
        type=_port,
        nargs=2,
        metavar=("PORT", "REPLAY_PORT"),
        help="tell of KV blocks over ZMQ, as vLLM does with --kv-events-config",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit status: 2 where the flags contradict each other, 1 where the address is taken or
        the engine fails.
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
        print(f"extproc replica: {error}", file=sys.stderr)
        return 2
    try:
        return uvloop.run(_serve(replica, args.host, args.port))
    except OSError as error:
        address = join_address(args.host, args.port)
        print(f"extproc replica: cannot listen on {address}: {error}", file=sys.stderr)
        return 1


async def _serve(replica: Replica, host: str, port: int) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    runner, port, engine = await start(replica, host, port)
    engine.add_done_callback(lambda _: stopping.set())
    print(f"replica ready on http://{join_address(host, port)}", flush=True)
    await stopping.wait()
    failure = engine.exception() if engine.done() else None
    if failure:
        logger.critical("the engine failed: the replica ends", exc_info=failure)
    await runner.cleanup()
    return 1 if failure else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be between 0 and 65535")
    return value
