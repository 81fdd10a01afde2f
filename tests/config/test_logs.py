"""Log lines as JSON and as text, and their levels."""

import json
import logging

import pytest

from extproc.config import LogSettings
from extproc.observe import logs


def test_json_line_holds_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_json_line_holds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(format="json"))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("extproc").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_text_line_quotes_values_of_several_words(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(format="text"))
    fields = {"port": 50051, "reason": 'it said "no"', "empty": "", "two": "a\nb"}
    logging.getLogger("extproc").warning("router %s", "ready", extra=fields)
    (line,) = capsys.readouterr().err.splitlines()
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert rest == (r'WARNING router ready port=50051 reason="it said \"no\"" empty="" two="a\nb"')


def test_names_cannot_forge_a_text_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and problems in messages come from Redis, and so do names of fields."""
    logs.setup(LogSettings(format="text"))
    forged = "r1\n2026-01-31T12:00:00.000Z INFO\x1b[2J"
    logging.getLogger("extproc").warning("replica %s", forged, extra={forged: 1})
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_log_level_does_not_apply_to_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(level="debug"))
    logging.getLogger("extproc.proxy").debug("own line")
    logging.getLogger("aiohttp.access").info("library line")
    logging.getLogger("redis").warning("a warning")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["DEBUG own line", "WARNING a warning"]
