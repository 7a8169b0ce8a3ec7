"""Quantities for readers."""

from __future__ import annotations

import math

import pytest

from fedwan.output.units import bytes_text, duration_text, number_text, percent_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (52_340_000, "52.3 MB")],
)
def test_bytes_have_three_digits_and_a_decimal_prefix(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_what_is_not_finite_is_a_dash() -> None:
    assert number_text(math.nan) == percent_text(math.inf) == number_text(None) == "–"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (59.6, "1:00"), (3599.7, "1:00:00")])
def test_durations_never_show_sixty_of_anything(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
