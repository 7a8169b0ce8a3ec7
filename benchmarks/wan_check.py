"""What an emulated link really gives: its round trip by ping, its rate by one flow of iperf3."""

from __future__ import annotations

import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedwan.errors import FedwanError  # noqa: E402

__all__ = ["Check", "check", "round_trip_ms", "tcp_mbit"]

PORT = 5201
PINGS = 10
WARM_UP_S = 1


class _Place(Protocol):
    address: str

    def popen(self, words: list[str], **options: Any) -> subprocess.Popen[Any]: ...

    def run(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[Any]: ...


@dataclass(frozen=True)
class Check:
    """A link's measure."""

    site: str
    asked: str
    rtt_ms: float
    up_mbit: float
    """Payload of one TCP flow from the site to the coordinator."""
    down_mbit: float
    sender: str
    """`iperf3`, or `python` where there is none."""

    def __str__(self) -> str:
        return (
            f"{self.site}: {self.rtt_ms:.1f} ms, up {self.up_mbit:.0f} and down "
            f"{self.down_mbit:.0f} Mbit/s of TCP ({self.sender}); asked for {self.asked}"
        )


def check(coordinator: _Place, site: _Place, asked: object, seconds: int) -> Check:
    """Measure a link that nothing else uses.

    Args:
        coordinator: one end.
        site: the other.
        asked: what the link should be; for the text.
        seconds: of each of two transfers.
    """
    sender = "iperf3" if shutil.which("iperf3") else "python"
    rtt_ms = round_trip_ms(site, coordinator)
    up_mbit = tcp_mbit(coordinator, site, seconds)
    down_mbit = tcp_mbit(site, coordinator, seconds)
    return Check(site.address, f"{asked}", rtt_ms, up_mbit, down_mbit, sender)


def round_trip_ms(here: _Place, there: _Place, num: int = PINGS) -> float:
    """Median round trip in ms: by ping, or by the time that TCP takes to be refused."""
    if shutil.which("ping"):
        command = ["ping", "-n", "-c", str(num), "-i", "0.1", "-W", "2", there.address]
        times = re.findall(r"time=([0-9.]+)", _output(here, command, 10 + num))
    else:
        command = [sys.executable, __file__, "connect", there.address, str(num)]
        times = _output(here, command, 10 + 3 * num).split()
    if not times:
        raise FedwanError(f"none of {num} pings came back from {there.address}; is the link cut?")
    return statistics.median(float(time) for time in times)


def tcp_mbit(
    receiver: _Place,
    sender: _Place,
    seconds: int,
    warm_up_s: int = WARM_UP_S,
    congestion: str = "",
) -> float:
    """Mbit/s of payload that one TCP flow brings over, after its first `warm_up_s`."""
    if not shutil.which("iperf3"):
        return _python_mbit(receiver, sender, seconds, warm_up_s)
    listen = ["iperf3", "-s", "-1", "-B", receiver.address, "-p", str(PORT), "--forceflush"]
    server = receiver.popen(listen, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if "listening" in line:
                break
        command = ["iperf3", "-J", "-c", receiver.address, "-p", str(PORT)]
        command += ["-t", str(seconds), "-O", str(warm_up_s)]
        command += ["-C", congestion] if congestion else []
        result = json.loads(_output(sender, command, seconds + warm_up_s + 30))
    finally:
        server.kill()
        server.communicate()
    if "error" in result:
        raise FedwanError(f"iperf3 to {receiver.address} failed: {result['error']}")
    return float(result["end"]["sum_received"]["bits_per_second"]) / 1e6


def _output(place: _Place, command: list[str], timeout_s: float) -> str:
    try:
        result = place.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise FedwanError(f"`{' '.join(command)}` took more than {timeout_s:g} s") from None
    return str(result.stdout)


def _python_mbit(receiver: _Place, sender: _Place, seconds: float, warm_up_s: float) -> float:
    """The same by two processes of this file."""
    numbers = [f"{seconds:g}", f"{warm_up_s:g}"]
    command = [sys.executable, __file__, "receive", receiver.address, *numbers]
    server = receiver.popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        server.stdout.readline()  # it listens
        command = [sys.executable, __file__, "send", receiver.address, *numbers]
        _output(sender, command, seconds + warm_up_s + 30)
        text, _ = server.communicate(timeout=30)
    finally:
        server.kill()
        server.communicate()
    return float(text)


def _receive(address: str, seconds: float, warm_up_s: float) -> None:
    """Take in one flow, and print the Mbit/s of its time after the warm-up."""
    with socket.create_server((address, PORT)) as listener:
        print("listening", flush=True)
        flow, _ = listener.accept()
    num_bytes, began, last = 0, time.monotonic() + warm_up_s, 0.0
    with flow:
        while data := flow.recv(1 << 20):
            last = time.monotonic()
            if began <= last <= began + seconds:
                num_bytes += len(data)
    print(num_bytes * 8 / 1e6 / max(1e-9, min(last - began, seconds)))


def _send(address: str, seconds: float, warm_up_s: float) -> None:
    block, until = bytes(1 << 20), time.monotonic() + warm_up_s + seconds
    with socket.create_connection((address, PORT), timeout=10) as flow:
        while time.monotonic() < until:
            flow.sendall(block)


def _connect(address: str, num: int) -> None:
    """Print the ms of `num` refused connections, each a round trip."""
    for _ in range(num):
        began = time.monotonic()
        try:
            socket.create_connection((address, 9), timeout=3).close()
        except ConnectionRefusedError:
            print(1e3 * (time.monotonic() - began))
        except OSError:
            pass


if __name__ == "__main__":
    if sys.argv[1] == "connect":
        _connect(sys.argv[2], int(sys.argv[3]))
    else:
        run = _receive if sys.argv[1] == "receive" else _send
        run(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
