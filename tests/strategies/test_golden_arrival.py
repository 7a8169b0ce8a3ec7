"""Golden trajectories where updates are made on arrival, against plain loops in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedwan import outer
from fedwan.codecs import fp32
from fedwan.fragments import whole
from fedwan.link.base import Link
from fedwan.outer.step import StepInner, step_outer
from fedwan.protocol.policy import RoundPolicy
from fedwan.state import State
from fedwan.strategy import Strategy
from fedwan.workloads.optim import build_optimizer
from tests.planes import eventually
from tests.strategies import test_golden
from tests.support import ADAM, BATCH, NET, Ran, WrappedLink, run_tiny, tiny_config

SITES, H = 3, 4
LR, MOMENTUM = 0.6, 0.9
UNEVEN = (0, 1, 2, 2, 0, 2, 1, 2, 0, 2, 1, 0)
"""Who contributes, one after the other: the third site is fast, the second slow."""


class Turnstile:
    """Lets contributions pass in a given order, each once the one before has landed."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self.num_passed = 0
        self.joined: set[int] = set()

    def wrap(self, name: str, link: Link) -> Link:
        """A site's link."""
        return _Turned(link, self, int(name[1:]) - 1)  # type: ignore[return-value]

    def is_over(self) -> bool:
        return self.num_passed >= len(self._order)

    def is_turn_of(self, site: int) -> bool:
        if len(self.joined) < SITES:
            return False  # who joins after the first update starts from there
        return self.is_over() or self._order[self.num_passed] == site


class _Turned(WrappedLink):
    def __init__(self, inner: Link, turnstile: Turnstile, site: int) -> None:
        super().__init__(inner)
        self._turnstile = turnstile
        self._site = site
        self._is_inside = False

    def join(self, hello: Any) -> Any:
        welcome = self._inner.join(hello)
        if not welcome.is_waiting:
            self._turnstile.joined.add(self._site)
        return welcome

    def upload(self, header: Any, payload: Any) -> Any:
        if header.work.samples:  # the initial weights have none
            eventually(lambda: self._turnstile.is_turn_of(self._site), within_s=60.0)
            self._is_inside = not self._turnstile.is_over()
        return self._inner.upload(header, payload)

    def heartbeat(self, step: int) -> None:
        """A step was taken: what was sent before it has landed."""
        self._inner.heartbeat(step)
        self._pass()

    def leave(self, farewell: Any) -> None:
        """The run was over before another step was taken."""
        self._pass()
        self._inner.leave(farewell)

    def _pass(self) -> None:
        self._turnstile.num_passed += self._is_inside
        self._is_inside = False


class Site(test_golden.Site):
    """A site of the reference loop, and what it started from."""

    def __init__(self, index: int) -> None:
        super().__init__(index, NET)
        self.base = {name: value.clone() for name, value in self.weights.items()}
        self.version = 0

    def adopt(self, theta: State, version: int) -> None:
        self.base = {name: value.clone() for name, value in theta.items()}
        self.version = version
        for name, value in theta.items():
            self.weights[name].copy_(value)


def run(strategy: Strategy, folder: Path, order: Sequence[int]) -> Ran:
    """A run whose contributions come in a given order."""
    steps = strategy.h * (len(order) // SITES)
    config = tiny_config(sites=SITES, h=strategy.h, steps=steps)
    ran = run_tiny(folder, config, strategy, wrap=Turnstile(order).wrap)
    assert len(ran.hashes) == 1
    return ran


def staleness_of(ran: Ran) -> list[int]:
    return [row["staleness"] for row in ran.rounds()]


def on_deltas(transform: Any) -> Strategy:
    policy = RoundPolicy(SITES, quorum=2, max_staleness=8, arrivals_from=0)
    step = step_outer({"velocity": transform})
    return Strategy("delta", H, whole, step, fp32(), fp32(), policy, clock="samples")


def test_async_diloco_follows_the_equations(tmp_path: Path) -> None:
    """θ' = θ - lr Δ_i / N; every N arrivals m' = β m + Σ Δ / N and θ' -= lr β m'."""
    strategy = on_deltas(outer.delayed_nesterov(LR, MOMENTUM, SITES))
    ran = run(strategy, tmp_path, UNEVEN)
    sites = [Site(index) for index in range(SITES)]
    theta = {name: value.clone() for name, value in sites[0].weights.items()}
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    total = {name: torch.zeros_like(value) for name, value in theta.items()}
    staleness = []
    for arrived, index in enumerate(UNEVEN, 1):
        site = sites[index]
        for _ in range(H):
            site.step()
        staleness.append(arrived - 1 - site.version)
        for name, value in theta.items():
            delta = site.base[name] - site.weights[name]
            total[name] = total[name] + delta
            theta[name] = value - LR * delta / SITES
            if arrived % SITES == 0:
                momentum[name] = MOMENTUM * momentum[name] + total[name] / SITES
                theta[name] = theta[name] - LR * MOMENTUM * momentum[name]
                total[name] = torch.zeros_like(value)
        site.adopt(theta, arrived)
    torch.testing.assert_close(ran.state, theta, rtol=1e-4, atol=1e-5)
    assert staleness_of(ran) == staleness
    assert max(staleness) == 4
    totals = ran.result.totals  # a run ends with the samples of all sites together
    assert (totals.contributions, totals.dropped) == (len(UNEVEN), 0)
    assert totals.samples == len(UNEVEN) * H * BATCH


def test_parameter_server_follows_the_equations(tmp_path: Path) -> None:
    """θ' = Adam(θ, g_i / (1 + s)) at the coordinator, for every gradient that comes."""
    policy = RoundPolicy(SITES, quorum=2, max_staleness=8, discount=1.0, arrivals_from=0)
    step = partial(StepInner, inner=NET)
    strategy = Strategy("gradient", 1, whole, step, fp32(), fp32(), policy, clock="samples")
    ran = run(strategy, tmp_path, UNEVEN)
    sites = [Site(index) for index in range(SITES)]
    theta = {name: value.clone() for name, value in sites[0].weights.items()}
    optimizer = build_optimizer(ADAM, list(theta.values()))
    for arrived, index in enumerate(UNEVEN, 1):
        site = sites[index]
        site.step()
        network = site.workload.networks["velocity"]
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            theta[f"velocity/{name}"].grad = parameter.grad / (arrived - site.version)
        optimizer.step()
        site.adopt(theta, arrived)
    torch.testing.assert_close(ran.state, theta, rtol=1e-4, atol=1e-5)
    assert max(staleness_of(ran)) == 4
