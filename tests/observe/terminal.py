"""A command of the package on a terminal."""

import asyncio
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.waiting import PATIENCE_S, Changes


class Terminal:
    """A terminal of 24 lines, and the command that draws on it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.output = ""
        self._process = process
        self._changes = Changes()

    def read(self, data: bytes) -> None:
        self.output += data.decode(errors="replace")
        self._changes.note()

    async def shows(self, text: str, but_not: str = "\0") -> None:
        """Waits until the last complete screen contains ``text``, and lacks ``but_not``."""
        await self._changes.until(
            lambda: text in (screen := self._screen()) and but_not not in screen
        )

    def _screen(self) -> str:
        """Last screen that was drawn to its end."""
        *_, screen = ["", *self.output.replace("\x1b[K", "").split("\x1b[H")[1:]]
        return screen if screen.endswith("\x1b[J") else ""

    async def interrupt(self) -> int:
        """Sends SIGINT; returns the exit status."""
        self._process.send_signal(signal.SIGINT)
        return await asyncio.wait_for(self._process.wait(), PATIENCE_S)


@asynccontextmanager
async def on_terminal(*arguments: str) -> AsyncIterator[Terminal]:
    """Runs ``extproc ARGUMENTS`` on a terminal; kills a command that still runs at the end."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    # The command ends on SIGINT even if pytest is a background job, which ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", *arguments, stdin=slave, stdout=slave, stderr=slave
    )
    signal.signal(signal.SIGINT, before)
    terminal, loop = Terminal(process), asyncio.get_running_loop()
    loop.add_reader(master, lambda: terminal.read(os.read(master, 65536)))
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        loop.remove_reader(master)
        os.close(master)
        os.close(slave)
