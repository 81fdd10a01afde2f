"""The table of reasons in docs/operations/troubleshoot.md.

``python -m tests.fleet.test_reasons`` writes the table anew.
"""

from collections.abc import Iterator
from pathlib import Path

from extproc.fleet.exclusion_reasons import REASONS

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "troubleshoot.md"
BEGIN, END = (f"<!-- {mark}: python -m tests.fleet.test_reasons -->" for mark in ("made by", "end"))


def table() -> Iterator[str]:
    limits = "at most for | requests meanwhile | replicas excluded at most"
    yield f"| reason | set by | cleared by | {limits} |"
    yield "|---|---|---|---|---|---|"
    for reason in REASONS:
        yield f"| *{reason.name}* | {reason.row} |"


def parts() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text().partition(BEGIN + "\n")
    shown, _, after = rest.partition(END)
    return before, shown.rstrip("\n"), after


def test_page_lists_the_reasons_for_exclusion() -> None:
    assert parts()[1] == "\n".join(table()), "run: python -m tests.fleet.test_reasons"


if __name__ == "__main__":
    _before, _, _after = parts()
    PAGE.write_text(_before + "\n".join((BEGIN, *table(), END)) + _after)
