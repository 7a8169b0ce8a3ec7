"""Metrics and pictures to Weights & Biases, if `log.wandb` asks for it."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from fedwan.config import Config
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.output.files import replace_text
from fedwan.output.records import EventRecord, QualityRecord, Record

_log = logging.getLogger(__name__)


class WandbLog:
    """Takes what the recorder takes, after it; does nothing if `log.wandb=disabled`.

    If it breaks in mid-run it is dropped with a warning: a dashboard must not end a training run.

    The run's name there is kept in its folder, so that a resumed run goes on.

    Raises:
        ConfigError: wandb is not installed or cannot be reached, or there is no login.
    """

    def __init__(self, config: Config, out: Path) -> None:
        self._run: Any = None
        self._lock = Lock()
        if config.log.wandb == "disabled":
            return
        # Imported only when asked for: it takes half a second, and starts a service.
        self._wandb = wandb = require("wandb", "wandb")
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
                mode=config.log.wandb,
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
        """Log a record."""
        if metrics := metrics_of(record):
            self._try(lambda run: run.log(metrics))

    def picture(self, path: Path, step: int) -> None:
        """Log a picture of samples."""
        self._try(lambda run: run.log({"step": step, "samples": self._wandb.Image(str(path))}))

    def close(self) -> None:
        """The run has ended."""
        self._try(lambda run: run.finish())

    def _try(self, action: Callable[[Any], object]) -> None:
        with self._lock:
            try:
                if self._run is not None:
                    action(self._run)
            except Exception as error:  # whatever the library raises, the run matters more
                self._run = None
                _log.warning("Weights & Biases is dropped: %s", error)


def metrics_of(record: Record) -> dict[str, float]:
    """A record as flat metrics with their step; empty for events."""
    if isinstance(record, EventRecord):
        return {}
    metrics: dict[str, float] = {"step": record.step, "version": record.version}
    if isinstance(record, QualityRecord):
        names = (name for name in record.figures if record.figure(name) is not None)
        return metrics | {f"quality/{name}": record.figures[name] for name in names}
    site = record.site
    metrics["round_s"] = record.round_s
    for name in ("samples", "compute_s", "wait_s", "bytes_up", "bytes_down"):
        metrics[f"{site}/{name}"] = getattr(record, name)
    for group, values in (
        ("loss", record.losses),
        ("norm", record.norms),
        ("cosine", record.cosines),
        ("figure", record.figures),
    ):
        for name, value in values.items():
            if value is not None:
                metrics[f"{site}/{group}/{name}"] = value
    return metrics


def _run_id(out: Path) -> str:
    path = out / "wandb" / "run-id"
    if not path.exists():
        replace_text(path, secrets.token_hex(4))
    return path.read_text().strip()
