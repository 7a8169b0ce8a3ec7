"""FedAdam (Reddi et al. 2021, 2003.00295, algorithm 2), and 16 bits a value instead of bf16's.

A page of one's own: `strategies/fed_adam.py` in the folder that a run is started in, at every site
as well. `fedwan demo strategy=fed_adam`, or `strategy: fed_adam` in a run's file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec, Coded, Plain
from fedwan.codecs.payload import Bytes, tensor_from_bytes
from fedwan.config import Config, OuterConfig
from fedwan.outer import Transform
from fedwan.recipes import IN_ROUNDS, MERGES, codec, deltas_in_rounds
from fedwan.state import State, TensorSpec, tensor_bytes
from fedwan.strategy import Strategy

USES = (*IN_ROUNDS, "outer.*.lr", *MERGES)
DEFAULTS = {"h": 20, "outer.*": OuterConfig(lr=0.01, momentum=0.0)}


def build(config: Config) -> Strategy:
    """What sites and coordinator do with each delta, by a resolved configuration."""
    steps = {network: adam(outer.lr) for network, outer in config.outer.items()}
    up = fp16() if config.codec.up == "fp32" else codec(config, "up")
    return deltas_in_rounds(config, steps, up=up)


def adam(lr: float, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3) -> Transform:
    """m' = β1 m + (1 - β1) Δ, v' = β2 v + (1 - β2) Δ², θ' = θ - lr m' / (√v' + ε)."""

    def init(param: Tensor) -> State:
        return {"m": torch.zeros_like(param), "v": torch.zeros_like(param)}

    def update(delta: Tensor, state: State) -> tuple[Tensor, State]:
        m = beta1 * state["m"] + (1 - beta1) * delta
        v = beta2 * state["v"] + (1 - beta2) * delta.square()
        return m / (v.sqrt() + eps) * -lr, {"m": m, "v": v}

    return Transform(init, update)


def fp16() -> Codec:
    """Half precision. `encoding` is its number in a payload, above those of fedwan's own."""

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        clamped = value.clamp(-65504, 65504).where(value.isfinite(), value)  # inf is to be refused
        return tensor_bytes(clamped.detach().half()), None

    def read(data: Bytes, spec: TensorSpec) -> Coded:
        return Plain(tensor_from_bytes(data, torch.float16, spec.shape), torch.float32)

    return Codec("fp16", 100, encode, read, lambda spec: 2 * spec.num_values)
