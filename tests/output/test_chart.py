"""Charts are drawn of whatever numbers sites send, if there is anything to draw."""

from __future__ import annotations

import base64
import math

import pytest

from fedwan.output.chart import line_chart, stacked_bars
from fedwan.output.units import number_text

ODD = (0.0, 5e-324, -1.0, 1e-30, 1e30, 1.7e308, math.inf, math.nan, None)


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("values", [(1.0,), (1.0, *ODD), (1e30, *ODD, 1e-29), (3.0,) * 500])
def test_any_numbers_are_drawn(values: tuple[float | None, ...], is_log: bool) -> None:
    drawn = line_chart("t", {"$s_1": list(enumerate(values))}, number_text, is_log=is_log)
    assert b"<svg" in base64.b64decode(drawn[1])


def test_nothing_to_draw_gives_nothing() -> None:
    assert line_chart("t", {}, number_text) is line_chart("t", {"a": [(0, None)]}, number_text)
    assert line_chart("t", {"floor": [(0, 1.0)]}, number_text, reference="floor") is None
    assert stacked_bars("t", ["compute"], {}, number_text) is None
    assert stacked_bars("t", ["compute"], {"s1": [0.0]}, number_text) is None
    assert stacked_bars("t", ["compute", "wait"], {"s1": [3.0, 1.0], "s2": [1.0, 1.0]}, number_text)
