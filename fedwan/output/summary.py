"""`summary.json`: how a run ended, in the keys that users, tests and benchmarks rely on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedwan.config import COMMAND, PrivacyConfig
from fedwan.errors import ConfigError
from fedwan.files import replace_text
from fedwan.output.board import Board
from fedwan.output.records import finite
from fedwan.output.units import bytes_text, number_text, percent_text, sites_text, spent_text


@dataclass(frozen=True)
class Summary:
    """A finished run. Seconds are means over the sites unless told, bytes sums over them."""

    strategy: str
    workload: str
    sites: int
    h: int
    steps: int
    """Per site."""
    seed: int
    wall_s: float
    compute_s: float
    wait_s: float
    utilisation: float
    """compute_s / (compute_s + wait_s)."""
    evaluation_s: float
    """Sum over all evaluations, from the question to the answer; of several sites', the longest."""
    bytes_up: int
    """On the wire, payloads and framing."""
    bytes_down: int
    rounds: int
    contributions: int
    rejected: int
    rejoins: int
    late: int
    """Contributions that were merged into a later version than the one they were made for."""
    dropped: int
    """Contributions that came too late to be merged."""
    staleness: float
    """Versions between a contribution's start and the update that it is part of, less one; mean."""
    quality: dict[str, Any]
    """Of the EMA weights on held-out real data: `fd`, `fd_floor`, `num_real`, `seen_through`, …"""
    global_sha256: str
    """Of the final global weights, in name order."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """Under `privacy.epsilon`: `epsilon`, the most that was spent, `delta`, `unit`, and what is
    `not_covered`."""
    warnings: int = 0
    """Lines of the journal."""
    quality_version: int = -1
    """Outer updates that the weights had whose quality it is: as `rounds`, unless measuring took
    longer than `round.patience_s`; -1 of none."""


UNITS = {
    "sample": "one sample of one site's shard, there or not",
    "site": "one whole site, its contributions there or not",
}
_NEVER_COVERED = (
    "how long steps take",
    "settings and initial weights that come of other runs on the same data",
)
NOT_COVERED = {
    "sample": (
        "several samples of the same person or thing, copies among them",
        "how many samples a shard has",
        "held-out samples, which quality is measured on where all sites have the same",
        *_NEVER_COVERED,
    ),
    "site": (
        "what the coordinator sees: each site's contributions before any noise",
        "what sites tell of themselves in the run's folder: losses, norms, figures of their data",
        "quality that is measured on held-out samples, and samples made of a site's inputs",
        "the same person or thing at several sites",
        "which sites take part, and when",
        *_NEVER_COVERED,
    ),
}


def privacy_of(config: PrivacyConfig, epsilon: float) -> dict[str, Any]:
    """What `summary.json` says of it; nothing without."""
    if not config.epsilon:
        return {}
    told = {"epsilon": epsilon, "delta": config.delta, "unit": UNITS[config.name]}
    return {**told, "not_covered": list(NOT_COVERED[config.name])}


def write_summary(summary: Summary, path: Path) -> None:
    """Write `summary.json`; figures that are not finite become null."""
    row = finite(dataclasses.asdict(summary))
    replace_text(path, json.dumps(row, indent=2, allow_nan=False) + "\n")


_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "dict[str, Any]": dict}


def read_summary(path: Path) -> Summary:
    """Read `summary.json` of a run that has ended."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        fields = {field.name: str(field.type) for field in dataclasses.fields(Summary)}
        given = {name: row[name] for name in fields if name in row}  # an older one lacks the newest
        for name, value in given.items():
            if not isinstance(value, _KINDS[fields[name]]):
                raise TypeError(f"{name} = {value!r}")
        return Summary(**given)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no summary ({error!r}); remove it, and the run's --resume writes it anew"
        ) from None


def render_summary(summary: Summary, board: Board, out: Path) -> Panel:
    """A run on one screen: quality, bytes, time, faults, and where to look."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(summary, board, out):
        table.add_row(name, text)
    title = Text.assemble(
        (f"{summary.workload} · {summary.strategy}", "bold"),
        f" · {sites_text(summary.sites)} · H = {summary.h} · {summary.steps} steps",
    )
    return Panel(table, title=title, box=box.ROUNDED, expand=False, padding=(1, 2))


def _lines(summary: Summary, board: Board, out: Path) -> Iterator[tuple[str, str | Text]]:
    """Rows; strings are markup, and hold nothing that a site or user has named."""
    name, value, beside = board.quality_told(summary.quality)
    name = "" if name == "quality" else f"{name} "
    yield "quality", Text.assemble(name, (value, "bold"), *(f", {text}" for text in beside[:1]))
    if beside[1:]:
        yield "", Text("; ".join(beside[1:]))
    if 0 <= summary.quality_version < summary.rounds:
        yield "", f"of version {summary.quality_version:,}, not of the last one"
    sent = summary.bytes_up + summary.bytes_down
    detail = f"{bytes_text(summary.bytes_up)} up, {bytes_text(summary.bytes_down)} down"
    yield "bytes", f"[bold]{bytes_text(sent)}[/] over the wire ({detail})"
    if sync := board.beside_sync(sent):
        yield "", f"synchronous training would have sent {sync[0]}: [bold green]{sync[1]}[/]"
    # The lines above the summary count from the command's start, over which services begin.
    yield "time", f"{spent_text(summary.wall_s)} that the coordinator ran"
    yield (
        "",
        f"each site computed {spent_text(summary.compute_s)} and waited "
        f"{spent_text(summary.wait_s)} "
        f"(utilisation {percent_text(summary.utilisation)})",
    )
    rest = summary.wall_s - summary.compute_s - summary.wait_s
    if rest >= 1:
        measured = f"evaluations took {spent_text(summary.evaluation_s)}"
        yield "", f"the other {spent_text(rest)}: starting and measuring; {measured}"
    yield (
        "rounds",
        f"{summary.rounds:,}, from {summary.contributions:,} contributions; "
        f"{summary.rejected} rejected; rejoins of sites: {summary.rejoins}",
    )
    if summary.late or summary.dropped:
        yield (
            "staleness",
            f"{summary.staleness:.1f} versions on average; {summary.late:,} contributions "
            f"merged late, {summary.dropped:,} dropped",
        )
    if summary.warnings:
        yield "warnings", f"{summary.warnings:,}, in the report"
    if private := summary.privacy:
        bound = f"epsilon {number_text(private['epsilon'])} at delta {private['delta']:g}"
        yield "privacy", f"{bound} for {private['unit']}; see summary.json for what is not covered"
    yield "weights", f"sha256 {summary.global_sha256[:16]}…"
    picture = out / "samples.png"
    is_own = summary.workload == COMMAND
    if picture.is_file() or not (is_own or board.keeps_samples):
        yield "samples", Text(str(picture), "cyan")
    else:
        what = "none: the script gives no sample=" if is_own else "stay with the sites"
        yield "samples", what
    yield "report", Text(str(out / "report.html"), "cyan")
