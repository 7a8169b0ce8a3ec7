"""Rows of a benchmark: JSON lines in a file, aligned columns on the screen, means over seeds."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedwan.errors import UserError

Row = dict[str, Any]
Case = TypeVar("Case")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per line; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def print_row(row: Mapping[str, Any], is_first: bool) -> None:
    """A line of the table as soon as it is known, under its header; lists are left out."""
    row = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
    widths = {key: max(len(key), _least_width(value)) for key, value in row.items()}
    if is_first:
        print("  ".join(key.rjust(widths[key]) for key in row))
    print("  ".join(_text(value).rjust(widths[key]) for key, value in row.items()), flush=True)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _least_width(value: object) -> int:
    # Words of later rows may be longer than the first one's.
    return 16 if isinstance(value, str) else 7


def columns_of(case: object, names: str) -> Row:
    """The fields of a case that are columns, by their names in one text."""
    return {name: getattr(case, name) for name in names.split()}


def select(cases: Mapping[str, Case], text: str) -> list[Case]:
    """Those cases whose name holds a text."""
    found = [case for name, case in cases.items() if text in name]
    if not found:
        raise UserError(f"--only {text!r} is in none of: {'; '.join(cases)}")
    return found


def over_seeds(
    args: argparse.Namespace, cases: Sequence[Case], measure: Callable[[Case, int], Row]
) -> Iterator[Row]:
    """Every case with the first seed, then with the next; one seed in quick form."""
    for seed in range(1 if args.quick else args.seeds):
        for case in cases:
            yield measure(case, seed)


def mean_of(rows: Sequence[Row], key: str, **wanted: object) -> float:
    """Mean over the rows that have all these values; NaN if there is none."""
    values = [row[key] for row in rows if all(row[k] == v for k, v in wanted.items())]
    return statistics.mean(values) if values else float("nan")
