"""The one runner of tables: arguments, cases, seeds, rows as they come, and means over seeds.

A benchmark is a module with `CASES` or `cases(args)` and `measure_case(args, case, seed)`, a row of
one; or, where rows depend on each other, with `measure(args)`, which yields them. It may have
`add_options(parser)`, `summarise(rows)`, which gives lines of text, and `SEEDS`, how many seeds it
takes: from 0 on, on which settings are chosen, or with `--fresh` from 100 on, on which they are
reported. No run mixes the two.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedwan.errors import UserError

Row = dict[str, Any]
Case = TypeVar("Case")
FRESH = 100
"""The first seed that nothing was tuned on."""


def read_arguments(module: ModuleType, name: str, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="a short form of it")
    parser.add_argument("--only", default="", help="only cases whose text holds this")
    if hasattr(module, "SEEDS"):
        parser.add_argument("--seeds", type=int, help=f"how many; {module.SEEDS}, fewer if quick")
        parser.set_defaults(most_seeds=module.SEEDS)
        parser.add_argument("--fresh", action="store_true", help="seeds from 100 on, not from 0")
    getattr(module, "add_options", lambda parser: None)(parser)
    return parser.parse_args(words)


def seeds_of(args: argparse.Namespace, quick: int = 1) -> range:
    """The seeds that are asked for; left open, fewer in quick form."""
    num = args.seeds
    if num is None:
        num = quick if args.quick else args.most_seeds
    if not 1 <= num <= FRESH:
        raise UserError(f"--seeds={num} would mix tuned seeds with fresh ones; take 1 to {FRESH}")
    first = FRESH if args.fresh else 0
    return range(first, first + num)


def measure_all(module: ModuleType, args: argparse.Namespace) -> Iterator[Row]:
    """Rows of a benchmark: every case with the first seed, then with the next."""
    if hasattr(module, "measure"):
        yield from module.measure(args)
        return
    every = module.cases(args) if hasattr(module, "cases") else list(module.CASES)
    cases = select(every, args.only)
    for seed in seeds_of(args) if hasattr(module, "SEEDS") else (0,):
        for case in cases:
            yield module.measure_case(args, case, seed)


def run(module: ModuleType, args: argparse.Namespace) -> None:
    """Measure, print a table and its summary, and write rows, one JSON object a line."""
    rows: list[Row] = []
    for row in measure_all(module, args):
        rows.append(row)
        print_row(row, is_first=len(rows) == 1)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for line in getattr(module, "summarise", lambda rows: [])(rows):
        print(line)


def print_row(row: Mapping[str, Any], is_first: bool) -> None:
    """A line of a Markdown table as soon as it is known, under its header; lists are left out."""
    row = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
    # Words of later rows may be longer than the first one's.
    widths = {k: max(len(k), 16 if isinstance(v, str) else 7) for k, v in row.items()}
    if is_first:
        print("|", " | ".join(key.rjust(widths[key]) for key in row), "|")
        print("|", " | ".join("-" * (widths[key] - 1) + ":" for key in row), "|")
    texts = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in row.items()}
    print("|", " | ".join(text.rjust(widths[k]) for k, text in texts.items()), "|", flush=True)


def columns_of(case: object, names: str) -> Row:
    """The fields of a case that are columns, by their names in one text."""
    return {name: getattr(case, name) for name in names.split()}


def select(cases: Mapping[str, Case] | Iterable[Case], text: str) -> list[Case]:
    """Those cases that hold a text: in their names, or as a text themselves."""
    named = cases if isinstance(cases, Mapping) else {str(case): case for case in cases}
    found = [case for name, case in named.items() if text in name]
    if not found:
        raise UserError(f"--only {text!r} is in none of: {'; '.join(named)}")
    return found


def grouped(rows: Iterable[Row], names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what they have in some columns, by the columns' names in one text."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names.split()), []).append(row)
    return groups


def means(rows: Iterable[Row], names: str, figures: str) -> Iterator[str]:
    """A line for each group: means of figures over seeds, with their 95 % intervals."""
    for key, group in grouped(rows, names).items():
        texts = (f"{figure} {told(group, figure)}" for figure in figures.split())
        yield f"{', '.join(map(str, key))}: {', '.join(texts)}"


def mean_of(rows: Sequence[Row], key: str, **wanted: object) -> float:
    """Mean over the rows that have all these values; NaN if there is none."""
    values = values_of(rows, key, **wanted)
    return statistics.mean(values) if values else float("nan")


def values_of(rows: Sequence[Row], key: str, **wanted: object) -> list[float]:
    return [row[key] for row in rows if all(row[k] == v for k, v in wanted.items())]


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the mean's 95 % interval, over seeds; NaN of a single one."""
    if (num := len(values)) < 2:
        return float("nan")
    from scipy.stats import t as student  # large, and most processes do without

    return float(student.ppf(0.975, num - 1)) * statistics.stdev(values) / math.sqrt(num)


def ratio_half_interval(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the 95 % interval of a ratio of means, paired by seed; NaN of a single pair.

    With r = mean(ours) / mean(theirs), by the delta method: that of the mean of ours - r theirs,
    over the mean of theirs. What a seed does to both does not count.
    """
    ratio = statistics.fmean(ours) / statistics.fmean(theirs)
    rests = [one - ratio * other for one, other in zip(ours, theirs, strict=True)]
    return half_interval(rests) / statistics.fmean(theirs)


def told(rows: Sequence[Row], key: str, **wanted: object) -> str:
    """A mean with its 95 % interval, where there are several seeds."""
    values = values_of(rows, key, **wanted)
    half = f" ± {half_interval(values):.3f}" if len(values) > 1 else ""
    return f"{mean_of(rows, key, **wanted):.3f}{half}"
