"""``extproc top``: a router's fleet in the terminal, in place."""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

from extproc.cli.arguments import CommandError
from extproc.cli.configuration import add_file, configured
from extproc.config import AdminSettings
from extproc.ground.text import WIDTH
from extproc.observe.client import AskError, follow
from extproc.observe.dashboard.terminal import screen

_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another page of the terminal, without a cursor; and back."""
_HOME, _REST_OF_LINE, _REST_OF_PAGE = "\x1b[H", "\x1b[K", "\x1b[J"
_AGAIN_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--router", metavar="URL", help="admin address of the router (default: serve.admin)"
    )
    parser.add_argument(
        "--once", action="store_true", help="print it once, as where the output is no terminal"
    )
    parser.epilog = "q or Ctrl-C ends it."
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Shows it until q or Ctrl-C."""
    config = configured(args)
    live = not args.once and sys.stdout.isatty()
    try:
        asyncio.run((_live if live else _once)(args.router or config.serve.admin, config.admin))
    except (AskError, OSError, ValueError) as error:
        raise CommandError(*str(error).splitlines()) from None
    return 0


async def _once(router: str, access: AdminSettings) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    async with aclosing(follow(router, access)) as news:
        print("\n".join(screen(await anext(news), width)))


async def _live(router: str, access: AdminSettings) -> None:
    showing = asyncio.create_task(_show(router, access))
    with _keys(showing):
        await asyncio.wait({showing})
    if not showing.cancelled():
        showing.result()


async def _show(router: str, access: AdminSettings) -> None:
    """What was last seen stays there, below the reason, while the router does not answer."""
    lines: list[str] = []
    while True:
        try:
            async with aclosing(follow(router, access)) as news:
                async for one in news:
                    lines = screen(one, shutil.get_terminal_size().columns)
                    _draw(lines)
        except AskError as error:
            if not lines:
                raise
            _draw([f"! {error}"[: shutil.get_terminal_size().columns], *lines])
        await asyncio.sleep(_AGAIN_S)


def _draw(lines: list[str]) -> None:
    shown = lines[: shutil.get_terminal_size().lines]
    page = f"{_REST_OF_LINE}\n".join(shown)
    sys.stdout.write(f"{_HOME}{page}{_REST_OF_LINE}{_REST_OF_PAGE}")
    sys.stdout.flush()


@contextmanager
def _keys(showing: asyncio.Task[None]) -> Iterator[None]:
    """The terminal as it is needed, and afterwards as it was; q and signals end what is shown."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, showing.cancel)
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None

    def pressed() -> None:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            showing.cancel()

    sys.stdout.write(_BEGIN)
    try:
        if before:
            tty.setcbreak(sys.stdin)
            loop.add_reader(sys.stdin, pressed)
        yield
    finally:
        if before:
            loop.remove_reader(sys.stdin)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(_END)
        sys.stdout.flush()
