"""Folders as a run leaves them, made without a run."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import torch

from fedwan.app import load_run, load_workload
from fedwan.config import Config, dump
from fedwan.state import Role, State, add_prefix, state_of, write_tensors
from fedwan.weights import load_initial

POINTS = ("workload=gan", "data.name=ring8", "model.width=4", "steps=100")


def write_run(out: Path, *words: str) -> tuple[Config, State]:
    """A run whose last weights are zero: its configuration, and the average, the initial ones."""
    config = load_run(None, [*POINTS, *words, f"out={out}"])
    built = load_workload(config.workload).build(config, "cpu")
    load_initial(built.networks, config)
    trained = {name: built.networks[name] for name in built.optimizers}
    home = {
        name: Role.EXCLUDED
        for network, patterns in config.excluded.items()
        for name in state_of({network: trained[network]})
        if any(fnmatchcase(name.partition("/")[2], pattern) for pattern in patterns)
    }
    state = state_of(trained, home)
    out.mkdir(parents=True)
    dump(config, out / "config.yaml")
    save_checkpoint(out, state)
    return config, state


def save_checkpoint(out: Path, state: State) -> None:
    last = {name: torch.zeros_like(value) for name, value in state.items()}
    tensors = add_prefix("ema", state) | add_prefix("global", last)
    write_tensors(out / "checkpoint" / "coordinator.safetensors", tensors, {})
