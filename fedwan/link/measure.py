"""A site's measurement of its link: round trip, and the goodput of real transfers each way.

A payload of noise is uploaded, and one downloaded, by the calls, channels and settings of a run.
They grow until one takes long enough. Advice is the command that would speed the link up most. Two
things can be mended from outside: congestion control (bbr follows the rate at which packets arrive,
Cardwell et al. 2016, where others halve theirs for each loss), and socket buffers: a flow has no
more under way than they hold, about half of their size in data, in a round trip.
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

from fedwan.config import LinkConfig
from fedwan.errors import ConfigError, IdentityError, LinkLost, PayloadError, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from fedwan.link.server import MAX_NOISE_BYTES, Noise
from fedwan.link.tcp import TcpSettings, flow_mbit, read_settings, read_state
from fedwan.link.tls import Identity, handshake_complaint

DIAL_S = 5.0
PATIENCE_S = 10.0
NUM_TRIES = 3
"""Round trips of which the shortest counts."""
FIRST_BYTES = 1 << 20
LEAST_GAIN = 1.3
"""Below it, a measurement of seconds cannot tell a gain from chance."""
LEAST_LOSS = 1e-5
HELD = 2.0
"""How far above theory a flow may be that loss holds back: losses come in bursts."""
QUEUED = 1.5
"""Above this many idle round trips packets wait in a queue: the path is full."""
FILLED = 0.7
"""Share of what the buffers can carry, from which on they are said to limit."""
GROWTH = 4
"""How much larger buffers are proposed where the rate of the path is not known."""
LARGEST_BUFFER = 1 << 30
TCP_SHARE = 0.5
"""Of a socket buffer, what holds data; the rest is the kernel's book-keeping."""
_ALLOWED = "net.ipv4.tcp_allowed_congestion_control"


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
    """All that advice depends on."""

    address: str
    site: str
    channels: int
    rtt_ms: float
    """Without load."""
    loaded_ms: float
    """While uploading; 0 if the kernel does not tell."""
    up: Way
    down: Way
    machine: TcpSettings
    """Of the site."""
    pace_mbit: float = 0.0
    """Of the site, all channels together; 0 for none."""


def read_measurement(path: Path) -> Measurement:
    """What `fedwan doctor link --json` wrote."""
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
        figures.pop("advice")
        figures |= {way: Way(**figures[way]) for way in ("up", "down")}
        figures["machine"] = TcpSettings(**figures["machine"])
        return Measurement(**figures)
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
    if complaint := handshake_complaint(address, identity):
        raise IdentityError(complaint)
    link = GrpcLink(
        address,
        identity,
        patience_s=PATIENCE_S,
        congestion=settings.congestion,
        packs=False,
        pace_mbit=settings.pace_mbit,
    )
    with closing(link):
        try:
            _upload(link, 1)
        except (LinkLost, SessionLost, PayloadError):
            raise ConfigError(
                f"{address} answers, but not as a data plane of this version of fedwan; give the "
                "address of link.listen, not of the front door (link.door)"
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
            machine=read_settings(),
            pace_mbit=settings.pace_mbit,
        )


def _connect_ms(address: str) -> float:
    """Milliseconds that a TCP connection takes, which is a round trip."""
    host, _, port = address.rpartition(":")
    try:
        began = time.monotonic()
        with socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_S):
            return (time.monotonic() - began) * 1e3
    except socket.gaierror as error:
        reason = f"no machine is called {host!r} ({error.strerror}); check the address"
    except ConnectionRefusedError:
        reason = (
            f"nothing listens at {address}; the data plane does while a run is going on, "
            "on link.listen"
        )
    except OSError as error:
        reason = (
            f"{address} cannot be reached ({error.strerror or f'no answer in {DIAL_S:g} s'}); "
            "check the address, and the firewalls on the way"
        )
    raise ConfigError(reason)


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


# Advice ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """What to do, where, and what for."""

    machine: str
    """`site` or `coordinator`."""
    command: str
    """For a shell of that machine, or a setting."""
    gain: float
    """How many times the goodput of `way` may be expected; 1 if that is not known."""
    way: str
    """`up` or `down`."""
    text: str
    """One line: why, and the gain."""


