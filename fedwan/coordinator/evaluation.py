"""Which sites measure quality, and what they found together.

Of data that sites share any of them measures the same, so one is asked. Where each site has data of
its own all are asked, and the Frechet distance is that of all their held-out data together: they
hand in moments, never samples. Other figures are means over the sites.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError

from fedwan.errors import FedwanError, PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.state import State, select_prefix

__all__ = ["Finding", "Evaluator"]


class Finding(NamedTuple):
    """The quality of a version."""

    sites: tuple[str, ...]
    """That measured it."""
    version: int
    figures: dict[str, Any]
    samples: bytes
    """See `QualityReport`: pictures of the first site that shows any."""
    complaint: str = ""
    """Why figures are not those of all data together."""


class Evaluator:
    """Asks, and collects answers.

    Args:
        asks_all: whether each site has held-out data of its own.
    """

    def __init__(self, asks_all: bool) -> None:
        self._asks_all = asks_all
        self._asked: set[str] = set()
        """Who has not answered yet, where all are asked; else the last who was."""
        self._heard: dict[str, wire.QualityReport] = {}
        self._findings: list[Finding] = []

    def choose(self, live: Sequence[str], latest: Sequence[str]) -> list[str]:
        """Whom to ask now; nobody while answers of all sites are still to come.

        Args:
            live: sites, in their order.
            latest: those that keep up.
        """
        present = [name for name in latest if name in live] or list(live)
        if not self._asks_all:
            self._asked = set(present[:1])
            return present[:1]
        if not self.is_idle(live):
            return []
        self._asked = set(live)
        return list(live)

    def is_idle(self, live: Collection[str]) -> bool:
        """Whether no answer is to be expected without asking again."""
        return not self._asked & set(live)

    def hear(self, site: str, report: wire.QualityReport) -> None:
        """Take an answer; the weights that a run starts from are measured unasked, by one site."""
        if not self._asks_all or not report.version:
            figures = json.loads(report.figures_json)
            self._findings.append(Finding((site,), report.version, figures, report.samples))
        elif site in self._asked:
            self._asked.discard(site)
            self._heard[site] = report

    def findings(self, live: Collection[str]) -> list[Finding]:
        """What has been found since the last call; a site that died is waited for no longer."""
        if self._heard and self.is_idle(live):
            self._findings.append(_find(self._heard))
            self._heard = {}
        found, self._findings = self._findings, []
        return found


def _find(reports: Mapping[str, wire.QualityReport]) -> Finding:
    """What several sites found, in the order of their names."""
    # Imported here: feature networks and data sets come with it, which other runs do without.
    from fedwan.metrics.comparison import merge_comparisons, unpack_comparisons

    sites = tuple(sorted(reports))
    figures = _means([json.loads(reports[site].figures_json) for site in sites])
    complaint = ""
    try:
        figures |= merge_comparisons(
            [unpack_comparisons(_moments(reports[site])) for site in sites]
        )
    except (ValueError, FedwanError) as error:
        complaint = f"fd is the mean over sites, not that of their data together: {error}"
    shown = next((site for site in sites if _has_pictures(reports[site])), sites[0])
    version = max(report.version for report in reports.values())
    return Finding(sites, version, figures, reports[shown].samples, complaint)


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the numbers that all rows hold."""
    shared = [key for key in rows[0] if all(_is_number(row.get(key)) for row in rows)]
    return {key: fmean(row[key] for row in rows) for key in shared}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_pictures(report: wire.QualityReport) -> bool:
    try:
        return "generated" in _tensors(report)
    except PayloadError:
        return False


def _moments(report: wire.QualityReport) -> State:
    return select_prefix("moments", _tensors(report))


def _tensors(report: wire.QualityReport) -> State:
    try:
        return safetensors.torch.load(report.samples)
    except SafetensorError as error:
        raise PayloadError(f"a report's samples cannot be read ({error})") from None
