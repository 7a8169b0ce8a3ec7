"""Golden trajectories of error feedback, against plain loops that spell the equations out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from fedwan import outer
from fedwan.codecs import fp32, topk2
from fedwan.coordinator.server_step import step_outer
from fedwan.fragments import whole
from fedwan.protocol.policy import barrier
from fedwan.rng import NamedGenerators
from fedwan.state import State, layout_of, state_of
from fedwan.strategy import Strategy
from fedwan.workloads.base import keep_local
from tests.support import BATCH, NET, TinyWorkload, run_tiny, tiny_config, tiny_shard

SITES, H, ROUNDS, BETA = 3, 4, 6, 0.9


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
                workload.step(streams[i].__next__(), rngs[i], keep_local)
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
    config = tiny_config(sites=SITES, h=H, steps=H * ROUNDS)
    ran = run_tiny(tmp_path, config, strategy)
    torch.testing.assert_close(ran.state, reference(owes), rtol=1e-4, atol=1e-5)
    assert len(ran.hashes) == 1
