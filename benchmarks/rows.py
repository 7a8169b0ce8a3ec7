"""Rows of a benchmark: JSON lines in a file, aligned columns on the screen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["print_row", "write_rows"]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per line; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def print_row(row: Mapping[str, Any], is_first: bool) -> None:
    """A line of the table as soon as it is known, under its header."""
    widths = {key: max(len(key), _least_width(value)) for key, value in row.items()}
    if is_first:
        print("  ".join(key.rjust(widths[key]) for key in row))
    print("  ".join(_text(value).rjust(widths[key]) for key, value in row.items()), flush=True)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _least_width(value: object) -> int:
    # Words of later rows may be longer than the first one's.
    return 16 if isinstance(value, str) else 7
