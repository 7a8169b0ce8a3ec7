"""Charts are well-formed SVG that shows every drawable point and no other."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from fedwan.output.chart import Bar, Series, line_chart, stacked_bars
from fedwan.output.units import number_text


def chart(*series: Series, log_y: bool = False) -> str:
    return line_chart("title <&>", series, "step", number_text, log_y=log_y)


def parse(html: str) -> ET.Element:
    return ET.fromstring(html)


def test_every_point_of_a_short_line_is_a_dot_with_its_value() -> None:
    html = chart(Series("s1", [(0, 1.0), (10, 2.5), (20, 0.5)]))
    titles = [title.text for title in parse(html).iter("title")]
    assert "s1: 2.5 at 10" in titles
    assert html.count("<circle") == 3


def test_a_missing_value_leaves_a_gap() -> None:
    html = chart(Series("s1", [(0, 1.0), (1, 1.0), (2, None), (3, math.nan), (4, 1.0), (5, 1.0)]))
    path = next(node.get("d") or "" for node in parse(html).iter("path"))
    assert re.sub(r"[^ML]", "", path) == "MLML"


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    html = chart(Series("s1", [(0, 0.0), (1, -1.0), (2, 10.0), (3, 1000.0)]), log_y=True)
    assert html.count("<circle") == 2


def test_nothing_to_draw_gives_nothing() -> None:
    assert chart(Series("s1", [])) == ""
    assert chart(Series("s1", [(0, None)])) == ""
    assert chart(Series("floor", [(0, 1.0)], is_reference=True)) == ""
    assert stacked_bars("t", [], number_text) == ""
    assert stacked_bars("t", [Bar("s1", (("compute", 0.0),))], number_text) == ""


def test_a_long_line_is_thinned_and_keeps_its_end() -> None:
    html = chart(Series("s1", [(k, float(k)) for k in range(10_001)]))
    path = next(node.get("d") or "" for node in parse(html).iter("path"))
    assert 300 < path.count("L") < 500
    last_x = float(re.findall(r"L([\d.]+) ", path)[-1])
    assert last_x == 548.0


def test_bars_share_one_scale() -> None:
    html = stacked_bars(
        "t",
        [
            Bar("s1", (("compute", 3.0), ("wait", 1.0))),
            Bar("s2", (("compute", 1.0), ("wait", 1.0))),
        ],
        number_text,
    )
    widths = [float(rect.get("width") or 0) for rect in parse(html).iter("rect")]
    assert widths[0] == 3 * widths[1]
    assert widths[1] == widths[2] == widths[3]


def test_a_legend_stands_only_where_lines_must_be_told_apart() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    assert "legend" not in chart(Series("s1", points))
    assert "legend" in chart(Series("s1", points), Series("s2", points, 1))


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(allow_subnormal=False, width=32))),
    st.booleans(),
)
def test_any_numbers_make_well_formed_svg_inside_its_frame(
    points: list[tuple[int, float]], log_y: bool
) -> None:
    html = chart(Series("a<b>&", sorted(points)), log_y=log_y)
    if not html:
        return
    for circle in parse(html).iter("circle"):
        assert -1 <= float(circle.get("cx") or "nan") <= 561
        assert -1 <= float(circle.get("cy") or "nan") <= 241
