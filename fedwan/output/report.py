"""`report.html`: a run on one page, whether it has ended or not; `report.html` here is its form."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedwan.errors import ConfigError
from fedwan.files import replace_bytes
from fedwan.output.board import MOST_OWN, SiteRow, read_run
from fedwan.output.chart import Chart, line_chart, stacked_bars
from fedwan.output.records import EventRecord, QualityRecord, RoundRecord
from fedwan.output.summary import read_summary
from fedwan.output.units import (
    bytes_text,
    number_text,
    percent_text,
    sites_text,
    spent_text,
    subject,
)

_MOST_CHARTS = 8
"""Of losses, and of norms."""
_MOST_EVENTS = 200
_FIRST_EVENTS = 20
_TOLD = ("version", "network", "finding", "why", "mend")
"""Of a finding, in the details of its event."""


def write_report(out: Path) -> Path:
    """Write `report.html` from whatever else the run's folder holds; gives its path."""
    forms = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    path = out / "report.html"
    # Private as the run's other files are, whoever calls.
    html = forms.get_template("report.html").render(_contents(_Run(out)))
    replace_bytes(path, html.encode(), 0o600)
    return path


class _Run:
    """What is known of a run."""

    def __init__(self, out: Path) -> None:
        self.board, self.records = read_run(out)
        path = out / "summary.json"
        self.out, self.config = out, self.board.config
        self.summary = read_summary(path) if path.exists() else None
        self.rounds = [r for r in self.records if isinstance(r, RoundRecord)]
        found = [r for r in self.records if isinstance(r, QualityRecord)]
        self.qualities = sorted(found, key=lambda record: record.version)
        self.events = [r for r in self.records if isinstance(r, EventRecord)]
        rows = sorted(self.board.sites.items())
        self.sites = {name: row for name, row in rows if row.versions}


def _contents(run: _Run) -> dict[str, Any]:
    config, picture = run.config, run.out / "samples.png"
    began = "no record yet"
    if run.records:
        began = f"{datetime.fromtimestamp(run.records[0].t, UTC):%Y-%m-%d %H:%M} UTC"
    charts, no_charts = list[Chart](), ""
    try:
        charts = [chart for chart in _charts(run) if chart is not None]
    except ConfigError as error:  # an extra is missing
        no_charts = str(error)
    return {
        "title": f"{subject(config)} · {config.strategy}",
        "subtitle": f"{sites_text(config.num_sites)} · H = {config.h} · {config.steps:,} steps "
        f"per site · seed {config.seed} · {began}",
        "is_done": run.summary is not None,
        "cards": _cards(run),
        "picture": base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else "",
        "no_picture": next((e.text for e in run.events if e.event == "samples_kept"), ""),
        "findings": [_finding(e) for e in run.events if e.event == "finding"],
        "charts": charts,
        "no_charts": no_charts,
        "sites": [_site(row) for row in run.sites.values()],
        "events": _events(run),
        "config_text": (run.out / "config.yaml").read_text(encoding="utf-8"),
    }


def _cards(run: _Run) -> list[tuple[str, str, str]]:
    known, wall_s = run.summary or run.board.total, 0.0
    if run.records:
        wall_s = run.summary.wall_s if run.summary else run.records[-1].t - run.records[0].t
    up, down = known.bytes_up, known.bytes_down
    sync = run.board.beside_sync(up + down) if run.summary else None
    fewer = f"{bytes_text(up)} up, {bytes_text(down)} down"
    if sync:
        fewer = f"synchronous training: {sync[0]}, {sync[1]}"
    name, value, beside = run.board.quality_told()
    happened = Counter(event.event for event in run.events)  # of many refusals some are told
    rejoins, rejected = happened["rejoin"], happened["rejected"]
    if run.summary:
        rejoins, rejected = run.summary.rejoins, run.summary.rejected
    odd = f"{rejoins} rejoined, {rejected} rejected"
    private = run.summary.privacy if run.summary else {}
    measured = ""
    if run.summary:
        measured = f"; evaluations: {spent_text(run.summary.evaluation_s)}"
    spent = f"at delta {private['delta']:g}, of {private['unit']}" if private else ""
    return [
        (name.capitalize(), value, "; ".join(beside)),
        ("Sent over the wire", bytes_text(up + down), fewer),
        ("Utilisation", percent_text(known.utilisation), "share of the time that sites compute"),
        (
            "Time",
            spent_text(wall_s),
            f"{min(run.board.step, run.config.steps):,} of {run.config.steps:,} steps{measured}",
        ),
        ("Rounds", f"{run.board.version:,}", odd),
        *([("Epsilon", number_text(private["epsilon"]), spent)] if private else ()),
    ]


