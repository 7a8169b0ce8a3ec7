"""How near a wrong name is to a right one, and what a site may be called."""

from __future__ import annotations

from fedwan.names import closest, why_unsafe


def test_closest_finds_typing_errors() -> None:
    assert closest("DiLoCo", ["diloco", "sync"]) == "diloco"
    assert closest("fedavg", ["diloco", "sync"]) is None is closest("anything", [])


def test_a_site_s_name_is_a_dns_label() -> None:
    assert not any(map(why_unsafe, ("s1", "paris", "a", "us-east-1", "0", "a" * 63)))
    unsafe = ("", ".", "..", "a/b", "a b", "Paris", "é", "-a", "a-", "a" * 64, "a\n", "ca")
    assert all(map(why_unsafe, unsafe))
