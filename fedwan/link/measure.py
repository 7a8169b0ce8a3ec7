"""A site's measurement of its link: round trip, and the goodput of real transfers each way.

A payload of noise is uploaded, and one downloaded, by the calls, channels and settings of a run.
They grow until one takes long enough. Two things can be mended from outside: congestion control
(bbr follows the rate at which packets arrive, Cardwell et al. 2016, where others halve theirs for
each loss), and socket buffers: a flow has half of their bytes, at most, under way in a round trip.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedwan.config import LinkConfig, host_and_port
from fedwan.errors import ConfigError, LinkLost, PayloadError, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from fedwan.link.server import MAX_NOISE_BYTES, Noise
from fedwan.link.tcp import read_state
from fedwan.link.tls import Identity

DIAL_S = 5.0
PATIENCE_S = 10.0
NUM_TRIES = 3
"""Round trips of which the shortest counts."""
FIRST_BYTES = 1 << 20
LEAST_LOSS = 1e-5
"""Share of bytes sent again, from which on loss counts."""
LEAST_GAIN = 1.3
"""Below it, a measurement of seconds cannot tell a gain from chance."""


@dataclass(frozen=True)
class Way:
    """One direction."""

    mbit: float
    """Goodput of a transfer, over all channels."""
    congestion: str
    """Control of the sender's connections; empty if its kernel does not tell."""
    again: float | None
    """Share of the bytes that were sent again; None if that is not known here."""


@dataclass(frozen=True)
class Measurement:
    """As `fedwan doctor link` shows it."""

    address: str
    site: str
    channels: int
    rtt_ms: float
    """Without load."""
    loaded_ms: float
    """While uploading; 0 if the kernel does not tell."""
    up: Way
    down: Way
    pace_mbit: float = 0.0
    """Of the site, all channels together; 0 for none."""


def read_measurement(path: Path) -> Measurement:
    """What `fedwan doctor link --json` wrote."""
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
        figures |= {way: Way(**figures[way]) for way in ("up", "down")}
        found = Measurement(**figures)
        if not all(0 < x < math.inf for x in (found.rtt_ms, found.up.mbit, found.down.mbit)):
            raise ValueError
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"--link = {str(path)!r} is no measurement; write one with `fedwan doctor link --json`"
        ) from None


def measure(
    address: str, identity: Identity, settings: LinkConfig, seconds: float = 3.0
) -> Measurement:
    """Measure the link to a data plane, under the settings' `congestion` and `pace_mbit`.

    The transfers which count take so many seconds, each way; at most 256 MiB are sent.
    """
    rtt_ms = min(_connect_ms(address) for _ in range(NUM_TRIES))
    link = GrpcLink(address, identity, settings, patience_s=PATIENCE_S, packs=False)
    with closing(link):
        try:
            _upload(link, 1)
        except (LinkLost, SessionLost, PayloadError):
            raise ConfigError(
                f"{address} takes connections, but answers not as a data plane of this version of "
                "fedwan; give the address of link.listen, not of the front door (link.door), and "
                "see that its coordinator is not stopped"
            ) from None
        before = read_state(address)
        up_mbit = _goodput(lambda num: _upload(link, num), seconds)
        after = read_state(address)
        down_mbit = _goodput(lambda num: _download(link, num), seconds)
        sent = after.sent - before.sent
        again = (after.again - before.again) / sent if sent > 0 else None
        return Measurement(
            address=address,
            site=identity.name,
            channels=link.num_channels,
            rtt_ms=rtt_ms,
            loaded_ms=after.rtt_us / 1e3,
            up=Way(up_mbit, after.congestion, again),
            down=Way(down_mbit, _download(link, 1), None),
            pace_mbit=settings.pace_mbit,
        )


def _connect_ms(address: str) -> float:
    """Milliseconds that a TCP connection takes, which is a round trip."""
    try:
        began = time.monotonic()
        with socket.create_connection(host_and_port(address), timeout=DIAL_S):
            return (time.monotonic() - began) * 1e3
    except OSError as error:
        raise ConfigError(
            f"{address} cannot be reached ({error.strerror or error}); check the address, that a "
            "run is going on, whose data plane listens on link.listen, and firewalls on the way"
        ) from None


def _upload(link: GrpcLink, num_bytes: int) -> None:
    link.upload(wire.UploadHeader(kind=wire.UploadHeader.MEASUREMENT), Noise(num_bytes))


def _download(link: GrpcLink, num_bytes: int) -> str:
    """The control of the coordinator's connections."""
    request = wire.DownloadRequest(kind=wire.DownloadRequest.MEASUREMENT, version=num_bytes)
    return link.download(request).header.congestion


def _goodput(transfer: Callable[[int], object], seconds: float) -> float:
    """Mbit/s of the first transfer that takes at least half of so many seconds."""
    num_bytes = FIRST_BYTES
    while True:
        began = time.monotonic()
        transfer(num_bytes)
        took_s = time.monotonic() - began
        if took_s >= seconds / 2 or num_bytes >= MAX_NOISE_BYTES:
            return num_bytes * 8 / 1e6 / took_s
        num_bytes = min(MAX_NOISE_BYTES, math.ceil(num_bytes * max(2.0, seconds / took_s)))


def advise(found: Measurement, largest_buffer: int) -> str:
    """What would speed the link up, with the machine to say it on; '' where nothing would.

    `largest_buffer` is the site's limit of what a socket holds to send, in bytes; 0 if not known.
    """
    bbr = "sudo modprobe tcp_bbr; sudo sysctl -w net.ipv4.tcp_allowed_congestion_control="
    bbr += "'reno cubic bbr'"
    up, down, again = found.up, found.down, found.up.again or 0.0
    every = {way.congestion for way in (up, down)} - {""}
    slows = {name for name in every if not name.startswith("bbr")}
    if again > LEAST_LOSS and up.congestion in slows:
        why = f"{again:.2%} of the upload is sent again, which {up.congestion} slows down for"
        return f"on the site: {bbr}  ({why})"
    if up.mbit > LEAST_GAIN * down.mbit and down.congestion in slows:
        why = f"under {down.congestion} the download is {up.mbit / down.mbit:.1f} times slower"
        return f"on the coordinator: {bbr}  ({why} than the upload)"
    holds_mbit = found.channels * largest_buffer / 2 * 8 / 1e3 / (found.rtt_ms or 1.0)
    if up.mbit / LEAST_GAIN < holds_mbit < up.mbit * LEAST_GAIN:
        larger = f"sudo sysctl -w net.ipv4.tcp_wmem='4096 131072 {4 * largest_buffer}'"
        return f"on the site: {larger}  (its buffers carry {holds_mbit:.0f} Mbit/s over this way)"
    return ""
