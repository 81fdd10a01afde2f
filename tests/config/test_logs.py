import json
import logging
from collections.abc import Iterator

import pytest

from extproc.config import LogSettings
from extproc.observe import logs


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("extproc")
    before = (root.level, list(root.handlers), package.level)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    package.setLevel(before[2])


def test_json_lines_hold_time_level_logger_message_and_extras(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup(LogSettings(format="json"))
    logging.getLogger("extproc.poll").info("scraped", extra={"replica": "a:1", "age": object})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "extproc.poll",
        "message": "scraped",
        "replica": "a:1",
        "age": "<class 'object'>",
    }


def test_an_exception_stays_on_its_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(format="json"))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("extproc").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_text_lines_are_readable_and_quote_what_is_not_one_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup(LogSettings(format="text"))
    fields = {"port": 50051, "reason": 'it said "no"', "empty": "", "two": "a\nb"}
    logging.getLogger("extproc").warning("router %s", "ready", extra=fields)
    (line,) = capsys.readouterr().err.splitlines()
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert rest == (r'WARNING router ready port=50051 reason="it said \"no\"" empty="" two="a\nb"')


def test_the_level_is_ours_and_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(level="debug"))
    logging.getLogger("extproc.proxy").debug("ours")
    logging.getLogger("aiohttp.access").info("theirs")
    logging.getLogger("redis").warning("their warning")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["DEBUG ours", "WARNING their warning"]
