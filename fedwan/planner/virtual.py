"""A run in virtual time: the strategy's own round policy and schedule, without weights or sockets.

    sites (`virtual_journey`)   step; fragments depart after `due_step`, stand in line, land after τ
    sites (`virtual_own_pace`)  step as `Paces` tells them, send all, fetch updates one by one
    coordinator (`virtual_hub`, `virtual_arrivals`)
                                asks `strategy.policy` whenever something arrives and every
                                `TICK_S`, merges in site order, commits, publishes
    lines (`wire_model`)        rate, round trip, slow start, loss; they change, sites fail

What arrives for a round that is over is merged into the fragment's next version, if the policy
bears its staleness, or dropped; its site gets the update if it is still out, else the global
weights, as from `fedwan.coordinator.updates`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedwan.planner.clock import Clock
from fedwan.planner.costs import Costs
from fedwan.planner.course import Course
from fedwan.planner.loads import global_bytes, loads_of
from fedwan.planner.virtual_arrivals import OwnPaceCoordinator
from fedwan.planner.virtual_hub import Coordinator
from fedwan.planner.virtual_journey import Journey
from fedwan.planner.virtual_own_pace import OwnPaceJourney
from fedwan.planner.virtual_site import SiteModel, Timetable, VirtualSite
from fedwan.state import Layout
from fedwan.strategy import Strategy

__all__ = ["run_virtually"]


def run_virtually(
    strategy: Strategy,
    layout: Layout,
    sites: Sequence[SiteModel],
    num_steps: int,
    costs: Costs | None = None,
) -> Course:
    """Let a run take place in virtual time.

    Args:
        strategy: the recipe.
        layout: of the whole model.
        sites: in site order.
        num_steps: per site, a multiple of the strategy's H.
        costs: of coding and merging.

    Raises:
        ConfigError: the layout cannot be cut as the strategy wants.
    """
    costs = costs or Costs()
    fragments = strategy.fragments(layout)
    table = Timetable(
        strategy.h,
        strategy.overlap.tau,
        num_steps,
        fragments,
        loads_of(strategy, fragments, costs),
        global_bytes(layout, costs),
    )
    clock, course = Clock(), Course()
    parties: list[VirtualSite] = []
    if strategy.clock == "versions":
        hub = Coordinator(strategy, table, len(sites), clock, course)
        journeys = [Journey(index, model, table, clock, hub) for index, model in enumerate(sites)]
        hub.open(journeys)
        parties += journeys
    else:
        desk = OwnPaceCoordinator(strategy, table, len(sites), clock, course)
        paced = [OwnPaceJourney(i, model, table, clock, desk) for i, model in enumerate(sites)]
        desk.open(paced)
        parties += paced
    clock.run()
    course.wall_s = clock.now_s if course.stopped else max(party.ended_s for party in parties)
    course.compute_s = [party.compute_s for party in parties]
    course.num_steps = sum(party.steps_taken for party in parties)
    course.marks = [party.marks for party in parties]
    course.rejoins = sum(party.rejoins for party in parties)
    course.bytes_up = sum(party.bytes_up for party in parties)
    course.bytes_down = sum(party.bytes_down for party in parties)
    return course
