"""No name, docstring or page needs a second reading, as far as a program can tell.

    python -m tests.test_prose [PATH ...]

prints the hits in these files or folders, or all; the exit status is 1 if there are any.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("extproc", "benchmarks", "tests")
FIRST_WORDS = {
    *("What", "Whether", "It", "That", "One", "Where"),
    *("Who", "So", "How", "Of", "None", "They", "There"),
}
"""A docstring that begins with one of these words hides its subject."""
BANNED_NAMES = {
    *("told", "let_go", "came", "theirs", "unseen", "kept", "went_on", "news", "saw"),
    *("left_out", "kv_news", "held_s", "waited_s", "one"),
}
"""Identifiers that had several meanings each, or say nothing."""
LINE_CHARACTERS = 100
"""Greatest length of a line in Markdown."""
LONG_LINES = {
    "row of a table": r"\s*\|",
    "image": r"!\[",
    "address of links": r"\[[^]]+\]: \S+$",
    "one link": r"\s*(- )?\(?\[[^]]+\]\(\S+$",
    "one word": r"\s*(- )?\S+$",
}
"""Kinds of lines that may be longer, besides code blocks and parts that a program writes."""


@pytest.mark.slow
def test_prose_lint_finds_nothing() -> None:
    found = [*hits()]
    assert not found, "\n".join(found)


def test_class_name_occurs_once_in_all_trees(tmp_path: Path) -> None:
    for tree in TREES:
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "stack.py").write_text("class Stack: ...")
    assert [*hits(tmp_path)] == [
        "class name: benchmarks/stack.py:1 Stack",
        "class name: tests/stack.py:1 Stack",
    ]


def test_banned_name_is_found_wherever_it_is_defined_or_used(tmp_path: Path) -> None:
    uses = ["one = 1", "def one(): ...", "def f(one): ...", "import a as one", "a.one", "[one]"]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/names.py").write_text("\n".join([*uses, "f(one='text')"]))
    assert sorted(hits(tmp_path)) == [
        f"identifier: tests/names.py:{line} one" for line in range(1, len(uses) + 1)
    ]


def test_exit_status_tells_whether_there_are_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/names.py").write_text("one = 1")
    assert main([], tmp_path) == main(["tests/names.py"], tmp_path) == 1
    assert capsys.readouterr().out == "identifier: tests/names.py:1 one\n" * 2
    assert main(["extproc"], tmp_path) == 0
    assert capsys.readouterr().out == ""


MARKDOWN = """\
{long}
| {long} |
![{long}](picture.png)
[address]: https://{word}
- ([a link](https://{word}))
  `{word}`
```
{long}
```
<!-- made by: a program -->
{long}
<!-- end: a program -->
{umlauts}
- {long}
"""


def test_long_line_of_markdown_is_found_where_it_can_be_wrapped(tmp_path: Path) -> None:
    lines = {"long": "word " * 20 + "x", "word": "x" * 101, "umlauts": "ä ö " * 24 + "äöüß"}
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(MARKDOWN.format(**lines), encoding="utf-8")
    assert [*hits(tmp_path)] == [
        "long line: docs/page.md:1 101 characters",
        "long line: docs/page.md:14 103 characters",
    ]


def hits(root: Path = ROOT) -> Iterator[str]:
    """Hits as ``kind: file:line text``."""
    yield from _code_hits(root)
    yield from _markdown_hits(root)


def _markdown_hits(root: Path) -> Iterator[str]:
    folders = (root / folder for folder in (*TREES, "docs"))
    pages = [*root.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    exempt = re.compile("|".join(LONG_LINES.values()))
    for page in sorted(pages):
        for number, line in _written_lines(page.read_text(encoding="utf-8")):
            if len(line) > LINE_CHARACTERS and not exempt.match(line):
                yield f"long line: {page.relative_to(root)}:{number} {len(line)} characters"


def _written_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without code blocks and parts that a program writes."""
    in_code = made = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        made = line.startswith("<!-- made by: ") or (made and not line.startswith("<!-- end: "))
        if not in_code and not made:
            yield number, line


def _code_hits(root: Path) -> Iterator[str]:
    """Hits in Python code. Class names are compared over all trees."""
    classes = Counter[str]()
    for path in (path for tree in TREES for path in sorted((root / tree).rglob("*.py"))):
        if path.name.endswith("_pb2.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for kind, text in _hits(node, classes):
                yield f"{kind}: {path.relative_to(root)}:{getattr(node, 'lineno', 1)} {text}"


def _hits(node: ast.AST, classes: Counter[str]) -> Iterator[tuple[str, str]]:
    """Hits of a node, each with its kind; counts the names of classes."""
    line = _first_line(node)
    if line and line.split()[0].rstrip(",:;.") in FIRST_WORDS:
        yield "docstring", line
    if isinstance(node, ast.ClassDef):
        classes[node.name] += 1
        if classes[node.name] > 1:
            yield "class name", node.name
    names = (getattr(node, field) for field in _name_fields(node._fields))
    for name in filter(BANNED_NAMES.__contains__, names):
        yield "identifier", name


def _first_line(node: ast.AST) -> str:
    """First line of a definition's docstring; empty if the node has none."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    text = ast.get_docstring(node) if isinstance(node, documented) else None
    return (text or "").partition("\n")[0]


@cache
def _name_fields(fields: tuple[str, ...]) -> list[str]:
    """Fields of a node that name variables, attributes, parameters, definitions or imports.

    The names of arguments in a call belong to the called function, or are data of the caller.
    """
    if fields == ast.keyword._fields:
        return []
    return [field for field in ("id", "attr", "arg", "name", "asname") if field in fields]


def main(paths: Sequence[str], root: Path = ROOT) -> int:
    found = [hit for hit in hits(root) if hit.partition(": ")[2].startswith((*paths,) or "")]
    for hit in found:
        print(hit)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
