"""Goodput of the data plane beside one TCP flow of iperf3, on the same emulated link, in turns.

    python benchmarks/transport.py [--quick] [--json PATH]

A site uploads payloads of about 8 s over mutual TLS to a coordinator, both real processes in
network namespaces (see `wan.py`). Both sides' figures are bytes of payload over wall time, slow
start included; iperf3's connection is new, the data plane's stand as they do between two rounds.
How channels are used is what `link.channels=0` settles on, in uploads of a third of that time,
before those that count. Each figure is the median of three.

Row: link rate_mbit rtt_ms loss cc channels goodput_mbit tcp_mbit ratio emulation way
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.transport_plot import draw  # noqa: E402

from benchmarks import wan_check  # noqa: E402
from benchmarks.wan import Star, WanLink, available  # noqa: E402
from fedwan.link import pki  # noqa: E402
from fedwan.link.shaped import goodput_mbit  # noqa: E402

RATES = (200.0, 1000.0)
LOSSES = (0.0, 0.01, 0.1)
"""Percent."""
CONTROLS = ("cubic", "bbr")
RTT_MS = 100.0
ENDS = Path(__file__).with_name("transport_ends.py")
WARM_UPS = 16
"""Transfers after which the use of channels is settled; 8 if their number is given."""
LEAST_BYTES = 8 << 20
PAUSE_S = 1.2
"""Idle time before a transfer that counts, as between two rounds."""


@dataclass(frozen=True)
class Case:
    """A row to be measured."""

    link: WanLink
    congestion: str
    way: str
    channels: int
    seconds: int
    repeats: int

    def num_bytes(self, rate_mbit: float) -> int:
        """Of a payload that takes as long as it should at this rate."""
        return max(LEAST_BYTES, int(self.seconds * rate_mbit * 1e6 / 8))


class Ends:
    """The data plane's two processes.

    Args:
        star: where they run; None for this machine's loopback and a `ShapedLink`.
        case: what is measured.
        folder: of the identities.
    """

    def __init__(self, star: Star | None, case: Case, folder: Path) -> None:
        host = star.coordinator_address() if star else "127.0.0.1"
        pki.init(folder, [host])
        pki.issue(folder, "s1")
        python = [sys.executable, str(ENDS)]
        words = ["--congestion", case.congestion]
        pipes: dict[str, Any] = {"stdin": -1, "stdout": -1, "text": True}
        start: Any = star.coordinator.popen if star else subprocess.Popen
        self._server = start([*python, "serve", str(folder), host, *words], **pipes)
        address = f"{host}:{self._server.stdout.readline().strip()}"
        words += ["--channels", str(case.channels)]
        if not star:
            shape = [case.link.rate_mbit, case.link.rtt_ms, case.link.loss]
            words += ["--shape", json.dumps(shape)]
        start = star.site(0).popen if star else subprocess.Popen
        self._site = start([*python, "transfer", str(folder), address, *words], **pipes)

    def transfer(self, way: str, num_bytes: int) -> tuple[float, int]:
        """Mbit/s of a transfer, and its number of channels."""
        self._site.stdin.write(json.dumps({"way": way, "num_bytes": num_bytes}) + "\n")
        self._site.stdin.flush()
        line = self._site.stdout.readline()
        if not line:
            raise SystemExit("an end of the benchmark failed; its error stands above")
        answer = json.loads(line)
        return num_bytes * 8 / 1e6 / answer["seconds"], answer["channels"]

    def close(self) -> None:
        """End both."""
        for child in (self._site, self._server):
            child.stdin.close()
            child.wait(timeout=30)
            child.stdout.close()


@contextmanager
def opened(star: Star | None, case: Case) -> Iterator[Ends]:
    """The two ends, with identities of a moment's life."""
    with tempfile.TemporaryDirectory() as name:
        ends = Ends(star, case, Path(name))
        try:
            yield ends
        finally:
            ends.close()


