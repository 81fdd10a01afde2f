"""Numbers and names as people read them."""

import pytest

from extproc.ground.text import figure


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0625, "0.062"),
        (-12.345, "-12.35"),
        (123.46, "123.5"),
        (1234.6, "1235"),
    ],
)
def test_number_has_fewer_decimals_the_larger_it_is(value: float | None, text: str) -> None:
    assert figure(value) == text
