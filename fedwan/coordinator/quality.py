"""What sites found together when they measured quality.

Where each site has data of its own, the Frechet distance is that of all their held-out data
together: they hand in moments, never samples. Other figures are means over the sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError

from fedwan.errors import FedwanError, PayloadError
from fedwan.protocol.evaluation import Answers
from fedwan.protocol.limits import Report
from fedwan.state import State, select_prefix


class Finding(NamedTuple):
    """The quality of a version."""

    sites: tuple[str, ...]
    """That measured it."""
    version: int
    figures: dict[str, Any]
    samples: bytes
    """See `Report`: pictures of the first site that shows any."""
    complaint: str = ""
    """Why figures are not those of all data together."""


def find(answers: Answers) -> Finding:
    """What sites found, in the order of their names."""
    reports = answers.reports
    if answers.is_shared:
        ((site, report),) = reports.items()
        return Finding((site,), report.version, report.figures, report.samples)
    # Imported here: feature networks and data sets come with it, which other runs do without.
    from fedwan.metrics.distances import merge_comparisons, unpack_comparisons

    sites = tuple(sorted(reports))
    figures = _means([reports[site].figures for site in sites])
    complaint = ""
    try:
        figures |= merge_comparisons(
            [unpack_comparisons(_moments(reports[site])) for site in sites]
        )
    except (ValueError, FedwanError, RuntimeError) as error:
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


def _has_pictures(report: Report) -> bool:
    try:
        return "generated" in _tensors(report)
    except PayloadError:
        return False


def _moments(report: Report) -> State:
    return select_prefix("moments", _tensors(report))


def _tensors(report: Report) -> State:
    try:
        return safetensors.torch.load(report.samples)
    except SafetensorError as error:
        raise PayloadError(f"a report's samples cannot be read ({error})") from None
