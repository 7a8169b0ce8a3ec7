"""One benchmark: `python -m benchmarks NAME [--quick] [--json PATH] [options of its own]`.

A benchmark is a module here with `measure(args)`, which yields its rows as they come; it may have
`add_options(parser)`, and `summarise(rows)`, which gives lines of text.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.harness.table import print_row, write_rows
from fedwan.errors import FedwanError

FOLDER = Path(__file__).parent
MODULES = {p.stem: p.stem for p in sorted(FOLDER.glob("[a-z]*.py")) if p.stem[:3] != "wan"}
MODULES["peers"] = "peers.compare"


def read_arguments(module: ModuleType, name: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="a short form of it")
    parser.add_argument("--only", default="", help="only cases whose text holds this")
    getattr(module, "add_options", lambda parser: None)(parser)
    return parser.parse_args(words)


def run(module: ModuleType, args: argparse.Namespace) -> None:
    """Measure, print a table and its summary, and write rows."""
    rows: list[dict[str, Any]] = []
    for row in module.measure(args):
        rows.append(row)
        print_row(row, is_first=len(rows) == 1)
        if args.json:
            write_rows(args.json, rows)
    for line in getattr(module, "summarise", lambda rows: [])(rows):
        print(line)


def main() -> None:
    name, *words = sys.argv[1:] or ["--help"]
    if name not in MODULES:
        print(f"no benchmark {name!r}; choose from {', '.join(MODULES)}", file=sys.stderr)
        sys.exit(2)
    module = import_module(f"benchmarks.{MODULES[name]}")
    try:
        run(module, read_arguments(module, name, words))
    except FedwanError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
