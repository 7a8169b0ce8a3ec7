from __future__ import annotations

import pytest

from fedwan.errors import ConfigError
from fedwan.flower.ports import free_port, listen, split_address


def test_a_free_port_can_be_listened_on() -> None:
    listen("127.0.0.1", free_port(), "a test", "port").close()


def test_a_port_in_use_names_who_where_and_the_mend() -> None:
    with listen("127.0.0.1", 0, "a test", "port") as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            listen("127.0.0.1", port, "the front door", "link.door")
    assert str(error.value) == (
        f"the front door cannot listen on 127.0.0.1:{port}: the port is in use; "
        "stop what holds it or set another link.door"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_told(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(host, 0, "a test", "port")


def test_ipv6_is_listened_on_where_there_is_any() -> None:
    try:
        with listen("::1", 0, "a test", "port") as bound:
            assert bound.getsockname()[1] > 0
    except ConfigError as error:
        assert "not this machine's" in str(error) or "cannot listen" in str(error)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a.example.com:7443", ("a.example.com", 7443)), ("[::1]:80", ("::1", 80))],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address, "door") == parts


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:0", "host:65536", "host:x", ""])
def test_what_is_no_address_is_told_with_an_example(address: str) -> None:
    with pytest.raises(ConfigError, match="not host:port; write it like"):
        split_address(address, "door")
