"""`report.html`: a run on one page, whether it has ended or not; `report.html` here is its form."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedwan.config import Config, load
from fedwan.errors import ConfigError
from fedwan.output.chart import WIDTH, Chart, Series, line_chart, stacked_bars
from fedwan.output.files import replace_text
from fedwan.output.records import EventRecord, QualityRecord, Record, RoundRecord, read_records
from fedwan.output.summary import Summary, read_summary, sync_bytes
from fedwan.output.units import (
    bytes_text,
    duration_text,
    number_text,
    percent_text,
    sites_text,
    subject,
)

_MOST_EVENTS = 200
_FIRST_EVENTS = 20


def write_report(out: Path) -> Path:
    """Write `report.html` from whatever else the run's folder holds; gives its path.

    Raises:
        ConfigError: the folder holds no run, or its files are damaged.
    """
    forms = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    forms.filters["px"] = "{:.1f}".format
    path = out / "report.html"
    replace_text(path, forms.get_template("report.html").render(_contents(_read(out))))
    return path


@dataclass(frozen=True)
class _Run:
    """What is known of a run."""

    out: Path
    config: Config
    summary: Summary | None
    records: Sequence[Record]
    rounds: Sequence[RoundRecord]
    qualities: Sequence[QualityRecord]
    events: Sequence[EventRecord]
    sites: Mapping[str, Sequence[RoundRecord]]
    """Rounds by site, in name order."""


def _read(out: Path) -> _Run:
    if not (out / "config.yaml").is_file():
        raise ConfigError(
            f"{str(out)!r} holds no run (no config.yaml); give the folder that out= named"
        )
    records = read_records(out / "metrics.jsonl")
    rounds = [r for r in records if isinstance(r, RoundRecord)]
    sites = defaultdict(list)
    for record in rounds:
        sites[record.site].append(record)
    return _Run(
        out,
        load(out / "config.yaml", []),
        read_summary(out / "summary.json") if (out / "summary.json").exists() else None,
        records,
        rounds,
        [r for r in records if isinstance(r, QualityRecord)],
        [r for r in records if isinstance(r, EventRecord)],
        dict(sorted(sites.items())),
    )


def _contents(run: _Run) -> dict[str, Any]:
    config, picture = run.config, run.out / "samples.png"
    began = "no record yet"
    if run.records:
        began = f"{datetime.fromtimestamp(run.records[0].t, UTC):%Y-%m-%d %H:%M} UTC"
    return {
        "width": WIDTH,
        "title": f"{subject(config)} · {config.strategy}",
        "subtitle": f"{sites_text(config.sites)} · H = {config.h} · {config.steps:,} steps per site"
        f" · seed {config.seed} · {began}",
        "is_done": run.summary is not None,
        "cards": _cards(run),
        "picture": base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else "",
        "no_picture": next((e.text for e in run.events if e.event == "samples_kept"), ""),
        "findings": [_finding(e) for e in run.events if e.event == "finding"],
        "charts": [chart for chart in _charts(run) if chart is not None],
        "sites": [_site(name, rounds) for name, rounds in run.sites.items()],
        "events": _events(run),
        "config_text": (run.out / "config.yaml").read_text(encoding="utf-8"),
    }


def _sum(rounds: Sequence[RoundRecord], name: str) -> float:
    return float(sum(getattr(record, name) for record in rounds))


def _utilisation(rounds: Sequence[RoundRecord]) -> float | None:
    compute_s = _sum(rounds, "compute_s")
    busy_s = compute_s + _sum(rounds, "wait_s")
    return compute_s / busy_s if busy_s else None


def _cards(run: _Run) -> list[tuple[str, str, str]]:
    up, down = _sum(run.rounds, "bytes_up"), _sum(run.rounds, "bytes_down")
    wall_s = run.records[-1].t - run.records[0].t if run.records else 0.0
    utilisation, summary = _utilisation(run.rounds), run.summary
    fewer = f"{bytes_text(up)} up, {bytes_text(down)} down"
    if summary is not None:
        up, down, wall_s = summary.bytes_up, summary.bytes_down, summary.wall_s
        utilisation = summary.utilisation
        sync = sync_bytes(summary, run.events)
        if sync and up + down and summary.strategy != "sync":
            times = f"{sync / (up + down):,.1f} times more"
            fewer = f"synchronous training: {bytes_text(sync)}, {times}"
    version = max((record.version for record in run.rounds), default=0)
    step = min((rounds[-1].step for rounds in run.sites.values()), default=0)
    happened = [event.event for event in run.events]
    return [
        ("Fréchet distance", *_quality(run)),
        ("Sent over the wire", bytes_text(up + down), fewer),
        ("Utilisation", percent_text(utilisation), "share of the time that sites compute"),
        ("Time", duration_text(wall_s), f"{step:,} of {run.config.steps:,} steps"),
        (
            "Rounds",
            f"{version:,}",
            f"{happened.count('rejoin')} rejoined, {happened.count('rejected')} rejected",
        ),
    ]


def _quality(run: _Run) -> tuple[str, str]:
    if not run.qualities:
        return number_text(None), "not measured yet"
    fd, floor = run.qualities[-1].figure("fd"), run.qualities[-1].figure("fd_floor")
    untrained = next((q.figure("fd") for q in run.qualities if q.version == 0), None)
    detail = f"floor {number_text(floor)}"
    if fd and floor:
        detail = f"{fd / floor:.1f} times the {detail}"
    return number_text(fd), f"{detail}; untrained {number_text(untrained)}"


def _charts(run: _Run) -> Iterator[Chart | None]:
    def figures(name: str) -> list[tuple[float, float | None]]:
        return [(q.step, q.figure(name)) for q in run.qualities]

    known = [y for _, y in (*figures("fd"), *figures("fd_floor")) if y]
    is_wide = bool(known) and max(known) > 20 * min(known)
    yield line_chart(
        "Fréchet distance of the EMA weights" + (" (log scale)" if is_wide else ""),
        [
            Series("EMA", figures("fd")),
            Series("floor (real against real)", figures("fd_floor"), is_reference=True),
        ],
        number_text,
        is_wide,
    )
    shares = [Series(name, figures(name)) for name in ("precision", "recall")]
    yield line_chart("Precision and recall", shares, number_text)
    yield from _per_site("Loss", run, lambda record: record.losses)
    # One point per step: what all sites had sent by then.
    sent = []
    for name in ("up", "down"):
        sums = accumulate(getattr(record, f"bytes_{name}") for record in run.rounds)
        steps = (record.step for record in run.rounds)
        sent.append(Series(name, sorted(dict(zip(steps, sums, strict=True)).items())))
    yield line_chart("Bytes on the wire, all sites", sent, bytes_text)
    busy = {
        site: (_sum(rounds, "compute_s"), _sum(rounds, "wait_s"))
        for site, rounds in run.sites.items()
    }
    title = "Where the time of each site went"
    yield stacked_bars(title, ("compute", "wait"), busy, duration_text)
    yield from _per_site("Norm of the contribution", run, lambda record: record.norms)


def _per_site(
    what: str, run: _Run, values_of: Callable[[RoundRecord], Mapping[str, float | None]]
) -> Iterator[Chart | None]:
    """One chart per name, one line per site."""
    for name in sorted({name for record in run.rounds for name in values_of(record)}):
        series = [
            Series(site, [(r.step, values_of(r).get(name)) for r in rounds])
            for site, rounds in run.sites.items()
        ]
        yield line_chart(f"{what}: {name}", series, number_text)


def _site(name: str, rounds: Sequence[RoundRecord]) -> list[str]:
    return [
        name,
        f"{len({record.version for record in rounds}):,}",
        f"{rounds[-1].step:,}",
        duration_text(_sum(rounds, "compute_s")),
        duration_text(_sum(rounds, "wait_s")),
        percent_text(_utilisation(rounds)),
        bytes_text(_sum(rounds, "bytes_up")),
        bytes_text(_sum(rounds, "bytes_down")),
    ]


def _finding(event: EventRecord) -> list[str]:
    details = event.details
    return [
        str(details.get("version", "")),
        event.site or "all",
        str(details.get("network") or "all"),
        str(details.get("finding", "")).replace("_", " "),
        str(details.get("why", "")),
        str(details.get("mend", "")),
    ]


def _events(run: _Run) -> list[list[str]]:
    rows = [
        [f"{datetime.fromtimestamp(e.t, UTC):%H:%M:%S}", e.event, e.site or "", e.text]
        for e in run.events
    ]
    skipped = len(rows) - _MOST_EVENTS
    if skipped > 0:  # how it began and how it ended tell more than the middle
        rest = rows[_FIRST_EVENTS + skipped :]
        rows = [*rows[:_FIRST_EVENTS], ["…", f"{skipped} more", "", "see metrics.jsonl"], *rest]
    return rows
