"""What a course tells of a run."""

from __future__ import annotations

import math

import pytest

from fedwan.planner.course import Course


def test_utilisation_is_steps_over_time_between_two_rounds() -> None:
    course = Course(marks=[[0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0]])
    assert course.utilisation([0.1, 0.1], 10, 1, 3) == pytest.approx((0.5 + 1.0) / 2)


def test_a_site_that_did_not_come_as_far_counts_as_far_as_it_came() -> None:
    course = Course(marks=[[0.0, 2.0, 4.0, math.nan]])
    assert course.utilisation([0.1], 10, 1, 3) == pytest.approx(0.5)
    assert math.isnan(Course(marks=[[0.0, 2.0, math.nan, math.nan]]).utilisation([0.1], 10, 1, 3))