def advise(found: Measurement, rate_mbit: float = 0.0) -> Advice | None:
    """The command with the largest gain, or None where there is nothing to mend.

    `rate_mbit` is what the path is known to carry, as by contract; 0 if that is not known.
    """
    ways = (("up", found.up, "wmem"), ("down", found.down, "rmem"))
    rules = [_bbr_up(found, rate_mbit), _bbr_down(found, rate_mbit)]
    rules += [_buffers(found, rate_mbit, *way) for way in ways]
    return max(filter(None, rules), key=lambda advice: advice.gain, default=None)


def _goes_by_loss(way: Way) -> bool:
    return bool(way.congestion) and not way.congestion.startswith("bbr")


def _bbr_up(found: Measurement, rate_mbit: float) -> Advice | None:
    """Where loss holds the site's uploads back."""
    way, loss = found.up, found.up.again or 0.0
    command = _allow_bbr(found.machine)
    if not _goes_by_loss(way) or loss < LEAST_LOSS or not command:
        return None
    bound = found.channels * flow_mbit(way.congestion, found.rtt_ms, loss)
    is_full = found.loaded_ms > QUEUED * found.rtt_ms
    gain = rate_mbit / way.mbit if rate_mbit else 1.0
    if gain < LEAST_GAIN if rate_mbit else is_full or way.mbit > HELD * bound:
        return None
    why = (
        f"{loss:.2%} of the upload is sent again, and {way.congestion} takes that for a full link: "
        f"{_mbit(way.mbit)}, where theory gives {_mbit(bound)}; expect "
        f"{f'up to {gain:.1f} times' if rate_mbit else 'more than'} that"
    )
    return Advice("site", command, gain, "up", why)


def _bbr_down(found: Measurement, rate_mbit: float) -> Advice | None:
    """Where the coordinator, whose losses are not seen here, sends more slowly than it might."""
    way, reach = found.down, rate_mbit or found.up.mbit
    gain = reach / way.mbit
    if not _goes_by_loss(way) or gain < LEAST_GAIN:
        return None
    why = (
        f"the download gets {_mbit(way.mbit)} under {way.congestion}, where "
        f"{'the path should carry' if rate_mbit else 'the upload gets'} {_mbit(reach)}; "
        f"expect up to {gain:.1f} times that under bbr"
    )
    command = f"sudo modprobe tcp_bbr; sudo sysctl -w {_ALLOWED}='reno cubic bbr'"
    return Advice("coordinator", command, gain, "down", why)


def _allow_bbr(machine: TcpSettings) -> str:
    if "bbr" in machine.allowed:
        return "link.congestion=auto"
    if "bbr" in machine.available:
        return f"sudo sysctl -w {_ALLOWED}='{' '.join((*machine.allowed, 'bbr'))}'"
    # Once loaded, any user may take it. Without a list the kernel is none that has modules.
    return "sudo modprobe tcp_bbr" if machine.available else ""


def _buffers(found: Measurement, rate_mbit: float, name: str, way: Way, key: str) -> Advice | None:
    """Larger limits of the site's socket buffers, where transfers fill them."""
    sizes = found.machine.send if name == "up" else found.machine.receive
    if len(sizes) != 3 or not found.rtt_ms:
        return None
    least, default, most = sizes
    limit = found.channels * most * TCP_SHARE * 8 / 1e6 / (found.rtt_ms / 1e3)
    size = round(most * rate_mbit / limit) if rate_mbit else most * GROWTH
    size = min(1 << (size - 1).bit_length(), LARGEST_BUFFER)
    gain = min(size / most, rate_mbit / way.mbit if rate_mbit else GROWTH)
    if not FILLED * limit <= way.mbit <= limit / FILLED or gain < LEAST_GAIN:
        return None
    why = (
        f"socket buffers of {most / 1e6:.1f} MB carry {_mbit(limit)} on {found.channels} channels "
        f"at {found.rtt_ms:.0f} ms, and the {name}load gets {_mbit(way.mbit)}; "
        f"expect up to {gain:.1f} times that"
    )
    command = f"sudo sysctl -w net.ipv4.tcp_{key}='{least} {default} {size}'"
    return Advice("site", command, gain, name, why)


def _mbit(rate: float) -> str:
    return f"{rate:.3g} Mbit/s" if rate < 1000 else f"{rate:.0f} Mbit/s"