def tcp_mbit(star: Star | None, case: Case) -> float:
    """What one flow of iperf3 gets, or what the model of `ShapedLink` says that it would."""
    if star is None:
        link = case.link
        return goodput_mbit(link.rate_mbit, link.rtt_ms, link.loss)
    ends = [star.coordinator, star.site(0)]
    receiver, sender = ends if case.way == "up" else ends[::-1]
    return wan_check.tcp_mbit(receiver, sender, case.seconds, 0, case.congestion)


def measure(star: Star | None, case: Case) -> dict[str, Any]:
    """One row, both in turns."""
    if star is not None:
        star.change(0, case.link)
    ours: list[float] = []
    theirs: list[float] = []
    with opened(star, case) as ends:
        rate = case.link.rate_mbit / 4
        for _ in range(8 if case.channels else WARM_UPS):
            time.sleep(PAUSE_S)
            rate, _ = ends.transfer(case.way, case.num_bytes(rate / 3))
        for _ in range(case.repeats):
            theirs.append(tcp_mbit(star, case))
            time.sleep(PAUSE_S)
            rate, channels = ends.transfer(case.way, case.num_bytes(rate))
            ours.append(rate)
    goodput, tcp = statistics.median(ours), statistics.median(theirs)
    return {
        "link": f"{case.link.rate_mbit:g} Mbit/s, {case.link.rtt_ms:g} ms",
        "rate_mbit": case.link.rate_mbit,
        "rtt_ms": case.link.rtt_ms,
        "loss": case.link.loss,
        "cc": case.congestion,
        "channels": channels,
        "goodput_mbit": round(goodput, 1),
        "tcp_mbit": round(tcp, 1),
        "ratio": round(goodput / tcp, 3),
        "emulation": star.emulation if star else "shaped",
        "way": case.way,
        "all_goodput_mbit": [round(value, 1) for value in ours],
        "all_tcp_mbit": [round(value, 1) for value in theirs],
    }


def cases(args: argparse.Namespace) -> list[Case]:
    """Every row that was asked for."""
    seconds, repeats = (4, 1) if args.quick else (8, 3)
    seconds = args.seconds or seconds
    return [
        Case(WanLink(rate, RTT_MS, loss / 100), cc, args.way, args.channels, seconds, repeats)
        for rate in args.rate_mbit
        for loss in args.loss
        for cc in args.cc
    ]


def run(wanted: Sequence[Case], star: Star | None) -> list[dict[str, Any]]:
    """All rows, each shown as soon as it is known."""
    rows: list[dict[str, Any]] = []
    for case in wanted:
        rows.append(measure(star, case))
        shown = {key: value for key, value in rows[-1].items() if not key.startswith("all_")}
        print_row(shown, len(rows) == 1)
    return rows


def main() -> None:
    """Measure every row, print a table, write rows and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file, a PNG beside it")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file holds")
    parser.add_argument("--quick", action="store_true", help="4 s instead of 8, once")
    parser.add_argument("--seconds", type=int, default=0, help="of a transfer that counts")
    parser.add_argument("--rate-mbit", type=float, nargs="+", default=RATES)
    parser.add_argument(
        "--loss", type=float, nargs="+", default=LOSSES, help="in percent, each way"
    )
    parser.add_argument("--cc", nargs="+", default=CONTROLS, help="cubic, bbr or system")
    parser.add_argument("--way", choices=["up", "down"], default="up")
    parser.add_argument("--channels", type=int, default=0, help="0: what the product settles on")
    args = parser.parse_args()
    wanted = cases(args)
    reason = available()
    if reason is not None:
        print(f"no emulated WAN here ({reason}): shaped links and a model of TCP instead")
        rows = run([replace(case, repeats=1) for case in wanted], None)
    else:
        with Star(1, wanted[0].link) as star:
            rows = run(wanted, star)
    if args.json:
        if args.append and args.json.exists():
            rows = [json.loads(line) for line in args.json.read_text().splitlines()] + rows
        write_rows(args.json, rows)
        draw(rows, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
