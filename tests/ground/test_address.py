"""Addresses are split, joined and shown beside a name; malformed ones are refused. A server that
listens on all addresses has one that others reach."""

import socket
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.ground import address as addresses
from extproc.ground.address import (
    join_address,
    reachable,
    split_address,
    with_name,
    within_reach,
)


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


@pytest.mark.parametrize(
    ("listens", "found", "reached"),
    [
        ("127.0.0.1:9090", [], "127.0.0.1:9090"),
        ("localhost:9090", [], "localhost:9090"),
        ("router.internal:9090", [], "router.internal:9090"),
        ("0.0.0.0:9090", ["10.1.2.3"], "10.1.2.3:9090"),
        ("0.0.0.0:9090", ["fd00::7", "10.1.2.3"], "10.1.2.3:9090"),
        ("0.0.0.0:9090", ["127.0.1.1"], "pod-1:9090"),
        ("0.0.0.0:9090", [], "pod-1:9090"),
        ("[::]:9090", ["fe80::1%eth0", "::1", "fd00::7"], "[fd00::7]:9090"),
    ],
)
async def test_server_on_all_addresses_is_reached_by_that_of_its_host_name(
    listens: str, found: list[str], reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_up(host: str) -> list[str]:
        assert host == "pod-1"
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return found

    monkeypatch.setattr(addresses, "gethostname", lambda: "pod-1")
    monkeypatch.setattr(addresses, "look_up", look_up)
    assert await reachable(listens) == reached


@pytest.mark.parametrize(
    ("address", "process", "within"),
    [
        ("10.1.2.3:9090", "other:50051", True),
        ("other:9090", "other:50051", True),
        ("127.0.0.1:9090", "other:50051", False),
        ("localhost:9090", "other:50051", False),
        ("[::1]:9090", "other:50051", False),
        ("127.0.0.1:9090", "here:50051", True),
        ("127.0.0.1:9090", "", False),  # garbage in Redis
    ],
)
def test_loopback_of_another_machine_is_not_within_reach(
    address: str, process: str, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "gethostname", lambda: "here")
    assert within_reach(address, process) is within
