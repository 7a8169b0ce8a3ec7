"""`report.html`: a run on one page, whether it has ended or not."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import accumulate
from pathlib import Path

from fedwan.config import Config, load
from fedwan.errors import ConfigError
from fedwan.output.chart import Bar, Series, line_chart, stacked_bars
from fedwan.output.files import replace_text
from fedwan.output.page import card, page, section, table
from fedwan.output.records import EventRecord, QualityRecord, Record, RoundRecord, read_records
from fedwan.output.summary import Summary, read_summary, sync_bytes
from fedwan.output.units import bytes_text, duration_text, number_text, percent_text, subject

__all__ = ["write_report"]

_MOST_EVENTS = 200

Values = Mapping[str, float | None]


def write_report(out: Path) -> Path:
    """Write `report.html` from whatever else the run's folder holds.

    Args:
        out: the run's folder.

    Returns:
        Path of the report.

    Raises:
        ConfigError: the folder holds no run, or its files are damaged.
    """
    run = _read(out)
    path = out / "report.html"
    replace_text(path, _render(run))
    return path


@dataclass(frozen=True)
class _Run:
    """What is known of a run."""

    out: Path
    config: Config
    summary: Summary | None
    rounds: Sequence[RoundRecord]
    qualities: Sequence[QualityRecord]
    events: Sequence[EventRecord]

    def by_site(self) -> dict[str, list[RoundRecord]]:
        sites: dict[str, list[RoundRecord]] = defaultdict(list)
        for record in self.rounds:
            sites[record.site].append(record)
        return dict(sorted(sites.items()))

    def times(self) -> list[float]:
        records: list[Record] = [*self.events, *self.rounds, *self.qualities]
        return [record.t for record in records]


def _read(out: Path) -> _Run:
    if not (out / "config.yaml").is_file():
        raise ConfigError(
            f"{str(out)!r} holds no run (no config.yaml); give the folder that out= named"
        )
    records = read_records(out / "metrics.jsonl")
    return _Run(
        out=out,
        config=load(out / "config.yaml", []),
        summary=read_summary(out / "summary.json") if (out / "summary.json").exists() else None,
        rounds=[r for r in records if isinstance(r, RoundRecord)],
        qualities=[r for r in records if isinstance(r, QualityRecord)],
        events=[r for r in records if isinstance(r, EventRecord)],
    )


def _render(run: _Run) -> str:
    config = run.config
    title = f"{subject(config)} · {config.strategy}"
    subtitle = (
        f"{config.sites} sites · H = {config.h} · {config.steps:,} steps per site · "
        f"seed {config.seed} · {_started(run)}"
    )
    is_done = run.summary is not None
    return page(
        title,
        subtitle,
        "done" if is_done else "not finished",
        is_done,
        [
            f'<div class="cards">{"".join(_cards(run))}</div>',
            section("Samples of the EMA weights", _samples(run)),
            section("What the doctor found", _findings(run)),
            section("Training", f'<div class="charts">{"".join(_charts(run))}</div>'),
            section("Sites", _sites(run)),
            section("Events", _events(run)),
            section("Configuration", _configuration(run)),
        ],
    )


def _started(run: _Run) -> str:
    times = run.times()
    if not times:
        return "no record yet"
    return f"{datetime.fromtimestamp(min(times), UTC):%Y-%m-%d %H:%M} UTC"


def _cards(run: _Run) -> list[str]:
    up = sum(record.bytes_up for record in run.rounds)
    down = sum(record.bytes_down for record in run.rounds)
    compute = sum(record.compute_s for record in run.rounds)
    wait = sum(record.wait_s for record in run.rounds)
    times = run.times()
    wall = max(times) - min(times) if times else 0.0
    utilisation = compute / (compute + wait) if compute + wait else None
    fewer = f"{bytes_text(up)} up, {bytes_text(down)} down"
    if (summary := run.summary) is not None:
        up, down, wall = summary.bytes_up, summary.bytes_down, summary.wall_s
        utilisation = summary.utilisation
        sync = sync_bytes(summary, run.events)
        if sync and up + down and summary.strategy != "sync":
            fewer = (
                f"synchronous training: {bytes_text(sync)}, {sync / (up + down):,.1f} times more"
            )
    version = max((record.version for record in run.rounds), default=0)
    step = min((rows[-1].step for rows in run.by_site().values()), default=0)
    rejoins = sum(event.event == "rejoin" for event in run.events)
    rejected = sum(event.event == "rejected" for event in run.events)
    return [
        card("Fréchet distance", *_quality_card(run)),
        card("Sent over the wire", bytes_text(up + down), fewer),
        card("Utilisation", percent_text(utilisation), "share of the time that sites compute"),
        card("Time", duration_text(wall), f"{step:,} of {run.config.steps:,} steps"),
        card("Rounds", f"{version:,}", f"{rejoins} rejoined, {rejected} rejected"),
    ]


def _quality_card(run: _Run) -> tuple[str, str]:
    if not run.qualities:
        return number_text(None), "not measured yet"
    last = run.qualities[-1]
    fd, floor = last.figure("fd"), last.figure("fd_floor")
    untrained = next((q.figure("fd") for q in run.qualities if q.version == 0), None)
    detail = f"floor {number_text(floor)}"
    if fd and floor:
        detail = f"{fd / floor:.1f} times the {detail}"
    return number_text(fd), f"{detail}; untrained {number_text(untrained)}"


def _charts(run: _Run) -> list[str]:
    return [
        *_quality_charts(run),
        *_per_site("Loss", run, lambda record: record.losses),
        _bytes_chart(run),
        _time_chart(run),
        *_per_site("Norm of the contribution", run, lambda record: record.norms),
    ]


def _quality_charts(run: _Run) -> list[str]:
    fds = [(float(q.step), q.figure("fd")) for q in run.qualities]
    floors = [(float(q.step), q.figure("fd_floor")) for q in run.qualities]
    known = [y for _, y in (*fds, *floors) if y]
    is_wide = bool(known) and max(known) > 20 * min(known)
    charts = [
        line_chart(
            "Fréchet distance of the EMA weights" + (" (log scale)" if is_wide else ""),
            [Series("EMA", fds), Series("floor (real against real)", floors, is_reference=True)],
            "step",
            number_text,
            log_y=is_wide,
        )
    ]
    shares = [
        Series(name, [(float(q.step), q.figure(name)) for q in run.qualities], color)
        for color, name in enumerate(("precision", "recall"))
    ]
    charts.append(line_chart("Precision and recall", shares, "step", number_text))
    return charts


def _per_site(what: str, run: _Run, values_of: Callable[[RoundRecord], Values]) -> list[str]:
    """One chart per name, one line per site."""
    sites = run.by_site()
    names = sorted({name for record in run.rounds for name in values_of(record)})
    return [
        line_chart(
            f"{what}: {name}",
            [
                Series(site, [(float(r.step), values_of(r).get(name)) for r in rows], color)
                for color, (site, rows) in enumerate(sites.items())
            ],
            "step",
            number_text,
        )
        for name in names
    ]


def _bytes_chart(run: _Run) -> str:
    steps = [float(record.step) for record in run.rounds]
    up = accumulate(float(record.bytes_up) for record in run.rounds)
    down = accumulate(float(record.bytes_down) for record in run.rounds)
    # One point per step: what all sites had sent by then.
    series = [
        Series(name, sorted(dict(zip(steps, sums, strict=True)).items()), color)
        for color, (name, sums) in enumerate((("up", up), ("down", down)))
    ]
    return line_chart("Bytes on the wire, all sites", series, "step", bytes_text)


def _time_chart(run: _Run) -> str:
    bars = [
        Bar(
            site,
            (
                ("compute", sum(record.compute_s for record in rows)),
                ("wait", sum(record.wait_s for record in rows)),
            ),
        )
        for site, rows in run.by_site().items()
    ]
    return stacked_bars("Where the time of each site went", bars, duration_text)


def _sites(run: _Run) -> str:
    rows = []
    for site, records in run.by_site().items():
        compute = sum(record.compute_s for record in records)
        wait = sum(record.wait_s for record in records)
        rows.append(
            [
                site,
                f"{len({record.version for record in records}):,}",
                f"{records[-1].step:,}",
                duration_text(compute),
                duration_text(wait),
                percent_text(compute / (compute + wait) if compute + wait else None),
                bytes_text(sum(record.bytes_up for record in records)),
                bytes_text(sum(record.bytes_down for record in records)),
            ]
        )
    header = ["site", "rounds", "steps", "compute", "wait", "utilisation", "up", "down"]
    return table(header, rows, num_from=1)


def _findings(run: _Run) -> str:
    rows = [
        [
            str(e.details.get("version", "")),
            e.site or "all",
            str(e.details.get("network") or "all"),
            str(e.details.get("finding", "")).replace("_", " "),
            str(e.details.get("why", "")),
            str(e.details.get("mend", "")),
        ]
        for e in run.events
        if e.event == "finding"
    ]
    return table(["round", "site", "network", "finding", "why", "mend"], rows)


def _events(run: _Run) -> str:
    events = list(run.events)
    skipped = len(events) - _MOST_EVENTS
    if skipped > 0:
        # How it began and how it ended tell more than the middle.
        events = events[:20] + events[20 + skipped :]
    rows = [
        [f"{datetime.fromtimestamp(e.t, UTC):%H:%M:%S}", e.event, e.site or "", e.text]
        for e in events
    ]
    if skipped > 0:
        rows.insert(20, ["…", f"{skipped} more", "", "see metrics.jsonl"])
    return table(["UTC", "event", "site", ""], rows)


def _samples(run: _Run) -> str:
    path = run.out / "samples.png"
    if not path.is_file():
        texts = [event.text for event in run.events if event.event == "samples_kept"]
        return f'<div class="panel">{escape(texts[0])}</div>' if texts else ""
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img class="samples" alt="generated samples" src="data:image/png;base64,{data}">'
    return f'<div class="panel">{image}</div>'


def _configuration(run: _Run) -> str:
    text = escape((run.out / "config.yaml").read_text(encoding="utf-8"))
    details = f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
    return f'<div class="panel">{details}</div>'
