"""The number of channels follows what was measured, and nothing that would mislead it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedwan.link.stripes import (
    LEAST_BYTES,
    MAX_CHANNELS,
    SAMPLES,
    START_CHANNELS,
    Stripes,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def transfer(stripes: Stripes, clock: Clock, rate: float, num_bytes: int = LEAST_BYTES) -> None:
    with stripes.measured() as stretch:
        stretch.num_bytes = num_bytes
        clock.now += num_bytes / rate


def settle(stripes: Stripes, clock: Clock, rate_at: Callable[[int], float]) -> list[int]:
    """The numbers that were tried, in order, over many transfers."""
    seen = [stripes.count]
    for _ in range(60):
        transfer(stripes, clock, rate_at(stripes.count))
        if stripes.count != seen[-1]:
            seen.append(stripes.count)
    return seen


def test_more_channels_are_used_as_long_as_they_bring_more(clock: Clock) -> None:
    seen = settle(Stripes(0, clock=clock), clock, lambda count: 1e6 * min(count, 8))
    assert seen == [4, 8, 16, 8]


def test_where_packets_are_lost_it_goes_to_the_most(clock: Clock) -> None:
    seen = settle(Stripes(0, clock=clock), clock, lambda count: 1e6 * count)
    assert seen == [4, 8, 16] and seen[-1] == MAX_CHANNELS


def test_on_a_link_that_is_full_it_goes_back_to_where_it_began(clock: Clock) -> None:
    assert settle(Stripes(0, clock=clock), clock, lambda count: 2.5e7) == [4, 8, 16, 4]


def test_one_bad_spell_does_not_settle_it(clock: Clock) -> None:
    rates = {4: 1e6, 8: 0.9e6, 16: 3e6}
    seen = settle(Stripes(0, clock=clock), clock, lambda count: rates[count])
    assert seen == [4, 8, 16]


def test_a_tenth_more_is_not_worth_twice_the_channels(clock: Clock) -> None:
    assert (
        settle(Stripes(0, clock=clock), clock, lambda count: 1e6 * count**0.06)[-1]
        == START_CHANNELS
    )


def test_a_number_that_was_set_stays(clock: Clock) -> None:
    assert settle(Stripes(3, clock=clock), clock, lambda count: 1e6 * count) == [3]


def try_fresh(stripes: Stripes, clock: Clock) -> None:
    """New connections come first; here they are no better."""
    assert stripes.is_fresh
    for _ in range(1 + SAMPLES):
        transfer(stripes, clock, 1e5)
    assert not stripes.is_fresh


def test_the_first_transfer_of_each_kind_does_not_count(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    try_fresh(stripes, clock)
    for rate in (1e9, 1e6, 1e6, 1e6):
        transfer(stripes, clock, rate)
    assert stripes.count == 2 * START_CHANNELS
    for rate in (1e3, 2e6, 2e6, 2e6):
        transfer(stripes, clock, rate)
    assert stripes.count == 4 * START_CHANNELS


def test_one_odd_transfer_of_three_does_not_decide(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    try_fresh(stripes, clock)
    for rate in (1e6, 1e6, 1e9, 1e6):
        transfer(stripes, clock, rate)
    for rate in (2e6, 2e6, 1e3, 2e6):
        transfer(stripes, clock, rate)
    assert stripes.count == 4 * START_CHANNELS


@pytest.mark.parametrize("channels", [0, 3])
def test_new_connections_are_kept_where_they_are_faster(clock: Clock, channels: int) -> None:
    stripes = Stripes(channels, clock=clock)
    for _ in range(30):
        transfer(stripes, clock, 5e6 if stripes.is_fresh else 1e6)
    assert stripes.is_fresh
    assert stripes.count == (channels or START_CHANNELS)


def test_more_channels_are_tried_with_the_better_kind_of_connection(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    for _ in range(60):
        transfer(stripes, clock, (5e6 if stripes.is_fresh else 1e6) * min(stripes.count, 8))
    assert (stripes.is_fresh, stripes.count) == (True, 8)


@pytest.mark.parametrize("channels", [0, 3])
def test_new_connections_are_tried_and_given_up_where_they_are_not(
    clock: Clock, channels: int
) -> None:
    stripes = Stripes(channels, clock=clock)
    tried = 0
    for _ in range(30):
        tried += stripes.is_fresh
        transfer(stripes, clock, 0.9e6 if stripes.is_fresh else 1e6)
    assert tried == 1 + SAMPLES
    assert not stripes.is_fresh


def test_short_transfers_are_not_measured(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    for _ in range(20):
        transfer(stripes, clock, 1e6, LEAST_BYTES - 1)
    assert stripes.count == START_CHANNELS


def test_transfers_that_failed_or_tried_again_are_not_measured(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    for _ in range(10):
        with pytest.raises(ZeroDivisionError), stripes.measured() as stretch:
            stretch.num_bytes = LEAST_BYTES
            clock.now += 1
            raise ZeroDivisionError
        with stripes.measured() as stretch:
            stretch.num_bytes, stretch.is_clean = LEAST_BYTES, False
            clock.now += 1
    assert stripes.count == START_CHANNELS


def test_transfers_that_overlap_count_once_and_together(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    half = LEAST_BYTES // 2

    def overlap(seconds: float) -> None:
        with stripes.measured() as first:
            clock.now += seconds / 3
            with stripes.measured() as second:
                first.num_bytes = second.num_bytes = half
                clock.now += seconds / 3
            clock.now += seconds / 3

    try_fresh(stripes, clock)
    for _ in range(SAMPLES):
        overlap(1.0)
        assert stripes.count == START_CHANNELS
    overlap(1.0)
    assert stripes.count == 2 * START_CHANNELS
    for _ in range(2 * (1 + SAMPLES)):
        overlap(1.0)  # no faster, so it steps back
    assert stripes.count == START_CHANNELS


def test_a_site_that_is_never_idle_finds_out_as_well(clock: Clock) -> None:
    stripes = Stripes(0, clock=clock)
    seen = [stripes.count]
    with stripes.measured():  # always one on its way
        for _ in range(60):
            transfer(stripes, clock, 1e6 * min(stripes.count, 8))
            transfer(stripes, clock, 1e9)  # a short while measures nothing
            if stripes.count != seen[-1]:
                seen.append(stripes.count)
    assert seen == [4, 8, 16, 8]


def test_what_goes_by_the_rate_tries_two_and_no_new_connections(clock: Clock) -> None:
    stripes = Stripes(0, False, clock)
    assert not stripes.is_fresh
    assert settle(stripes, clock, lambda count: 2.5e7) == [1, 2, 1]
    assert not stripes.is_fresh


def test_what_goes_by_the_rate_takes_more_where_windows_are_short(clock: Clock) -> None:
    seen = settle(Stripes(0, False, clock), clock, lambda count: 6e7 * min(count, 4))
    assert seen == [1, 2, 4, 8, 4]


def test_what_goes_by_the_rate_tries_two_again_where_it_falls(clock: Clock) -> None:
    stripes = Stripes(0, False, clock)
    settle(stripes, clock, lambda count: 2.5e7)
    assert settle(stripes, clock, lambda count: 1e7) == [1, 2, 1]
    assert not stripes.is_fresh


@pytest.mark.parametrize("channels", [0, 3])
def test_where_the_rate_falls_it_begins_anew(clock: Clock, channels: int) -> None:
    stripes = Stripes(channels, clock=clock)
    settle(stripes, clock, lambda count: 1e6 * count)
    assert stripes.count == (channels or MAX_CHANNELS) and not stripes.is_fresh
    settle(stripes, clock, lambda count: 0.8e6 * count)
    assert stripes.count == (channels or MAX_CHANNELS)
    for _ in range(60):
        transfer(stripes, clock, 4e5 if stripes.is_fresh else 2e5)
    assert stripes.is_fresh and stripes.count == (channels or START_CHANNELS)
