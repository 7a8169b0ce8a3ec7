"""Everything that a run writes to its folder, in the coordinator's hands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from fedwan.config import Config, dump
from fedwan.errors import ConfigError
from fedwan.output.records import Record, Recorder
from fedwan.output.report import write_report
from fedwan.output.samples import SAMPLES_KEPT, draw_samples
from fedwan.output.sinks import Sink, open_sinks
from fedwan.output.summary import Summary, write_summary
from fedwan.output.units import subject

if TYPE_CHECKING:
    from fedwan.coordinator.totals import Totals

__all__ = ["Outputs"]

_log = logging.getLogger(__name__)


class Outputs:
    """`config.yaml`, `metrics.jsonl`, `samples.png`, `summary.json` and `report.html` of a run.

    A context: however the run ends, the report is written and the sinks are closed. Safe to call
    from several threads.

    Args:
        config: resolved.
        out: the run's folder; made if need be.
        resumed_version: the version that a resumed run goes on from; None for a new run.

    Raises:
        ConfigError: see `open_sinks`.
    """

    def __init__(self, config: Config, out: Path, resumed_version: int | None = None) -> None:
        self._config = config
        self._out = out
        self._lock = Lock()
        out.mkdir(parents=True, exist_ok=True)
        dump(config, out / "config.yaml")
        if resumed_version is None:
            # Left by a run that failed before its first checkpoint: no part of this one.
            for name in ("summary.json", "samples.png", "report.html"):
                (out / name).unlink(missing_ok=True)
        self._recorder = Recorder(out / "metrics.jsonl", resumed_version)
        self._sinks: list[Sink] = open_sinks(config, out)
        self._is_kept_said = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recorder.close()
        self._each_sink(lambda sink: sink.close())
        write_report(self._out)

    def agreed(self, config: Config) -> None:
        """The sites agree on what they train: nothing is left open in the configuration."""
        if config == self._config:
            return
        self._config = config
        dump(config, self._out / "config.yaml")
        networks = ", ".join(config.inner)
        self.event(
            "agreed", None, f"sites agree on {networks}: {config.steps} steps, H = {config.h}"
        )

    def record(self, row: Mapping[str, Any]) -> None:
        """Append a row to `metrics.jsonl`; see `fedwan.output.records`."""
        record: Record = self._recorder.write(row)
        self._each_sink(lambda sink: sink.write(record))

    def event(self, event: str, site: str | None, text: str) -> None:
        """Append an event."""
        self.record({"kind": "event", "event": event, "site": site, "text": text})

    def samples(self, version: int, step: int, data: bytes) -> None:
        """Draw `samples.png`.

        Args:
            version: that the samples are of.
            step: of the run, at that version.
            data: safetensors with `generated` and `real`, each where it may be shown; without
                `generated` an event says so once. They come from a site: bytes that cannot be
                drawn become a warning.
        """
        config = self._config
        title = (
            f"{subject(config)} · {config.strategy} · {config.sites} sites · "
            f"H = {config.h} · seed {config.seed} · version {version}"
        )
        path = self._out / "samples.png"
        try:
            tensors = load_tensors(data)
            if "generated" not in tensors:
                self._say_kept()
                return
            draw_samples(path, tensors["generated"], tensors.get("real"), title)
        except (SafetensorError, ValueError, ConfigError) as error:
            text = f"samples of version {version} cannot be drawn: {' '.join(str(error).split())}"
            self.event("warning", None, text)
            return
        self._each_sink(lambda sink: sink.picture(path, step))

    def _say_kept(self) -> None:
        if not self._is_kept_said:
            self._is_kept_said = True
            self.event("samples_kept", None, SAMPLES_KEPT)

    def finish(
        self, totals: Totals, wall_s: float, versions: int, payload_bytes: int, sha256: str
    ) -> None:
        """Write `summary.json` and the last event.

        Args:
            totals: sums over the run and its sites.
            wall_s: of the whole run, resumed or not.
            versions: rounds.
            payload_bytes: of all networks in fp32, before framing.
            sha256: of the final global weights.
        """
        config = self._config
        busy_s = totals.compute_s + totals.wait_s
        summary = Summary(
            strategy=config.strategy,
            workload=config.workload,
            sites=config.sites,
            h=config.h,
            steps=config.steps,
            seed=config.seed,
            wall_s=wall_s,
            compute_s=totals.compute_s / config.sites,
            wait_s=totals.wait_s / config.sites,
            utilisation=totals.compute_s / busy_s if busy_s else 0.0,
            bytes_up=totals.bytes_up,
            bytes_down=totals.bytes_down,
            rounds=versions,
            contributions=totals.contributions,
            rejected=totals.rejected,
            rejoins=totals.rejoins,
            late=totals.late,
            dropped=totals.dropped,
            staleness=totals.staleness / max(1, totals.contributions),
            quality=totals.quality,
            global_sha256=sha256,
        )
        write_summary(summary, self._out / "summary.json")
        self.record(
            {
                "kind": "event",
                "event": "done",
                "site": None,
                "text": f"{versions} rounds; global weights {sha256[:16]}",
                "payload_bytes": payload_bytes,
            }
        )

    def _each_sink(self, action: Callable[[Sink], None]) -> None:
        with self._lock:
            for sink in list(self._sinks):
                try:
                    action(sink)
                except Exception as error:
                    # Whatever a dashboard's library raises, the run matters more.
                    self._sinks.remove(sink)
                    _log.warning("%s is dropped: %s", type(sink).__name__, error)