def _charts(run: _Run) -> Iterator[Chart | None]:
    def figures(name: str) -> list[tuple[float, float | None]]:
        return [(q.step, q.numbers.get(name)) for q in run.qualities]

    if known := [y for _, y in (*figures("fd"), *figures("fd_floor")) if y]:
        is_wide = max(known) > 20 * min(known)
        title = "Fréchet distance of the EMA weights" + (" (log scale)" if is_wide else "")
        lines = {"EMA": figures("fd"), (floor := "floor (real against real)"): figures("fd_floor")}
        yield line_chart(title, lines, number_text, is_log=is_wide, reference=floor)
    elif run.qualities:  # a script's own
        for name in sorted({name for q in run.qualities for name in q.numbers})[:MOST_OWN]:
            yield line_chart(f"{name} of the EMA weights", {"EMA": figures(name)}, number_text)
    yield from _per_site("Loss", run, lambda record: record.losses)
    # One point per step of the run, as sites may have a pace of their own: what all had sent.
    sent = {}
    for name in ("up", "down"):
        sums = accumulate(getattr(record, f"bytes_{name}") for record in run.rounds)
        steps = (record.run_step for record in run.rounds)
        sent[name] = sorted(dict(zip(steps, sums, strict=True)).items())
    yield line_chart("Bytes on the wire, all sites", sent, bytes_text)
    busy = {name: (row.compute_s, row.wait_s) for name, row in run.sites.items()}
    title = "Where the time of each site went"
    yield stacked_bars(title, ("compute", "wait"), busy, spent_text)
    yield from _per_site("Norm of the contribution", run, lambda record: record.norms)


def _per_site(
    what: str, run: _Run, values_of: Callable[[RoundRecord], Mapping[str, float | None]]
) -> Iterator[Chart | None]:
    """One chart for each of the names that come most often, one line per site."""
    by_site: dict[str, list[RoundRecord]] = {site: [] for site in run.sites}
    for record in run.rounds:
        by_site[record.site].append(record)
    counts = Counter(name for record in run.rounds for name in values_of(record))
    for name in sorted(name for name, _ in counts.most_common(_MOST_CHARTS)):
        lines = {
            site: [(record.step, values_of(record).get(name)) for record in records]
            for site, records in by_site.items()
        }
        title = what if name.lower() == what.lower() else f"{what}: {name}"
        yield line_chart(title, lines, number_text)


def _site(row: SiteRow) -> list[str]:
    moved = (bytes_text(row.bytes_up), bytes_text(row.bytes_down))
    spent = (spent_text(row.compute_s), spent_text(row.wait_s), percent_text(row.utilisation))
    return [row.name, f"{row.rounds:,}", f"{row.step:,}", *spent, *moved]


def _finding(event: EventRecord) -> list[str]:
    told = [str(event.details.get(name) or "all") for name in _TOLD]
    return [told[0], event.site or "all", told[1], told[2].replace("_", " "), *told[3:]]


def _events(run: _Run) -> list[list[str]]:
    rows = [
        [f"{datetime.fromtimestamp(e.t, UTC):%H:%M:%S}", e.event, e.site or "", e.text]
        for e in run.events
    ]
    skipped = len(rows) - _MOST_EVENTS
    if skipped > 0:  # how it began and how it ended tell more than the middle
        more = ["…", f"{skipped} more", "", "see journal.jsonl"]
        rows[_FIRST_EVENTS : _FIRST_EVENTS + skipped] = [more]
    return rows
