"""A contribution of 4 GB on a rough link: three resets of every connection, and 60 s of silence.

One site uploads to one coordinator, both real processes in network namespaces (`wan.py`), mutual
TLS, the product's defaults; the payload is made as it is read and arrives in a file, so that
neither end holds it. Resets come at a tenth, a half and nine tenths of the way, silence at three
tenths. The wire's own time is that of the payload's bytes at the link's rate, headers of TCP and IP
included, and of the silence. `--quick`: 0.4 GB and 6 s.
"""

from __future__ import annotations

import argparse
import subprocess
import time

from benchmarks.harness.table import Row
from benchmarks.transport import TCP_SHARE, opened
from benchmarks.wan import Star, WanLink

RTT_MS = 100.0
FAULTS = ((0.1, "reset"), (0.3, "silence"), (0.5, "reset"), (0.9, "reset"))
CASES = ("contribution",)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate-mbit", type=float, default=100.0)


def measure_case(args: argparse.Namespace, case: str, seed: int) -> Row:
    gb, silence_s = (0.4, 6.0) if args.quick else (4.0, 60.0)
    wire_s = gb * 8e3 / (args.rate_mbit * TCP_SHARE) + silence_s
    with Star(1, WanLink(args.rate_mbit, RTT_MS)) as star, opened(star) as ends:
        cut, num_resets = ["ss", "-KHt", f"( sport = :{ends.port} )"], 0
        ends.order("contribution", int(gb * 1e9))
        for share, kind in FAULTS:
            while star.carried()[0][0] * TCP_SHARE < share * gb * 1e9:
                ends.require_alive()
                time.sleep(0.1)
            if kind == "silence":
                star.silence(silence_s)
            else:
                closed, _ = star.coordinator.popen(cut, stdout=subprocess.PIPE).communicate()
                num_resets += bool(closed)  # nothing on a kernel that cannot
        seconds, _, site_mb = ends.result()
        coordinator_mb = float(ends.coordinator.communicate(timeout=30)[0])
    return {
        "gb": gb,
        "rate_mbit": args.rate_mbit,
        "rtt_ms": RTT_MS,
        "resets": num_resets,
        "silence_s": silence_s,
        "seconds": round(seconds, 1),
        "wire_s": round(wire_s, 1),
        "ratio": round(seconds / wire_s, 3),
        "site_rss_mb": round(site_mb),
        "coordinator_rss_mb": round(coordinator_mb),
    }
