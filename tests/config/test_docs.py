"""The documentation names every setting, option and field, and its links lead somewhere."""

import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins
from pydantic import BaseModel

from benchmarks import simulate
from extproc import cli
from extproc.config import Config
from extproc.observe.decision_log import LoggedDecision
from extproc.route.router import Router
from extproc.settings import load
from tests.fakes import ManualClock, chat, decided, fleet_of, state

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
PAGE = ROOT / "docs" / "configuration.md"
USERS_PAGES = (
    *("README.md", "docs/envoy.md"),
    *(f"docs/operations/{page}.md" for page in ("deploy", "monitor", "upgrade")),
)


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field.get_default(call_default_factory=True)


@pytest.mark.parametrize(("key", "default"), list(settings(Config)))
def test_every_setting_is_documented(key: str, default: object) -> None:
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{key}` |"))
    if default not in ((), None, {}):
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert f"| `{shown}` |" in row


@pytest.mark.parametrize(
    ("main", "command", "pages"),
    [
        (cli.main, ["check"], USERS_PAGES),
        (cli.main, ["explain"], USERS_PAGES),
        (cli.main, ["top"], USERS_PAGES),
        (cli.main, ["demo"], USERS_PAGES),
        (cli.main, ["what-if"], ("docs/what-if.md",)),
        (simulate.main, [], ("benchmarks/README.md",)),
    ],
)
def test_every_option_is_documented(
    main: Callable[[list[str]], int],
    command: list[str],
    pages: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    everywhere = {f"--{key}" for key, _ in settings(Config)} | {"--help", "--config"}
    options = set(re.findall(r"^  (--[a-z][a-z_.-]*)", capsys.readouterr().out, re.MULTILINE))
    documented = re.findall(r"--[a-z][a-z_.-]*", "".join(map(text, pages)))
    assert options & {"--json", "--envoy", "--once"}
    assert options - everywhere <= set(documented)


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) > 3
    documented = text("README.md") + text("CHANGELOG.md")
    assert all(f"extproc {command}" in documented for command in commands)


def test_readme_configuration_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "extproc.yaml"
    (block,) = re.findall(r"```yaml\n(.*?)```", text("README.md"), re.DOTALL)
    single = textwrap.dedent(block)
    ((shared, alone),) = re.findall(r"Put `(.*?)` in the place of `(.*?)`", text("README.md"))
    several = single.replace(alone, shared)
    expected = {single: ("memory", "127.0.0.1"), several: ("redis", "redis.internal")}
    for content, (where, host) in expected.items():
        file.write_text(content, encoding="utf-8")
        assert cli.main(["check", "--config", str(file)]) == 0
        config = load({}, {}, file)
        assert config.state == where
        assert host in str(config.redis.url)


def test_every_field_of_a_decision_record_is_documented() -> None:
    fleet = fleet_of(ManualClock(), "llama-8b-a10", "llama-8b-a10")
    fleet.put(state(3, "llama-8b-a10", ManualClock(), healthy=False))
    decision = decided(Router(fleet, "completion", random.Random(0)), chat(100))
    section = (
        text("docs/operations/monitor.md").partition("## Decision records")[2].partition("\n## ")[0]
    )
    fields = set(keys(to_builtins(LoggedDecision(1, "", 0.0, decision).record())))
    assert {"outcome", "excluded", "terms_s"} < fields
    assert fields - set(re.findall(r"`(\w+)`", section)) == set()


def keys(record: object) -> Iterator[str]:
    if isinstance(record, dict):
        yield from record
        for value in record.values():
            yield from keys(value)
    elif isinstance(record, list):
        for value in record:
            yield from keys(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_pages_and_headings(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", prose(page)):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), (path, anchor)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def text(page: str) -> str:
    return (ROOT / page).read_text()
