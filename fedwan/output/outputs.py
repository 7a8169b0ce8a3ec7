"""Everything that a run writes to its folder, in the coordinator's hands."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

from safetensors.torch import load as load_tensors

from fedwan.config import Config, dump
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.files import hash_file, replace_text
from fedwan.output.journal import JOURNAL, Sign
from fedwan.output.records import EventRecord, QualityRecord, Record, Recorder, Resumed
from fedwan.output.report import write_report
from fedwan.output.samples import SAMPLES_KEPT, draw_samples
from fedwan.output.summary import Summary, privacy_of, write_summary
from fedwan.output.units import sites_text, subject

if TYPE_CHECKING:
    from fedwan.coordinator.records import Totals

_log = logging.getLogger(__name__)


class Outputs:
    """All files of a run's folder but its checkpoints and logs: see docs/export.md.

    A context: however the run ends, the report is written if it can be. Safe to call from several
    threads. A resumed run goes on from `resumed`; a new one has none. `sign` is `Journal`'s.
    """

    def __init__(
        self, config: Config, out: Path, resumed: Resumed | None = None, sign: Sign | None = None
    ) -> None:
        self._config = config
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        dump(config, out / "config.yaml")
        if resumed is None:
            # Left by a run that failed before its first checkpoint: no part of this one.
            for name in ("summary.json", "samples.png", "report.html"):
                (out / name).unlink(missing_ok=True)
        self._recorder = Recorder(out, resumed, sign)
        self._wandb = _WandbLog(config, out)
        self._is_kept_said = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.close()
        try:
            write_report(self._out)
        except Exception:  # the run's own end matters more
            _log.warning("the report cannot be written", exc_info=True)
        self._wandb.close()  # may wait for its server

    def agreed(self, config: Config) -> None:
        """The sites agree on what they train: nothing is left open in the configuration."""
        if config == self._config:
            return
        self._config = config
        dump(config, self._out / "config.yaml")
        text = f"sites agree on {', '.join(config.inner)}: {config.steps} steps, H = {config.h}"
        self.event("agreed", None, text, config=hash_file(self._out / "config.yaml"))

    def record(self, row: Mapping[str, Any]) -> None:
        """Append a row; see `fedwan.output.records`."""
        if record := self._recorder.write(row):
            self._wandb.write(record)

    def event(self, event: str, site: str | None, text: str, **details: Any) -> None:
        """Append an event."""
        self.record({"kind": "event", "event": event, "site": site, "text": text, **details})

    def samples(self, version: int, step: int, data: bytes) -> None:
        """Draw `samples.png` of a version, at a step of the run.

        `data`, from a site, is safetensors with `generated` and `real`, each where it may be shown;
        without `generated` an event says so once. Bytes that cannot be drawn become a warning.
        """
        config = self._config
        title = (
            f"{subject(config)} · {config.strategy} · {sites_text(config.num_sites)} · "
            f"H = {config.h} · seed {config.seed} · version {version}"
        )
        path = self._out / "samples.png"
        if not data:  # there is no way to make any
            return
        try:
            tensors = load_tensors(data)
            if "generated" in tensors:
                told = config.model.get("prompts", ())
                draw_samples(path, tensors["generated"], tensors.get("real"), title, told)
        except Exception as error:  # whatever a site sent, the run matters more
            text = f"samples of version {version} cannot be drawn: {' '.join(str(error).split())}"
            self.event("warning", None, text)
            return
        if "generated" in tensors:
            self._wandb.picture(path, step)
        elif not self._is_kept_said:
            self._is_kept_said = True
            self.event("samples_kept", None, SAMPLES_KEPT)

    def finish(
        self, totals: Totals, wall_s: float, versions: int, payload_bytes: int, sha256: str
    ) -> None:
        """Write the last event and `summary.json`.

        `wall_s` is of the whole run, resumed or not; `payload_bytes` of all networks in fp32,
        before framing; `sha256` of the final global weights.
        """
        config = self._config
        with (self._out / JOURNAL).open("rb") as lines:
            num_warnings = sum(b'"event":"warning"' in line for line in lines)
        busy_s = totals.compute_s + totals.wait_s
        chosen = "strategy workload h steps seed".split()
        summed = "bytes_up bytes_down contributions rejected rejoins late dropped".split()
        num_sites = max(config.num_sites, len(totals.sites))  # a run may go on with fewer
        summary = Summary(
            **{name: getattr(config, name) for name in chosen},
            **{name: getattr(totals, name) for name in summed},
            quality=totals.quality,
            quality_version=totals.quality_version,
            sites=config.num_sites,
            wall_s=wall_s,
            compute_s=totals.compute_s / num_sites,
            wait_s=totals.wait_s / num_sites,
            utilisation=totals.compute_s / busy_s if busy_s else 0.0,
            evaluation_s=totals.evaluation_s,
            rounds=versions,
            staleness=totals.staleness / max(1, totals.contributions),
            global_sha256=sha256,
            privacy=privacy_of(config.privacy, totals.epsilon),
            warnings=num_warnings,
        )
        text = f"{versions} rounds; global weights {sha256[:16]}"
        self.event("done", None, text, payload_bytes=payload_bytes, sha256=sha256)
        write_summary(summary, self._out / "summary.json")


_MOST_WANTED = 10_000
"""Records that wait for Weights & Biases."""
_LEAVE_S = 60.0
"""That its last records may take."""


class _WandbLog:
    """Takes what the recorder takes, after it; does nothing if `log.wandb=disabled`.

    If it breaks or hangs in mid-run it is dropped with a warning: a dashboard must not end a
    training run. A resumed run goes on under the name that is kept in its folder.
    """

    def __init__(self, config: Config, out: Path) -> None:
        self._run: Any = None
        self._wanted: Queue[Callable[[Any], object]] = Queue(_MOST_WANTED)
        self._worker: Thread | None = None
        if config.log.wandb == "disabled":
            return
        # Imported only when asked for: it takes half a second, and starts a service.
        self._wandb = wandb = require("wandb", "wandb")
        quiet = "silent disable_git disable_code x_disable_stats x_disable_machine_info".split()
        try:
            self._run = wandb.init(
                project="fedwan",
                mode=config.log.wandb,
                dir=str(out),
                id=_run_id(out),
                resume="allow",
                name=f"{config.workload}-{config.strategy}-s{config.seed}",
                config=dataclasses.asdict(config),
                settings=wandb.Settings(console="off", **dict.fromkeys(quiet, True)),
            )
        except (wandb.errors.Error, OSError) as error:
            reason, is_login = " ".join(str(error).split()), not isinstance(error, OSError)
            mend = "run `wandb login`, or set log.wandb=offline"
            mend = mend if is_login else "mend that, or set log.wandb=disabled"
            raise ConfigError(f"log.wandb = {config.log.wandb!r}: {reason}; {mend}") from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        if metrics := metrics_of(record):
            self._try(lambda run: run.log(metrics))

    def picture(self, path: Path, step: int) -> None:
        self._try(lambda run: run.log({"step": step, "samples": self._wandb.Image(str(path))}))

    def close(self) -> None:
        self._try(self._finish)
        if self._worker is not None:
            self._worker.join(_LEAVE_S)
            if self._worker.is_alive():
                self._drop(f"it has not ended in {_LEAVE_S:g} s; `wandb sync` sends what it has")

    def _try(self, action: Callable[[Any], object]) -> None:
        """In a thread of its own, one after the other: each may wait for its server."""
        if self._run is None:
            return
        if self._worker is None:
            self._worker = Thread(target=self._work, name="wandb", daemon=True)
            self._worker.start()
        try:
            self._wanted.put_nowait(action)
        except Full:
            self._drop("it takes nothing any more")

    def _work(self) -> None:
        while (run := self._run) is not None:
            try:
                self._wanted.get()(run)
            except Exception as error:  # whatever the library raises, the run matters more
                self._drop(str(error))

    def _finish(self, run: Any) -> None:
        run.finish()
        self._run = None

    def _drop(self, why: str) -> None:
        self._run = None
        _log.warning("Weights & Biases is dropped: %s", why)


def metrics_of(record: Record) -> dict[str, float]:
    """A record as flat metrics with their step; empty for events."""
    if isinstance(record, EventRecord):
        return {}
    metrics: dict[str, float] = {"step": record.step, "version": record.version}
    if isinstance(record, QualityRecord):
        found = {f"quality/{name}": value for name, value in record.numbers.items()}
    else:
        names = ("samples", "compute_s", "wait_s", "bytes_up", "bytes_down")
        of_site = {name: getattr(record, name) for name in names}
        groups = {"loss": "losses", "norm": "norms", "cosine": "cosines", "figure": "figures"}
        for group, field in groups.items():
            of_site |= {f"{group}/{name}": x for name, x in getattr(record, field).items()}
        found = {"round_s": record.round_s}
        found |= {f"{record.site}/{name}": value for name, value in of_site.items()}
    return metrics | {name: value for name, value in found.items() if value is not None}


def _run_id(out: Path) -> str:
    path = out / "wandb" / "run-id"
    if not path.exists():
        replace_text(path, secrets.token_hex(4))
    return path.read_text().strip()
