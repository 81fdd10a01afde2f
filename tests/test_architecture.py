"""Rooms of ``extproc`` import only rooms below them, and the map in the docs is current.

    python -m tests.test_architecture

rewrites picture and map in ``docs/architecture.md``.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "extproc"
DOC = ROOT / "docs" / "architecture.md"
BEGIN, END = (f"<!-- {word}: python -m tests.test_architecture -->" for word in ("made by", "end"))
ROOMS = (
    "cli",
    "lab",
    "envoy",
    "proxy",
    "poll",
    "observe",
    "share",
    "route",
    "fleet",
    "settings",
    "config",
    "replica_state",
    "predict",
    "request",
)
"""Rooms from the top down; a room may import the rooms below it. Other single files are GROUND."""
GROUND = "ground"
LAZY = {"cli"}
"""Rooms that may import within functions: a command starts without the code of other commands."""
GENERATED = {"ext_proc_pb2.py"}


@cache
def files() -> dict[Path, ast.Module]:
    """Parses every file of the package."""
    found = (path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in GENERATED)
    return {path: ast.parse(path.read_text()) for path in found}


def room_of(path: Path) -> str:
    """Returns the room of a file or module."""
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if first in ("__init__", "__main__"):
        return ROOMS[0]
    return first if first in ROOMS or (PACKAGE / first).is_dir() else GROUND


@cache
def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    """Returns the other rooms that a file imports, each with its import statement."""
    found = []
    for node in ast.walk(files()[path]):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "extproc":
                modules = [f"extproc.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            package, *rest = module.split(".")
            if package == "extproc" and rest and not rest[0].startswith("__"):
                other = room_of(PACKAGE.joinpath(*rest))
                if other != room_of(path):
                    assert isinstance(node, ast.stmt)
                    found.append((node, other))
    return found


def level(room: str) -> int:
    assert room in (*ROOMS, GROUND), f"{room} is a new room: add it to ROOMS"
    return (*ROOMS, GROUND).index(room)


def test_rooms_import_only_lower_rooms_at_the_top_of_files() -> None:
    wrong = []
    for path, module in files().items():
        for node, other in imports(path):
            line = f"{path.relative_to(PACKAGE)}:{node.lineno} imports {other}"
            if level(other) < level(room_of(path)):
                wrong.append(f"{line}, which stands above it")
            if node not in module.body and room_of(path) not in LAZY:
                wrong.append(f"{line} lazily")
    assert not wrong


def test_architecture_map_is_current() -> None:
    _, drawn, _ = _parts(DOC.read_text())
    assert drawn == _drawn(), "run: python -m tests.test_architecture"


def test_files_named_in_the_architecture_docs_exist() -> None:
    before, _, after = _parts(DOC.read_text())
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", before + after))
    assert named
    assert not [
        name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ]


def _arrows() -> dict[str, set[str]]:
    """Returns the lower rooms that each room imports."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in files():
        room = room_of(path)
        arrows[room] |= {other for _, other in imports(path) if level(other) > level(room)}
    return arrows


def _picture() -> Iterator[str]:
    """Draws the imports, without arrows that others imply and arrows to the ground."""
    arrows, reach = _arrows(), dict[str, set[str]]()
    yield "```mermaid"
    yield "flowchart TD"
    for room in (GROUND, *reversed(ROOMS)):
        implied = set[str]().union(*(reach[other] for other in arrows[room]))
        reach[room] = arrows[room] | implied
        for other in sorted(arrows[room] - implied - {GROUND}, key=level):
            yield f"    {room} --> {other}"
    yield "```"


def _map() -> Iterator[str]:
    inside: dict[str, list[Path]] = defaultdict(list)
    for path in files():
        inside[room_of(path)].append(path)
    for room in filter(inside.__contains__, (*ROOMS, GROUND)):
        package = PACKAGE / room / "__init__.py"
        yield ""
        if package in files():
            yield f"**{room}/** {_first_sentence(package)}"
        else:
            yield f"**{room}** What every room may use." if room == GROUND else f"**{room}**"
        yield ""
        for path in inside[room]:
            if path.name != "__init__.py":
                yield f"- `{path.relative_to(PACKAGE)}` {_first_sentence(path)}"


def _first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(files()[path]) or "").split("\n\n")[0].split())
    sentence, point, _ = text.partition(". ")
    return sentence + point.strip()


def _drawn() -> str:
    return "\n".join((*_picture(), *_map()))


def _parts(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(BEGIN + "\n")
    drawn, _, after = rest.partition("\n" + END)
    return before, drawn, after


if __name__ == "__main__":
    _before, _, _after = _parts(DOC.read_text())
    DOC.write_text(f"{_before}{BEGIN}\n{_drawn()}\n{END}{_after}")
