"""The rooms of ``extproc``: imports between them go down only, and the map shows what is there.

    python -m tests.test_architecture

writes picture and map into ``docs/architecture.md`` anew.
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
BEGIN, END = (f"<!-- {what}: python -m tests.test_architecture -->" for what in ("made by", "end"))
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
"""From the top down; each may import those below it. Below all stand the other single files."""
GROUND = "ground"
LAZY = {"cli"}
"""Rooms that may import another one only when they need it: a command starts without the others."""
GENERATED = {"ext_proc_pb2.py"}


@cache
def files() -> dict[Path, ast.Module]:
    """Every file of the package, parsed."""
    found = (path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in GENERATED)
    return {path: ast.parse(path.read_text()) for path in found}


def room_of(path: Path) -> str:
    """The room that a file or a module stands in."""
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if first in ("__init__", "__main__"):
        return ROOMS[0]
    return first if first in ROOMS or (PACKAGE / first).is_dir() else GROUND


@cache
def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    """What a file imports of other rooms, and the statement that does."""
    found = []
    for node in ast.walk(files()[path]):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module != "extproc"
            modules = [node.module] if whole else [f"extproc.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
        for module in modules:
            package, *rest = module.split(".")
            if package == "extproc" and rest and not rest[0].startswith("__"):
                other = room_of(PACKAGE.joinpath(*rest))
                if other != room_of(path):
                    assert isinstance(node, ast.stmt)
                    found.append((node, other))
    return found


def level(room: str) -> int:
    assert room in (*ROOMS, GROUND), f"{room} is a new room: name it in ROOMS, where it belongs"
    return (*ROOMS, GROUND).index(room)


def test_imports_go_down_and_none_is_hidden() -> None:
    wrong = []
    for path, module in files().items():
        for node, other in imports(path):
            line = f"{path.relative_to(PACKAGE)}:{node.lineno} imports {other}"
            if level(other) < level(room_of(path)):
                wrong.append(f"{line}, which stands above it")
            if node not in module.body and room_of(path) not in LAZY:
                wrong.append(f"{line} lazily")
    assert not wrong


def test_the_picture_and_the_map_show_what_is_there() -> None:
    _, drawn, _ = _parts(DOC.read_text())
    assert drawn == _drawn(), "run: python -m tests.test_architecture"


def test_the_files_that_the_text_sends_readers_to_are_there() -> None:
    before, _, after = _parts(DOC.read_text())
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", before + after))
    assert named
    assert not [
        name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ]


def _arrows() -> dict[str, set[str]]:
    """Which rooms below it each room imports."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in files():
        room = room_of(path)
        arrows[room] |= {other for _, other in imports(path) if level(other) > level(room)}
    return arrows


def _picture() -> Iterator[str]:
    """Arrows that others imply are left out, and those to the ground."""
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
