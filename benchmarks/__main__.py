"""One benchmark: `python -m benchmarks NAME [--quick] [--json PATH] [options of its own]`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.harness.table import read_arguments, run
from fedwan.errors import FedwanError

FOLDER = Path(__file__).parent
MODULES = {p.stem: p.stem for p in sorted(FOLDER.glob("[a-z]*.py")) if p.stem[:3] != "wan"}
MODULES["peers"] = "peers.compare"


def main() -> None:
    name, *words = sys.argv[1:] or ["--help"]
    if name not in MODULES:
        print(f"no benchmark {name!r}; choose from {', '.join(MODULES)}", file=sys.stderr)
        sys.exit(2)
    module = import_module(f"benchmarks.{MODULES[name]}")
    # So that what a benchmark has started and mounted is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(module, read_arguments(module, name, words))
    except FedwanError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
