"""Rewrites the golden files: ``python -m tests.golden.record`` (cells: ``tests.golden.cells``)."""

import tempfile
from pathlib import Path

from tests.golden import cells
from tests.golden.stage import FOLDER, collect


def main() -> None:
    """Records every file and the cells of the test."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in collect(Path(folder)).items():
            (FOLDER / name).write_text(text)
    tiny = {f"{name}/tiny": cells.run(name, cells.TINY_REQUESTS) for name in cells.TINY}
    cells.write(tiny)


if __name__ == "__main__":
    main()
