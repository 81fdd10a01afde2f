"""Addresses are split, joined and shown beside a name; malformed ones are refused."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.ground.address import join_address, split_address, with_name


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("gpu-1.example:0", ("gpu-1.example", 0)),
        (" [::1]:65535 ", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_address_splits_into_host_and_port_and_back(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address.strip()


@pytest.mark.parametrize(
    "address", ["", ":80", "host", "host:", "host:x", "host:65536", "::1:80", "[host]:80", "a/b:1"]
)
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_any_ip_address_survives_join_and_split(ip: IPv4Address | IPv6Address, port: int) -> None:
    assert split_address(join_address(str(ip), port)) == (str(ip), port)


@given(st.text())
def test_any_text_is_a_valid_address_or_refused(text: str) -> None:
    try:
        host, port = split_address(text)
    except ValueError:
        return
    assert host
    assert 0 <= port <= 65_535


@pytest.mark.parametrize(
    ("name", "text"), [("a", "a (1.2.3.4:80)"), ("", "1.2.3.4:80"), ("1.2.3.4:80", "1.2.3.4:80")]
)
def test_name_stands_before_its_address(name: str, text: str) -> None:
    assert with_name("1.2.3.4:80", name) == text
