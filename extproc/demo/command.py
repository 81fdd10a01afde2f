"""``extproc demo``."""

import argparse
import sys
from pathlib import Path

_REQUESTS = 200
_RATE = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "--once",
        action="store_true",
        help="send the requests under the default policy and again under round_robin, "
        "compare, and exit",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --once: write the figures")
    parser.add_argument(
        "--requests", type=_positive, default=_REQUESTS, help=f"with --once [{_REQUESTS}]"
    )
    parser.add_argument(
        "--rate", type=_rate, default=_RATE, help=f"with --once: per second, on average [{_RATE:g}]"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo until it is done, or until SIGINT or SIGTERM.

    Returns:
        The exit status: 1 where a process failed or, with ``--once``, a request did.
    """
    if args.json is not None and not args.once:
        print("extproc demo: --json needs --once", file=sys.stderr)
        return 2
    try:
        import uvloop

        from extproc.demo.app import demo
    except ModuleNotFoundError as error:
        print(
            f"extproc demo: {error.name} is not installed: pip install 'extproc[demo]'",
            file=sys.stderr,
        )
        return 1
    return uvloop.run(demo(args))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError("must be above 0, and 1000 at most")
    return value
