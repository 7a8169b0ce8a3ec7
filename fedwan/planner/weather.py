"""What happens to sites and links during a run, drawn from a seed: outages and changes of rate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from fedwan.planner.wire_model import Pipe, WireLink

__all__ = ["Outage", "Season", "changing_link", "draw_outages"]


@dataclass(frozen=True)
class Outage:
    """A site is dead for a while."""

    from_s: float
    until_s: float


@dataclass(frozen=True)
class Season:
    """A link as it is from a moment on."""

    from_s: float
    link: WireLink


def draw_outages(
    seed: int, site: int, horizon_s: float, mean_up_s: float, mean_down_s: float
) -> tuple[Outage, ...]:
    """When a site fails and returns: both times are exponential, and its own.

    Args:
        seed: of the simulation.
        site: its number.
        horizon_s: nothing fails after it.
        mean_up_s: between a return and the next failure.
        mean_down_s: until it is back.
    """
    return tuple(
        _outages(random.Random(f"{seed} outage {site}"), horizon_s, mean_up_s, mean_down_s)
    )


def _outages(
    draw: random.Random, horizon_s: float, mean_up_s: float, mean_down_s: float
) -> Iterator[Outage]:
    now = draw.expovariate(1 / mean_up_s)
    while now < horizon_s:
        back = now + draw.expovariate(1 / mean_down_s)
        yield Outage(now, back)
        now = back + draw.expovariate(1 / mean_up_s)


def changing_link(
    seed: int, site: int, link: WireLink, horizon_s: float, mean_s: float, least: float
) -> tuple[Season, ...]:
    """A link whose rate changes now and then, to between `least` and all of what it was.

    Args:
        seed: of the simulation.
        site: its number.
        link: at its best, as it is in the beginning.
        horizon_s: it stays as it is after that.
        mean_s: between two changes; the time is exponential.
        least: smallest share of the rate, above 0.
    """
    draw = random.Random(f"{seed} link {site}")
    seasons = [Season(0.0, link)]
    while (now := seasons[-1].from_s + draw.expovariate(1 / mean_s)) < horizon_s:
        share = draw.uniform(least, 1.0)
        seasons.append(Season(now, WireLink(_slower(link.up, share), _slower(link.down, share))))
    return tuple(seasons)


def _slower(pipe: Pipe, share: float) -> Pipe:
    return pipe._replace(bytes_per_s=pipe.bytes_per_s * share)
