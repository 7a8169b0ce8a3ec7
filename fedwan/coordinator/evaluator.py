"""What sites found together when they measured quality.

Of data that all share, two sites that measure the same version should find the same. Where they do
not, one of them lies, or computes otherwise: it is told, and what is worse is kept.

Where each site has data of its own, the Frechet distance is that of all their held-out data
together: they hand in moments, never samples. Other figures are means over the sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import safetensors.torch

from fedwan.config import COMMAND, Config
from fedwan.coordinator.federation import Federation
from fedwan.coordinator.records import Totals
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.limits import Report
from fedwan.state import State, select_prefix

TOLERANCE = 0.05
"""By which an fd of the same weights may differ between sites, of other hardware at most."""
PAST_VERSIONS = 1000
"""Versions whose place in the run is remembered, for reports of quality that come later."""


class Evaluated(NamedTuple):
    """The quality of a version."""

    sites: tuple[str, ...]
    """That measured it."""
    version: int
    figures: dict[str, Any]
    samples: bytes
    """See `Report`: pictures of the first site that shows any."""
    evaluation_s: float
    """The longest of a site's."""
    complaint: str = ""
    """Why figures are not those of all data together."""


@dataclass
class Evaluator:
    """Has the average of the weights measured, and keeps what was found."""

    config: Config
    hub: Federation
    totals: Totals
    record: Callable[[dict[str, Any]], None]
    on_samples: Callable[[int, int, bytes], None]
    _steps: dict[int, int] = field(default_factory=dict)
    _latest: Evaluated | None = None

    def note(self, version: int, step: int) -> None:
        """Where in the run a version is."""
        self._steps[version] = step
        if len(self._steps) > PAST_VERSIONS:
            del self._steps[next(iter(self._steps))]

    def ask(self) -> list[str]:
        """Have the weights measured, if possible by a site that keeps up; who was asked."""
        hub = self.hub
        with hub.changed:
            is_last = hub.rounds.is_done
            asked = hub.evaluation.choose(hub.live(), hub.rounds.latest, is_last=is_last)
            kind, version = wire.CoordinatorSignal.EVALUATE, hub.rounds.version
            for site in asked:
                hub.registry.tell(site, kind, version=version)
                self.begin(site, version)
        return asked

    def begin(self, site: str, version: int) -> None:
        """A site measures a version from now on."""
        step = self._steps.get(version, 0)
        self.hub.event("measuring", site, f"{site} measures version {version} (step {step})")

    def take(self) -> None:
        """Keep what has been found since the last call."""
        with self.hub.changed:
            found = self.hub.evaluation.found(self.hub.live())
        for reports in found:
            self._keep(find(reports))

    def end(self, version: int) -> None:
        """Keep what came late, and tell of a last version that nobody has measured in time."""
        self.take()
        known = self.totals.quality_version
        if known < version and self.totals.quality:
            text = f"version {version} was not measured; the quality that is told is of version "
            text += f"{known}: raise round.patience_s if measuring takes so long"
            self.hub.event("warning", None, text)

    def wants(self, version: int) -> bool:
        """Whether that of a version is still to come; asks who can tell."""
        hub = self.hub
        with hub.changed:
            live = hub.live()
            if self.totals.quality_version >= version:
                return not hub.evaluation.is_idle(live)  # another one may find something else
            joined = sum(bool(site.session) for site in hub.registry.sites.values())
            if hub.evaluation.asks_all and joined < hub.rounds.quorum:
                return True  # resumed at its end: the data of who comes later count as well
            # Else what all of them answered was refused.
            return not hub.evaluation.is_idle(live) or bool(self.ask()) or not live

    def _keep(self, finding: Evaluated) -> None:
        sites, version, figures, samples, evaluation_s, complaint = finding
        self.totals.evaluation_s += evaluation_s
        site = ", ".join(sites)
        if seen := seen_through(self.config, figures):
            figures = figures | {"seen_through": seen}
        if not math.isfinite(figures.get("fd", 0.0)):
            self.hub.event("warning", site, f"{site} measured an fd of {figures.get('fd')}")
        if complaint:
            self.hub.event("warning", site, complaint)
        step = self._steps.get(version, 0)
        before, self._latest = self._latest, finding
        if before and before.version == version and before.sites != sites:
            if self.hub.evaluation.pairs and (text := disagreement(before, finding)):
                self.hub.event("warning", None, text)
            if not _fd(finding) > _fd(before):
                self._latest = before
                return
        if version >= self.totals.quality_version:
            self.totals.quality, self.totals.quality_version = figures, version
            self.on_samples(version, step, samples)
        self.record(figures | {"kind": "quality", "version": version, "step": step, "site": site})


def find(reports: Mapping[str, Report]) -> Evaluated:
    """What sites found, in the order of their names."""
    if len(reports) == 1:
        ((site, report),) = reports.items()
        return Evaluated((site,), *report)
    # Imported here: feature networks and data sets come with it, which other runs do without.
    from fedwan.metrics.distances import merge_comparisons, unpack_comparisons

    sites = tuple(sorted(reports))
    figures = _means([reports[site].figures for site in sites])
    complaint = ""
    shown = {
        site: safetensors.torch.load(report.samples) if report.samples else State()
        for site, report in reports.items()
    }
    try:
        parts = [select_prefix("moments", shown[site]) for site in sites]
        if any(parts):  # some evaluate in a way of their own
            figures |= merge_comparisons([unpack_comparisons(part) for part in parts])
            if "num_real" in figures:  # together
                figures["num_real"] = round(figures["num_real"] * len(reports))
    except Exception as error:  # whatever a site sent, the run matters more
        complaint = f"fd is the mean over sites, not that of their data together: {error}"
    drawn = next((site for site in sites if "generated" in shown[site]), sites[0])
    version = max(report.version for report in reports.values())
    longest_s = max(report.evaluation_s for report in reports.values())
    return Evaluated(sites, version, figures, reports[drawn].samples, longest_s, complaint)


def seen_through(config: Config, figures: Mapping[str, Any]) -> str:
    """What images were seen through when their distance was measured; '' of points and scripts."""
    is_own = config.workload == COMMAND or not figures.keys() >= {"fd", "num_real"}
    if is_own or "modes" in figures:
        return ""
    if config.eval.features:
        return Path(config.eval.features).name
    return "own classifier" if "histogram" in figures else "random features"


def disagreement(one: Evaluated, other: Evaluated) -> str:
    """What to tell of two sites that measured the same weights on the same data; or nothing."""
    if math.isclose(_fd(one), _fd(other), rel_tol=TOLERANCE):
        return ""
    told = " and ".join(
        f"{', '.join(each.sites)} an fd of {_fd(each):.4g}" for each in (one, other)
    )
    return (
        f"of version {one.version} {told} were measured by sites on the same data: one of them is "
        "wrong, or their hardware or libraries differ; the larger one is kept"
    )


def _fd(finding: Evaluated) -> float:
    """The larger the worse."""
    fd = finding.figures.get("fd", 0.0)
    return fd if math.isfinite(fd) else math.inf


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the numbers, and lists of as many of them, that all rows hold."""
    means: dict[str, Any] = {}
    for key in rows[0]:
        values: list[Any] = [row.get(key) for row in rows]
        if all(isinstance(value, int | float) for value in values):
            means[key] = fmean(values)
        elif all(isinstance(v, list) and len(v) == len(rows[0][key]) for v in values):
            means[key] = list(map(fmean, zip(*values, strict=True)))
    return means
