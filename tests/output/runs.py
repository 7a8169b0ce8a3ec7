"""A run as it would be left behind, made without training: helpers of this folder's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedwan.config import Config, DataConfig, LogConfig
from fedwan.coordinator.records import Totals
from fedwan.output.outputs import Outputs
from fedwan.output.records import Record, to_record

TOTALS = Totals(
    compute_s=8.0,
    wait_s=2.0,
    evaluation_s=3.0,
    bytes_up=4000,
    bytes_down=4100,
    contributions=4,
    rejoins=1,
    quality={"fd": 0.9, "fd_floor": 0.4},
)


def make_config(out: Path, wandb: str = "disabled") -> Config:
    return Config(
        sites=2,
        h=10,
        steps=20,
        out=str(out),
        data=DataConfig(batch=16),
        log=LogConfig(wandb=wandb),
    )


def round_row(version: int, site: str, loss: float = 0.7) -> dict[str, Any]:
    return {
        "kind": "round",
        "version": version,
        "run_step": 10 * version,
        "site": site,
        "step": 10 * version,
        "samples": 160 * version,
        "losses": {"generator": loss, "discriminator": 0.5},
        "compute_s": 2.0,
        "wait_s": 0.5,
        "bytes_up": 1000,
        "bytes_down": 1025,
        "norms": {"generator": 2.0, "discriminator": 1.0},
        "round_s": 2.5,
    }


def quality_row(version: int, fd: float) -> dict[str, Any]:
    figures = {"fd": fd, "fd_floor": 0.4, "num_real": 500, "histogram": [1, 2]}
    return {"kind": "quality", "version": version, "step": 10 * version, **figures}


def write_run(outputs: Outputs, *, finish: bool) -> None:
    """Two sites, two rounds, an absence, three evaluations."""
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    outputs.event("listening", None, "data plane listens")
    for site in ("s1", "s2"):
        outputs.event("join", site, f"{site} joined at version 0")
    outputs.record(quality_row(0, 80.0))
    for version in (1, 2):
        for site in ("s1", "s2"):
            outputs.record(round_row(version, site, loss=float("nan") if version == 1 else 0.7))
        outputs.record(quality_row(version, 8.0 / version))
        outputs.samples(version, 10 * version, save({"generated": images, "real": images.clone()}))
    outputs.event("rejoin", "s2", "s2 <rejoined> & is back")
    if finish:
        outputs.finish(TOTALS, 12.5, 2, 500, "ab" * 32)


def record_of(row: dict[str, Any], t: float) -> Record:
    record = to_record(row | {"t": t})
    assert record is not None
    return record


def event_row(name: str, site: str | None) -> dict[str, Any]:
    return {"kind": "event", "event": name, "site": site, "text": f"{site} {name}"}


def event(name: str, site: str | None, t: float = 0.0) -> Record:
    return record_of(event_row(name, site), t)
