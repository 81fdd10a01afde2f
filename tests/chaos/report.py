"""Runs a chaos program in a folder of its own, and reports the problems that it returns."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path


def report(play: Callable[[Path], Awaitable[list[str]]]) -> int:
    """Print the folder of the logs and the problems; return the exit status."""

    async def run() -> list[str]:
        directory = Path(tempfile.mkdtemp(prefix="extproc-chaos-"))
        print(f"logs: {directory}")
        return await play(directory)

    problems = asyncio.run(run())
    for problem in problems:
        print(f"FAILED {problem}")
    return 1 if problems else 0
