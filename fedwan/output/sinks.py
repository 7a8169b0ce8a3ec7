"""Where records go besides `metrics.jsonl`: Weights & Biases, if the run asks for it.

A sink that breaks in mid-run is dropped with a warning: a dashboard must not end a training run.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedwan.config import Config
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.output.files import replace_text
from fedwan.output.records import EventRecord, QualityRecord, Record, RoundRecord

__all__ = ["Sink", "WandbSink", "metrics_of", "open_sinks"]


class Sink(Protocol):
    """Takes what the recorder takes, after it."""

    def write(self, record: Record) -> None:
        """A record was written."""
        ...

    def picture(self, path: Path, step: int) -> None:
        """A picture of samples was drawn."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def open_sinks(config: Config, out: Path) -> list[Sink]:
    """The sinks that a configuration asks for.

    Raises:
        ConfigError: wandb is not installed or cannot be reached, or `log.wandb=online` without a
            login.
    """
    return [] if config.log.wandb == "disabled" else [WandbSink(config, out)]


class WandbSink:
    """Metrics and pictures to Weights & Biases; `log.wandb` says online or offline.

    Args:
        config: resolved; becomes the run's configuration there.
        out: the run's folder. The run's name there is kept in it, so that a resumed run goes on.
    """

    def __init__(self, config: Config, out: Path) -> None:
        # Imported only when asked for: it takes half a second, and starts a service.
        wandb = require("wandb", "wandb")
        self._wandb = wandb
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        try:
            self._run = wandb.init(
                project="fedwan",
                mode="online" if config.log.wandb == "online" else "offline",
                dir=str(out),
                id=_run_id(out),
                resume="allow",
                name=f"{config.workload}-{config.strategy}-s{config.seed}",
                config=dataclasses.asdict(config),
                settings=settings,
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"log.wandb = {config.log.wandb!r}: {reason}; "
                "run `wandb login`, or set log.wandb=offline"
            ) from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """See `Sink`."""
        if metrics := metrics_of(record):
            self._run.log(metrics)

    def picture(self, path: Path, step: int) -> None:
        """See `Sink`."""
        self._run.log({"step": step, "samples": self._wandb.Image(str(path))})

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()


def metrics_of(record: Record) -> dict[str, float]:
    """A record as flat metrics with their step; empty for events."""
    if isinstance(record, EventRecord):
        return {}
    metrics: dict[str, float] = {"step": record.step, "version": record.version}
    if isinstance(record, QualityRecord):
        names = (name for name in record.figures if record.figure(name) is not None)
        return metrics | {f"quality/{name}": record.figures[name] for name in names}
    return metrics | _round_metrics(record)


def _round_metrics(record: RoundRecord) -> dict[str, float]:
    site = record.site
    metrics: dict[str, float] = {f"{site}/samples": record.samples, "round_s": record.round_s}
    for name in ("compute_s", "wait_s", "bytes_up", "bytes_down"):
        metrics[f"{site}/{name}"] = getattr(record, name)
    groups: list[tuple[str, Mapping[str, Any]]] = [
        ("loss", record.losses),
        ("norm", record.norms),
        ("cosine", record.cosines),
        ("figure", record.figures),
    ]
    for group, values in groups:
        for name, value in values.items():
            if value is not None:
                metrics[f"{site}/{group}/{name}"] = value
    return metrics


def _run_id(out: Path) -> str:
    path = out / "wandb" / "run-id"
    if not path.exists():
        replace_text(path, secrets.token_hex(4))
    return path.read_text().strip()
