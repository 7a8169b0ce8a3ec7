"""Charts show every drawable point and no other, inside their frame."""

from __future__ import annotations

import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.output.chart import Chart, Series, line_chart, stacked_bars
from fedwan.output.units import number_text


def chart(*points: tuple[float, float | None], is_log: bool = False) -> Chart | None:
    return line_chart("title", [Series("s1", points)], number_text, is_log)


def test_every_point_of_a_short_line_is_a_dot_and_a_missing_value_leaves_a_gap() -> None:
    drawn = chart((0, 1.0), (1, 2.5), (2, None), (3, math.nan), (4, 1.0), (5, 1.0))
    assert drawn is not None
    (line,) = drawn["lines"]
    assert [label for _, label in line["dots"]][1] == "s1: 2.5 at 1"
    assert re.sub(r"[^ML]", "", line["path"]) == "MLML"
    assert not drawn["legend"]  # there is nothing to tell it apart from
    drawn = chart((0, 0.0), (1, -1.0), (2, 10.0), (3, 1000.0), is_log=True)
    assert drawn is not None and len(drawn["lines"][0]["dots"]) == 2


def test_values_that_no_axis_can_divide_are_0_or_left_out() -> None:
    for is_log in (False, True):
        drawn = chart((0, 0.0), (1, 5e-324), (2, 1e-323), (3, 1.7e308), is_log=is_log)
        assert (drawn is None) == is_log
    drawn = chart((0, 5e-324), (1, 1.0), (2, 1e300), (3, 1.7e308), is_log=True)
    assert drawn is not None and len(drawn["lines"][0]["dots"]) == 2


def test_nothing_to_draw_gives_nothing() -> None:
    assert chart() is None and chart((0, None)) is None
    assert line_chart("t", [Series("floor", [(0, 1.0)], is_reference=True)], number_text) is None
    assert stacked_bars("t", ["compute"], {}, number_text) is None
    assert stacked_bars("t", ["compute"], {"s1": [0.0]}, number_text) is None


def test_a_long_line_is_thinned_and_keeps_its_end() -> None:
    drawn = chart(*((k, float(k)) for k in range(10_001)))
    assert drawn is not None
    path = drawn["lines"][0]["path"]
    assert 300 < path.count("L") < 500
    assert float(re.findall(r"L([\d.]+) ", path)[-1]) == 548.0


def test_bars_share_one_scale() -> None:
    bars = {"s1": [3.0, 1.0], "s2": [1.0, 1.0]}
    drawn = stacked_bars("t", ["compute", "wait"], bars, number_text)
    assert drawn is not None
    widths = [wide for _, cells in drawn["bars"] for _, wide, _, _ in cells]
    assert [round(wide / widths[1], 6) for wide in widths] == [3, 1, 1, 1]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats())),
    st.booleans(),
)
@settings(max_examples=50)
def test_any_numbers_stay_inside_the_frame(points: list[tuple[int, float]], is_log: bool) -> None:
    drawn = chart(*sorted([*points, (1, 1.0)]), is_log=is_log)
    assert drawn is not None
    for (x, y), _ in drawn["lines"][0]["dots"]:
        assert -1 <= x <= 561 and -1 <= y <= 241
