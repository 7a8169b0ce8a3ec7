"""`report.html`: a run on one page, whether it has ended or not; `report.html` here is its form."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedwan.errors import ConfigError
from fedwan.files import replace_bytes
from fedwan.output.board import MOST_OWN, SiteRow, read_run
from fedwan.output.chart import Chart, line_chart, stacked_bars
from fedwan.output.records import EventRecord, QualityRecord, Record, RoundRecord
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
_MOST_POINTS = 1000
"""Of a line."""
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


T = TypeVar("T")


class _Thinned(Generic[T]):
    """A series for a chart: all points as long as they are few; then each 2nd, 4th, … of a kind."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, T]] = []
        self._seen, self._every = Counter[int](), 1

    def add(self, point: T, kind: int = 0) -> None:
        """The next point."""
        number = self._seen[kind]
        self._seen[kind] += 1
        if number % self._every == 0:
            self._kept.append((number, point))
        if len(self._kept) > _MOST_POINTS:
            self._every *= 2
            self._kept = [(n, point) for n, point in self._kept if n % self._every == 0]

    def __iter__(self) -> Iterator[T]:
        return (point for _, point in self._kept)


class _Round(NamedTuple):
    """What is drawn of a site's part in a round."""

    step: int
    losses: Mapping[str, float | None]
    norms: Mapping[str, float | None]


class _Run:
    """What is known of a run, in memory that its length does not change."""

    def __init__(self, out: Path) -> None:
        self.times = list[float]()
        """Of the first record and the last."""
        self.rounds: dict[str, _Thinned[_Round]] = defaultdict(_Thinned)
        """By site."""
        self.losses, self.norms = Counter[str](), Counter[str]()
        """By name, how many rounds tell of it."""
        self.sent = _Thinned[tuple[int, int, int]]()
        """Step of the run, and bytes up and down until then."""
        self._sent = (-1, 0, 0)
        """The latest, of a round that may lack some sites yet."""
        self._qualities = _Thinned[QualityRecord]()
        self.happened = Counter[str]()
        self.first_events = list[EventRecord]()
        self.last_events = deque[EventRecord](maxlen=_MOST_EVENTS - _FIRST_EVENTS)
        self.findings, self.no_picture = list[EventRecord](), ""
        self.board = read_run(out, self._take)
        self.sent.add(self._sent)
        path = out / "summary.json"
        self.out, self.config = out, self.board.config
        self.summary = read_summary(path) if path.exists() else None
        self.qualities = sorted(self._qualities, key=lambda record: record.version)
        rows = sorted(self.board.sites.items())
        self.sites = {name: row for name, row in rows if name in self.rounds}

    def _take(self, record: Record) -> None:
        self.times = [*self.times[:1], record.t]
        if isinstance(record, RoundRecord):
            self._take_round(record)
        elif isinstance(record, QualityRecord):
            self._qualities.add(record)
        else:
            self._take_event(record)

    def _take_round(self, record: RoundRecord) -> None:
        point = _Round(record.step, record.losses, record.norms)
        self.rounds[record.site].add(point, record.fragment)
        self.losses.update(record.losses.keys())
        self.norms.update(record.norms.keys())
        step, up, down = self._sent
        if record.run_step != step >= 0:
            self.sent.add(self._sent)
        self._sent = record.run_step, up + record.bytes_up, down + record.bytes_down

    def _take_event(self, event: EventRecord) -> None:
        is_early = len(self.first_events) < _FIRST_EVENTS
        (self.first_events if is_early else self.last_events).append(event)
        self.happened[event.event] += 1
        if event.event == "finding":
            self.findings.append(event)
        if event.event == "samples_kept":
            self.no_picture = self.no_picture or event.text


def _contents(run: _Run) -> dict[str, Any]:
    config, picture = run.config, run.out / "samples.png"
    began = "no record yet"
    if run.times:
        began = f"{datetime.fromtimestamp(run.times[0], UTC):%Y-%m-%d %H:%M} UTC"
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
        "no_picture": run.no_picture,
        "findings": [_finding(e) for e in run.findings],
        "charts": charts,
        "no_charts": no_charts,
        "sites": [_site(row) for row in run.sites.values()],
        "events": _events(run),
        "config_text": (run.out / "config.yaml").read_text(encoding="utf-8"),
    }


def _cards(run: _Run) -> list[tuple[str, str, str]]:
    known, wall_s = run.summary or run.board.total, 0.0
    if run.times:
        wall_s = run.summary.wall_s if run.summary else run.times[-1] - run.times[0]
    up, down = known.bytes_up, known.bytes_down
    sync = run.board.beside_sync(up + down) if run.summary else None
    fewer = f"{bytes_text(up)} up, {bytes_text(down)} down"
    if sync:
        fewer = f"synchronous training: {sync[0]}, {sync[1]}"
    name, value, beside = run.board.quality_told()
    # Of many refusals some are told.
    rejoins, rejected = run.happened["rejoin"], run.happened["rejected"]
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
    yield from _per_site("Loss", run, run.losses, lambda record: record.losses)
    # One point per step of the run, as sites may have a pace of their own: what all had sent.
    told = sorted({step: (up, down) for step, up, down in run.sent if step >= 0}.items())
    sent = {"up": [(x, up) for x, (up, _) in told], "down": [(x, down) for x, (_, down) in told]}
    yield line_chart("Bytes on the wire, all sites", sent, bytes_text)
    busy = {name: (row.compute_s, row.wait_s) for name, row in run.sites.items()}
    title = "Where the time of each site went"
    yield stacked_bars(title, ("compute", "wait"), busy, spent_text)
    yield from _per_site("Norm of the contribution", run, run.norms, lambda record: record.norms)


def _per_site(
    what: str,
    run: _Run,
    counts: Counter[str],
    values_of: Callable[[_Round], Mapping[str, float | None]],
) -> Iterator[Chart | None]:
    """One chart for each of the names that come most often, one line per site."""
    for name in sorted(name for name, _ in counts.most_common(_MOST_CHARTS)):
        lines = {
            site: [(record.step, values_of(record).get(name)) for record in run.rounds[site]]
            for site in run.sites
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
    first, last = (
        [
            [f"{datetime.fromtimestamp(e.t, UTC):%H:%M:%S}", e.event, e.site or "", e.text]
            for e in found
        ]
        for found in (run.first_events, run.last_events)
    )
    skipped = run.happened.total() - len(first) - len(last)
    # How it began and how it ended tell more than the middle.
    more = [["…", f"{skipped} more", "", "see journal.jsonl"]] if skipped else []
    return [*first, *more, *last]
