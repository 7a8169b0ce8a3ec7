"""Golden trajectories of error feedback, against plain loops that spell the equations out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from fedwan import outer
from fedwan.codecs import fp32, topk2
from fedwan.coordinator.policy import barrier
from fedwan.coordinator.server_step import step_outer
from fedwan.fragments import whole
from fedwan.rng import NamedGenerators
from fedwan.simulate import SimulatedSite, simulate
from fedwan.state import State, hash_state, layout_of, state_of
from fedwan.strategy import Strategy
from fedwan.workloads.base import keep_local
from tests.support import ADAM, TinyWorkload, tiny_shard

NET = {"velocity": ADAM}
SITES, H, ROUNDS, BATCH, BETA = 3, 4, 6, 4, 0.9


def quantised(delta: State) -> State:
    """Q(TopK(Δ)), by the codec, whose own tests pin its bytes."""
    layout = layout_of(TinyWorkload(NET).networks)
    codec = topk2(BETA)
    payload, _ = codec.encode(delta, {}, layout)
    return codec.decode(payload, layout)


def reference(owes: Literal["residual", "weights"]) -> State:
    """Either a = β e + Δ and e' = a - Q(a), or a = θ - l and l' = θ' - (a - Q(a))."""
    workloads = [TinyWorkload(NET) for _ in range(SITES)]
    rngs = [NamedGenerators(0, f"s{i + 1}") for i in range(SITES)]
    streams = [tiny_shard(i).loader(BATCH, r["data"]) for i, r in enumerate(rngs)]
    local: list[State] = [dict(state_of(w.networks)) for w in workloads]
    theta = {name: value.clone() for name, value in local[0].items()}
    owed = [{name: torch.zeros_like(value) for name, value in theta.items()} for _ in local]
    for round_ in range(ROUNDS):
        sent = []
        for i, workload in enumerate(workloads):
            for _ in range(H):
                workload.step(next(streams[i]), rngs[i], keep_local)
            full = {n: theta[n] - local[i][n] for n in theta}
            if owes == "residual":
                full = {n: full[n] + BETA * owed[i][n] for n in theta}
            sent.append(quantised(full))
            owed[i] = {n: full[n] - sent[i][n] for n in theta}
        theta = {n: theta[n] - sum(s[n] for s in sent) / SITES for n in theta}
        for i, weights in enumerate(local):
            is_kept = owes == "weights" and round_ < ROUNDS - 1
            for n, value in weights.items():
                value.copy_(theta[n] - owed[i][n] if is_kept else theta[n])
    return theta


@pytest.mark.parametrize("owes", ["residual", "weights"])
def test_what_is_owed_is_sent_later(owes: Literal["residual", "weights"], tmp_path: Path) -> None:
    strategy = Strategy(
        "delta",
        H,
        whole,
        step_outer({"velocity": outer.sgd(1.0)}),
        topk2(BETA),
        fp32(),
        barrier(SITES),
        owes=owes,
    )
    members = {f"s{i + 1}": SimulatedSite(TinyWorkload(NET), tiny_shard(i)) for i in range(SITES)}
    ran = simulate(members, strategy, tmp_path, num_steps=H * ROUNDS, batch=BATCH)
    torch.testing.assert_close(ran.model.state, reference(owes), rtol=1e-4, atol=1e-5)
    assert {hash_state(ran.model.state)} == set(ran.site_sha256.values())
