"""Runs `run_local` in a process of its own: `drive.py OUT SITES [resume]`."""

from __future__ import annotations

import signal
import sys

from fedwan.config import Config
from fedwan.errors import FedwanError
from fedwan.flower.local import run_local


def main(out: str, sites: str, *rest: str) -> int:
    # A shell that starts us in the background leaves it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_local(Config(out=out, sites=int(sites)), resume="resume" in rest)
    except FedwanError as error:
        print(f"fedwan: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
