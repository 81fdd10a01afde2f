"""Envoy's access log, as the demo reads it."""

import json
from pathlib import Path

import pytest

from extproc.lab.harness.envoy_config import AccessLog


@pytest.mark.parametrize(
    ("headers_us", "body_us", "added_ms"),
    [
        (400, 1600, 2.0),
        ("-", 1600, 1.6),  # one message: the body, with the headers beside it
        (400, "-", None),  # the router went away in between
        (None, None, None),
    ],
)
def test_what_a_request_waited_for_the_router(
    tmp_path: Path, headers_us: object, body_us: object, added_ms: float | None
) -> None:
    record = {
        "request_id": "one",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "upstream": "10.0.0.1:80",
        "destination": "10.0.0.1:80",
        "flags": None,
        "duration_ms": 500,
        "request_header_latency_us": headers_us,
        "request_body_total_latency_us": body_us,
    }
    file = tmp_path / "access.log"
    file.write_text(f"{json.dumps(record)}\n{json.dumps(record | {'method': 'GET'})}\nhalf a l")
    log = AccessLog(file)
    (access,) = log.new()
    assert access.added_ms == added_ms
    assert access.duration_s == 0.5
    assert log.new() == []
