"""Everything that a run writes to its folder, in the coordinator's hands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from fedwan.config import Config, dump
from fedwan.errors import ConfigError
from fedwan.output.records import Recorder
from fedwan.output.report import write_report
from fedwan.output.samples import SAMPLES_KEPT, draw_samples
from fedwan.output.summary import Summary, write_summary
from fedwan.output.units import sites_text, subject
from fedwan.output.wandb_log import WandbLog

if TYPE_CHECKING:
    from fedwan.coordinator.records import Totals


class Outputs:
    """`config.yaml`, `metrics.jsonl`, `samples.png`, `summary.json` and `report.html` of a run.

    A context: however the run ends, the report is written. Safe to call from several threads. A
    resumed run goes on from `resumed_version`; a new one has none.

    Raises:
        ConfigError: see `WandbLog`.
    """

    def __init__(self, config: Config, out: Path, resumed_version: int | None = None) -> None:
        self._config = config
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        dump(config, out / "config.yaml")
        if resumed_version is None:
            # Left by a run that failed before its first checkpoint: no part of this one.
            for name in ("summary.json", "samples.png", "report.html"):
                (out / name).unlink(missing_ok=True)
        self._recorder = Recorder(out / "metrics.jsonl", resumed_version)
        self._wandb = WandbLog(config, out)
        self._is_kept_said = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.close()
        self._wandb.close()
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
        self._wandb.write(self._recorder.write(row))

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
            f"{subject(config)} · {config.strategy} · {sites_text(config.sites)} · "
            f"H = {config.h} · seed {config.seed} · version {version}"
        )
        path = self._out / "samples.png"
        try:
            tensors = load_tensors(data)
            if "generated" in tensors:
                draw_samples(path, tensors["generated"], tensors.get("real"), title)
        except (SafetensorError, ValueError, ConfigError) as error:
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
        """Write `summary.json` and the last event.

        `wall_s` is of the whole run, resumed or not; `payload_bytes` of all networks in fp32,
        before framing; `sha256` of the final global weights.
        """
        config = self._config
        busy_s = totals.compute_s + totals.wait_s
        chosen = "strategy workload sites h steps seed".split()
        summed = "bytes_up bytes_down contributions rejected rejoins late dropped quality".split()
        summary = Summary(
            **{name: getattr(config, name) for name in chosen},
            **{name: getattr(totals, name) for name in summed},
            wall_s=wall_s,
            compute_s=totals.compute_s / config.sites,
            wait_s=totals.wait_s / config.sites,
            utilisation=totals.compute_s / busy_s if busy_s else 0.0,
            rounds=versions,
            staleness=totals.staleness / max(1, totals.contributions),
            global_sha256=sha256,
        )
        write_summary(summary, self._out / "summary.json")
        text = f"{versions} rounds; global weights {sha256[:16]}"
        self.event("done", None, text, payload_bytes=payload_bytes)
