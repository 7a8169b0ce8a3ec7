"""How near a wrong name is to a right one, and what a site may be called."""

from __future__ import annotations

import pytest

from fedwan.names import closest, why_unsafe


@pytest.mark.parametrize(
    ("wrong", "valid", "right"),
    [
        ("DiLoCo", ["diloco", "sync"], "diloco"),
        ("half_life_samples", ["half_life", "every"], "half_life"),
        ("fedavg", ["diloco", "sync"], None),
        ("anything", [], None),
    ],
)
def test_closest_finds_typing_errors_initials_and_parts(
    wrong: str, valid: list[str], right: str | None
) -> None:
    assert closest(wrong, valid) == right


def test_a_site_s_name_is_a_dns_label() -> None:
    assert not any(map(why_unsafe, ("s1", "paris", "a", "us-east-1", "0", "a" * 63)))
    unsafe = ("", ".", "..", "a/b", "a b", "Paris", "é", "-a", "a-", "a" * 64, "a\n", "ca")
    assert all(map(why_unsafe, unsafe))
