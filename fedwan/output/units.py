"""Quantities as a reader likes them: three digits and a unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedwan.config import COMMAND, Config

_WIDEST = 1e7
"""From here on a number is told by its power of ten."""
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def number_text(value: float | None) -> str:
    """Three significant digits; a dash for what is not known.

    >>> number_text(0.12345), number_text(1234567.0), number_text(None)
    ('0.123', '1,230,000', '–')
    >>> number_text(12345), number_text(100.0), number_text(20_467.3), number_text(1e8)
    ('12,345', '100', '20,500', '1e+08')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if 1000 <= abs(float(text)) < _WIDEST else text


def bytes_text(count: float) -> str:
    """Bytes in decimal units, as links are sold.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_234_567), bytes_text(2e12)
    ('0 B', '999 B', '1.23 MB', '2.00 TB')
    >>> bytes_text(9_997_000), bytes_text(99_970_000)
    ('10.0 MB', '100 MB')
    """
    power = 0
    while count >= 999.5 and power < len(_PREFIXES) - 1:
        count /= 1000
        power += 1
    text = f"{count:#.3g}".rstrip(".") if power else f"{count:.0f}"
    return f"{text} {_PREFIXES[power]}B"


def duration_text(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> duration_text(5.4), duration_text(75), duration_text(3661), duration_text(200_000)
    ('5 s', '1:15', '1:01:01', '2 d 07:33')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours == 0:
        return f"{minute}:{second:02d}"
    days, hour = divmod(hours, 24)
    if days == 0:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{days} d {hour:02d}:{minute:02d}"


def spent_text(seconds: float) -> str:
    """Seconds that were spent on something, of which few say much.

    >>> spent_text(0.42), spent_text(9.97), spent_text(75)
    ('0.4 s', '10 s', '1:15')
    """
    return f"{max(0.0, seconds):.1f} s" if seconds < 9.95 else duration_text(seconds)


def percent_text(share: float | None) -> str:
    """A share of one as a percentage.

    >>> percent_text(0.987), percent_text(None)
    ('99 %', '–')
    """
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.0f} %"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A line for each row of cells, so many columns to the left, the others to the right.

    >>> aligned([("site", "up"), ("s1", "3 MB")], left=1)
    ['site    up', 's1    3 MB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def subject(config: Config) -> str:
    """What a run trains, in a few words."""
    if config.workload == COMMAND:
        return "a script of the sites' own"
    split = "" if config.data.split == "iid" else f", {config.data.split}"
    return f"{config.workload} on {config.data.name}{split}"


def sites_text(num: int) -> str:
    """A number of sites.

    >>> sites_text(1), sites_text(4)
    ('1 site', '4 sites')
    """
    return f"{num} site" + "s" * (num != 1)
