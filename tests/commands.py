"""A command in this process, beside a server that it asks."""

import asyncio

import pytest

from extproc.cli import main


async def printed(
    capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0
) -> list[str]:
    """The lines that it prints, and it alone: on standard error where it fails."""
    assert await asyncio.to_thread(main, [*arguments]) == status
    output = capsys.readouterr()
    lines, silent = (output.err, output.out) if status else (output.out, output.err)
    assert silent == ""
    assert "\x1b" not in lines
    return lines.splitlines()
