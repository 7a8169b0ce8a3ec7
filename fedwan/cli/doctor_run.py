"""`fedwan doctor RUN_DIR`: what went wrong in a run, where, why, and the mend."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedwan.errors import ConfigError

if TYPE_CHECKING:
    from fedwan.doctor.diagnosis import Finding
    from fedwan.output.records import Record

__all__ = ["run"]

WIDTH = 100
LEAST_ROUNDS = 3
"""Before that most rules stay silent, whatever is wrong."""


def run(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The run's folder.", show_default=False)
    ],
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write findings here.", show_default=False),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 if anything needs to be mended, or there is no round."
        ),
    ] = False,
) -> None:
    """Say what is wrong with a run, in which round, site and network, why, and what mends it.

    Works for runs that are still going on, or were killed, too. Whatever is found, the exit code
    is 0: it is advice.
    """
    from fedwan.doctor.diagnosis import diagnose
    from fedwan.output.records import read_records

    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{str(run_dir)!r} holds no run (no config.yaml); give the folder that out= named, "
            "or `fedwan doctor link HOST:PORT` for its link"
        )
    records = read_records(run_dir / "metrics.jsonl")
    findings = list(diagnose(records))
    if json_path is not None:
        _write(json_path, findings)
    for line in _lines(run_dir, records, findings):
        typer.echo(line)
    if strict and (not _num_rounds(records) or any(finding.is_warning for finding in findings)):
        raise typer.Exit(1)


def _lines(run_dir: Path, records: Sequence[Record], findings: Sequence[Finding]) -> list[str]:
    lines = [_headline(run_dir, records), ""]
    warnings = [finding for finding in findings if finding.is_warning]
    if not warnings:
        is_early = _num_rounds(records) < LEAST_ROUNDS
        found = f"too early to tell: that takes {LEAST_ROUNDS} rounds or more"
        lines += [found if is_early else "nothing to mend", *([""] if findings else [])]
    ordered = [*warnings, *(finding for finding in findings if not finding.is_warning)]
    cells = [
        (str(f.version), f.site or "all", f.network or "all", f.kind.replace("_", " "))
        for f in ordered
    ]
    header = ("round", "site", "network", "finding")
    widths = [max(len(row[k]) for row in [header, *cells]) for k in range(len(header))]
    if cells:
        lines.append(_row(header, widths))
    for row, finding in zip(cells, ordered, strict=True):
        lines.append(_row(row, widths))
        mend = "mend" if finding.is_warning else "note"
        lines += [*_wrapped("why", finding.why), *_wrapped(mend, finding.mend)]
    return lines


def _num_rounds(records: Sequence[Record]) -> int:
    from fedwan.output.records import RoundRecord

    return max((r.version for r in records if isinstance(r, RoundRecord)), default=0)


def _headline(run_dir: Path, records: Sequence[Record]) -> str:
    from fedwan.doctor.chart import FEWEST_OTHERS
    from fedwan.output.records import EventRecord, RoundRecord

    rounds = [record for record in records if isinstance(record, RoundRecord)]
    if not rounds:
        return f"{run_dir}: no round yet"
    sites = {record.site for record in rounds}
    is_done = any(isinstance(r, EventRecord) and r.event == "done" for r in records)
    text = (
        f"{run_dir}: {_num_rounds(records)} rounds, {len(sites)} sites, "
        f"{'done' if is_done else 'not finished'}"
    )
    if len(sites) <= FEWEST_OTHERS:
        text += "; sites are compared with each other from three sites on"
    elif not any(record.figures for record in rounds):
        text += "; its sites told no figures of data and rates, as earlier versions do not"
    return text


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.strip().rjust(widths[0]), *rest]).rstrip()


def _wrapped(name: str, text: str) -> list[str]:
    indent = " " * 7
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent}{name:<6}", subsequent_indent=indent + " " * 6
    )


def _write(path: Path, findings: Sequence[Finding]) -> None:
    try:
        path.write_text(json.dumps([finding._asdict() for finding in findings], indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json = {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None
