"""Runs `run_local` of one site in a process of its own: `drive.py OUT`."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from fedwan.app import load_run
from fedwan.errors import FedwanError
from fedwan.flower.coordinator import run_local
from fedwan.flower.processes import stop_on_sigterm

TRAIN = Path(__file__).with_name("train.py")


def main(out: str) -> int:
    # A shell that starts us in the background leaves it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = ("strategy=local_sgd", "h=2", "eval.every=0", "checkpoint.every=1")
    config = load_run(None, [f"out={out}", "sites=1", "workload=command", *words])
    stop = threading.Event()
    try:
        with stop_on_sigterm(stop):
            run_local(config, stop=stop, command=["python", str(TRAIN), out])
    except FedwanError as error:
        print(f"fedwan: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
