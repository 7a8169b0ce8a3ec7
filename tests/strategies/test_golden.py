"""Golden trajectories: whole runs against plain loops that spell the papers' equations out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan import outer
from fedwan.codecs import fp32, topk2
from fedwan.config import InnerConfig
from fedwan.fragments import Fragment, due_step, often, strided, whole
from fedwan.outer.step import step_outer
from fedwan.protocol.policy import RoundPolicy
from fedwan.rng import NamedGenerators
from fedwan.state import State, clone, ema_name, layout_of, state_of
from fedwan.strategy import Overlap, Strategy
from strategies.eager_diloco import Eager, LookAhead
from strategies.scaffnew import ControlVariates
from tests.support import (
    ADAM,
    BATCH,
    NET,
    TinyWorkload,
    keep_local,
    run_tiny,
    same_bits,
    tiny_config,
    tiny_shard,
)

GAN = {"discriminator": ADAM, "generator": ADAM}
SITES, H, STEPS = 3, 6, 24
LR, MOMENTUM = 0.6, 0.9
OWN = Eager(share=LR * (1 + MOMENTUM) / SITES, momentum=MOMENTUM)


class Site:
    """A site of the reference loop: its weights, and what is in flight."""

    def __init__(self, index: int, net: Mapping[str, InnerConfig]) -> None:
        self.workload = TinyWorkload(net)
        self.rng = NamedGenerators(0, f"s{index + 1}")
        self.stream = tiny_shard(index).loader(BATCH, self.rng["data"])
        self.weights: Mapping[str, Tensor] = state_of(self.workload.networks)
        self.departed: dict[int, State] = {}
        self.estimates: State = {}

    def step(self) -> None:
        self.workload.step(self.stream.__next__(), self.rng, keep_local)


def reference(
    fragments: tuple[Fragment, ...],
    overlap: Overlap,
    net: Mapping[str, InnerConfig] = NET,
    eager: bool = False,
) -> State:
    """The global weights after a run, one process, nothing but the equations."""
    sites = [Site(index, net) for index in range(SITES)]
    theta = {name: value.clone() for name, value in sites[0].weights.items()}
    buffer = {name: torch.zeros_like(value) for name, value in theta.items()}
    landing: dict[int, list[Fragment]] = {}

    def merge(fragment: Fragment) -> None:
        """θ' = θ - lr (Δ + momentum b'), b' = momentum b + Δ, with Δ the mean over sites."""
        for name in fragment.layout:
            held = [site.departed[fragment.index][name] for site in sites]
            delta = sum(theta[name] - value for value in held) / SITES
            buffer[name] = MOMENTUM * buffer[name] + delta
            theta[name] = theta[name] - LR * (delta + MOMENTUM * buffer[name])

    def estimate(name: str, held: Tensor) -> Tensor:
        """What the outer step would give if this site's Δ were the only one, others' being 0."""
        pushed = MOMENTUM * buffer[name]
        own = (theta[name] - held) / SITES
        return theta[name] - LR * (own + MOMENTUM * (pushed + own))

    def depart(fragment: Fragment) -> None:
        for site in sites:
            held = {name: site.weights[name].clone() for name in fragment.layout}
            site.departed[fragment.index] = held
            for name in fragment.layout if eager else ():
                site.estimates[name] = estimate(name, held[name])
                site.weights[name].copy_(site.estimates[name])

    def land(fragment: Fragment, is_last: bool) -> None:
        merge(fragment)
        for site in sites:
            for name in fragment.layout:
                local, new = site.weights[name], theta[name]
                if is_last or not tau_of(fragment):
                    local.copy_(new)
                elif eager:
                    local.add_(new - site.estimates[name])
                else:
                    local.copy_(overlap.alpha * local + (1 - overlap.alpha) * new)

    def tau_of(fragment: Fragment) -> int:
        return min(overlap.tau, H // fragment.per_round - 1)

    versions = [0] * len(fragments)
    for step in range(1, STEPS + 1):
        for site in sites:
            site.step()
        is_last = step == STEPS
        for at in [at for at in landing if is_last or at == step]:
            for fragment in landing.pop(at):
                land(fragment, is_last=False)  # it leaves once more, with its latest steps
        for fragment in fragments:
            if due_step(fragment, versions[fragment.index], H, STEPS) == step:
                versions[fragment.index] += 1
                depart(fragment)
                if is_last or not tau_of(fragment):
                    land(fragment, is_last)
                else:
                    landing.setdefault(step + tau_of(fragment), []).append(fragment)
    assert versions == [STEPS // H * fragment.per_round for fragment in fragments]
    return theta


OVERLAPS = {
    "barrier": Overlap(),
    "blend": Overlap(tau=2, alpha=0.5),
    "blend to the last step": Overlap(tau=H - 1, alpha=0.25),
    "discard": Overlap(tau=3, alpha=0.0),
    "eager": Overlap(tau=4),
    "eager to the last step": Overlap(tau=H - 1),
}


@pytest.mark.parametrize(
    ("name", "count", "times"),
    [*((name, 2, 1) for name in OVERLAPS), ("barrier", 1, 1), ("eager", 1, 1)]
    + [("barrier", 1, 2), ("barrier", 2, H), ("blend", 2, 3), ("blend to the last step", 2, 2)],
)
def test_fragments_overlap_and_networks_that_travel_more_often_follow_the_equations(
    name: str, count: int, times: int, tmp_path: Path
) -> None:
    overlap, eager, cut, net = OVERLAPS[name], name.startswith("eager"), strided(count, H), NET
    if times > 1:
        cut, net = often({"discriminator": times}, cut), GAN
    strategy = Strategy(
        "delta",
        H,
        cut,
        step_outer({network: outer.nesterov(LR, MOMENTUM) for network in net}),
        fp32(),
        fp32(),
        RoundPolicy(SITES, SITES),
        overlap=overlap,
        hook=partial(LookAhead, {"velocity": OWN}) if eager else None,
    )
    ran = run_tiny(tmp_path, tiny_config("diloco", net, sites=SITES, h=H, steps=STEPS), strategy)
    expected = reference(cut(layout_of(TinyWorkload(net).networks)), overlap, net, eager)
    torch.testing.assert_close(ran.state, expected, rtol=1e-4, atol=1e-5)
    assert len(ran.hashes) == 1


@pytest.mark.parametrize(("often_by", "momentum"), [(1, 0.0), (3, 0.5)])
def test_control_variates_follow_the_equations(
    often_by: int, momentum: float, tmp_path: Path
) -> None:
    """Scaffnew, algorithm 1: x <- x - step + e; e <- e + (mean x - x) / H; and pushes of all."""
    cut = often({"discriminator": often_by}, whole) if often_by > 1 else whole
    step = step_outer({network: outer.sgd(1.0) for network in GAN})
    policy = RoundPolicy(SITES, SITES)
    hook = partial(ControlVariates, dict.fromkeys(GAN, momentum))
    strategy = Strategy("delta", H, cut, step, fp32(), fp32(), policy, hook=hook)
    ran = run_tiny(tmp_path, tiny_config("diloco", GAN, sites=SITES, h=H, steps=STEPS), strategy)
    sites = [Site(index, GAN) for index in range(SITES)]
    owed = [{name: torch.zeros_like(v) for name, v in site.weights.items()} for site in sites]
    starts = {name: value.clone() for name, value in sites[0].weights.items()}
    pushes = {name: torch.zeros_like(value) for name, value in starts.items()}
    for count in range(1, STEPS + 1):
        for site, variates in zip(sites, owed, strict=True):
            site.step()
            for name, value in site.weights.items():
                value.add_(variates[name]).add_(pushes[name])
        for name in sites[0].weights:
            steps = H // often_by if name.startswith("discriminator") else H
            if count % steps:
                continue
            mean = torch.stack([site.weights[name] for site in sites]).mean(0)
            for site, variates in zip(sites, owed, strict=True):
                variates[name] += (mean - site.weights[name]) / steps
                site.weights[name].copy_(mean)
            pushes[name], starts[name] = momentum * (mean - starts[name]) / steps, mean.clone()
            # Their mean moves as if nothing were added.
            total = torch.stack([variates[name] for variates in owed]).sum(0)
            torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-6)
    torch.testing.assert_close(ran.state, sites[0].weights, rtol=1e-4, atol=1e-5)
    assert any(variates[name].abs().max() > 1e-4 for variates in owed for name in variates)


@pytest.mark.parametrize(("h", "momentum"), [(1, 0.0), (H, 0.5)])
def test_an_average_over_every_step_of_every_site_follows_the_equation(
    h: int, momentum: float, tmp_path: Path
) -> None:
    """e <- e + (1 - 2^(-10 / steps)) (x - e) at each site, and its mean where weights are merged.

    With H = 1 and plain averaging it is the coordinator's own average of the merged weights.
    """
    words = {"outer": {"velocity": {"lr": 1.0, "momentum": momentum}}}
    net = {"velocity": replace(ADAM, state="ema")}
    ran = run_tiny(
        tmp_path / "e", tiny_config("diloco", net, sites=SITES, h=h, steps=STEPS, **words)
    )
    sites = [Site(index, NET) for index in range(SITES)]
    theta = {name: value.clone() for name, value in sites[0].weights.items()}
    buffer = {name: torch.zeros_like(value) for name, value in theta.items()}
    averages = [{name: v.clone() for name, v in theta.items()} for _ in sites]
    for count in range(1, STEPS + 1):
        for site, average in zip(sites, averages, strict=True):
            site.step()
            for name, value in site.weights.items():
                average[name].lerp_(value, 1 - 2 ** (-10 / STEPS))
        for name in theta if count % h == 0 else ():
            delta = theta[name] - torch.stack([site.weights[name] for site in sites]).mean(0)
            buffer[name] = momentum * buffer[name] + delta
            theta[name] = theta[name] - delta - momentum * buffer[name]
            merged = torch.stack([average[name] for average in averages]).mean(0)
            for site, average in zip(sites, averages, strict=True):
                site.weights[name].copy_(theta[name])
                average[name].copy_(merged)
    torch.testing.assert_close(ran.state, theta | add_ema(averages[0]), rtol=1e-4, atol=1e-5)
    assert same_bits(
        add_ema(ran.result.model.ema), {n: v for n, v in ran.state.items() if "|" in n}
    )
    assert len(ran.hashes) == 1
    if h == 1:
        plain = run_tiny(tmp_path / "p", tiny_config(sites=SITES, h=h, steps=STEPS, **words))
        torch.testing.assert_close(
            plain.result.model.ema, ran.result.model.ema, rtol=1e-4, atol=1e-5
        )


def add_ema(state: State) -> State:
    return {ema_name(name): value for name, value in state.items()}


# Error feedback ----------------------------------------------------------------------------------


def quantised(delta: State) -> State:
    """Q(TopK(Δ)), by the codec, whose own tests pin its bytes."""
    layout = layout_of(TinyWorkload(NET).networks)
    payload, _ = topk2(MOMENTUM).encode(clone(delta), {}, layout)
    return topk2(MOMENTUM).decode(payload, layout)


def reference_of_feedback(owes: str) -> State:
    """Either a = β e + Δ and e' = a - Q(a), or a = θ - l and l' = θ' - (a - Q(a))."""
    sites = [Site(index, NET) for index in range(SITES)]
    theta = {name: value.clone() for name, value in sites[0].weights.items()}
    owed = [{name: torch.zeros_like(value) for name, value in theta.items()} for _ in sites]
    for count in range(H, STEPS + 1, H):
        sent = []
        for i, site in enumerate(sites):
            for _ in range(H):
                site.step()
            full = {n: theta[n] - site.weights[n] for n in theta}
            if owes == "residual":
                full = {n: full[n] + MOMENTUM * owed[i][n] for n in theta}
            sent.append(quantised(full))
            owed[i] = {n: full[n] - sent[i][n] for n in theta}
        theta = {n: theta[n] - sum(s[n] for s in sent) / SITES for n in theta}
        for i, site in enumerate(sites):
            is_kept = owes == "weights" and count < STEPS
            for n, value in site.weights.items():
                value.copy_(theta[n] - owed[i][n] if is_kept else theta[n])
    return theta


@pytest.mark.parametrize("owes", ["residual", "weights"])
def test_what_is_owed_is_sent_later(owes: Any, tmp_path: Path) -> None:
    step, policy = step_outer({"velocity": outer.sgd(1.0)}), RoundPolicy(SITES, SITES)
    strategy = Strategy("delta", H, whole, step, topk2(MOMENTUM), fp32(), policy, owes=owes)
    ran = run_tiny(tmp_path, tiny_config(sites=SITES, h=H, steps=STEPS), strategy)
    torch.testing.assert_close(ran.state, reference_of_feedback(owes), rtol=1e-4, atol=1e-5)
    assert len(ran.hashes) == 1
