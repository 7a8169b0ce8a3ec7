"""The meter's arithmetic, on a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedwan.protocol.limits import MOST_FIGURES
from fedwan.site.meter import Meter, Work

NONE = Work(0, 0)


class Clock:
    """And a link."""

    now, bytes_up, bytes_down = 50.0, 0, 0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Any:
    return Clock()


@pytest.fixture
def meter(clock: Any) -> Meter:
    return Meter(clock, clock)


def test_waiting_is_not_computing_and_what_is_aside_is_neither_wherever_it_happens(
    meter: Meter, clock: Any
) -> None:
    with meter.aside():
        clock.now += 1.0
    with meter.waiting():
        clock.now += 2.0
        with meter.aside():
            clock.now += 4.0
    meter.note_step_begins()
    meter.begin_step(0)
    clock.now += 8.0
    with meter.waiting():
        clock.now += 16.0
        with meter.aside():
            clock.now += 32.0
    with meter.aside():
        clock.now += 64.0
    meter.end_step()
    clock.now += 128.0
    with pytest.raises(KeyError), meter.waiting():  # it counts though it failed
        clock.now += 256.0
        raise KeyError
    work = meter.work(1, NONE)
    assert (work.compute_s, work.wait_s) == (8.0, 274.0)


def test_each_contribution_tells_what_came_since_the_last(meter: Meter, clock: Any) -> None:
    for step in (1, 2):
        meter.note_step_begins()
        meter.begin_step(4)
        clock.now += 0.5
        meter.end_step()
        meter.add_losses({"a": torch.tensor(float(step)), "b": torch.tensor(1.0)})
    clock.bytes_up, clock.bytes_down = 100, 10
    assert meter.total == Work(2, 8)
    work = meter.work(2, meter.total)
    assert (work.step, work.steps, work.samples, work.compute_s) == (2, 2, 8, 1.0)
    assert dict(work.losses) == {"a": 1.5, "b": 1.0}
    assert (work.bytes_up, work.bytes_down) == (100, 10)
    clock.bytes_up = 130
    work = meter.work(2, NONE)
    assert (work.steps, work.samples, work.compute_s, work.wait_s) == (0, 0, 0.0, 0.0)
    assert dict(work.losses) == {} and (work.bytes_up, work.bytes_down) == (30, 0)


def test_losses_of_the_first_names_alone_are_told(meter: Meter) -> None:
    meter.add_losses({f"norm {n}": torch.tensor(1.0) for n in range(5000)})
    meter.add_losses({"norm 0": torch.tensor(2.0), "norm 4999": torch.tensor(1.0)})
    found = dict(meter.work(5, NONE).losses)
    assert len(found) == MOST_FIGURES and found["norm 0"] == 1.5
