"""How near a wrong name is to a right one, and what a site may be called."""

from __future__ import annotations

import pytest

from fedwan.names import closest, why_unsafe


@pytest.mark.parametrize(
    ("wrong", "valid", "right"),
    [
        ("digit", ["digits", "ring8"], "digits"),
        ("learning_rate", ["lr", "momentum"], "lr"),
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


@pytest.mark.parametrize("name", ["s1", "paris", "a", "us-east-1", "0", "a" * 63])
def test_dns_labels_are_safe_names(name: str) -> None:
    assert why_unsafe(name) is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "Paris", "é", "-a", "a-", "a" * 64, "a\n", "ca"]
)
def test_anything_else_is_not(name: str) -> None:
    assert why_unsafe(name)
