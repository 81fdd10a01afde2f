import pytest

from extproc.request.usage import ResponseIdReader

WHOLE = b'{"id":"resp_12ab","created_at":1,"output":[{"id":"msg_1"}]}'
STREAM = (
    b'event: response.created\ndata: {"response":{"id":"resp_12ab","model":"m"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)


def read(body: bytes, size: int) -> list[str]:
    reader = ResponseIdReader()
    found = [reader.feed(body[start : start + size]) for start in range(0, len(body), size)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("body", [WHOLE, STREAM])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_is_read_once_however_the_body_is_split(body: bytes, size: int) -> None:
    assert read(body + body, size) == ["resp_12ab"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"id":"chatcmpl-1"}',
        b'{"previous_response_id":"resp_1"}',
        b'{"text":"\\"id\\":\\"resp_1\\""}',
        b'{"id":"resp_' + b"x" * 500 + b'"}',
        b" " * 5_000 + WHOLE,
    ],
)
def test_other_ids_and_what_comes_late_are_none(body: bytes) -> None:
    assert read(body, 64) == []
