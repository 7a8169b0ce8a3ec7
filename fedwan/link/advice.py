"""The one command that would speed a link up most, from what was measured on it.

Two things can be mended from outside. Congestion control: reno and cubic take every lost packet
for a full link. At a loss of p one flow gets no more than MSS / RTT · √(3/2) / √p (Mathis et al.
1997), or with cubic 1.054 · MSS · (RTT / p)^(3/4) / RTT (RFC 9438, section 5.1, C = 0.4, β = 0.7);
bbr follows the rate at which packets arrive instead (Cardwell et al. 2016). And socket buffers: a
flow has no more under way than they hold, about half of their size in data, in a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedwan.link.measure import Measurement, Way
from fedwan.link.shaped import MSS_BYTES, goodput_mbit
from fedwan.link.tcp import TcpSettings

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

    Args:
        found: the measurement.
        rate_mbit: what the path is known to carry, as by contract; 0 if that is not known.
    """
    candidates = [
        *_bbr_up(found, rate_mbit),
        *_bbr_down(found, rate_mbit),
        *_buffers(found, rate_mbit),
    ]
    return max(candidates, key=lambda candidate: candidate.gain, default=None)


def flow_mbit(congestion: str, rtt_ms: float, loss: float) -> float:
    """Mbit/s that one flow gets at most at this loss, by the theory of its congestion control.

    >>> round(flow_mbit("reno", 100.0, 0.0001), 1), round(flow_mbit("cubic", 100.0, 0.0001), 1)
    (14.2, 21.7)
    """
    reno = goodput_mbit(0.0, rtt_ms, loss)
    if congestion != "cubic" or not (loss and rtt_ms):
        return reno
    packets: float = 1.054 * (rtt_ms / 1e3 / loss) ** 0.75
    return max(reno, packets * MSS_BYTES * 8 / 1e6 / (rtt_ms / 1e3))


def _goes_by_loss(way: Way) -> bool:
    return bool(way.congestion) and not way.congestion.startswith("bbr")


def _bbr_up(found: Measurement, rate_mbit: float) -> Iterator[Advice]:
    """Where loss holds the site's uploads back."""
    way, loss = found.up, found.up.again or 0.0
    command = _allow_bbr(found.machine)
    if not _goes_by_loss(way) or loss < LEAST_LOSS or not command:
        return
    bound = found.channels * flow_mbit(way.congestion, found.rtt_ms, loss)
    is_full = found.loaded_ms > QUEUED * found.rtt_ms
    gain = rate_mbit / way.mbit if rate_mbit else 1.0
    if gain < LEAST_GAIN if rate_mbit else is_full or way.mbit > HELD * bound:
        return
    hope = f"expect up to {gain:.1f} times that" if rate_mbit else "expect more than that"
    why = (
        f"{loss:.2%} of the upload is sent again, and {way.congestion} takes that for a full link: "
        f"{_mbit(way.mbit)}, where theory gives {_mbit(bound)}; {hope}"
    )
    yield Advice("site", command, gain, "up", why)


def _bbr_down(found: Measurement, rate_mbit: float) -> Iterator[Advice]:
    """Where the coordinator, whose losses are not seen here, sends more slowly than it might."""
    way, reach = found.down, rate_mbit or found.up.mbit
    gain = reach / way.mbit
    if not _goes_by_loss(way) or gain < LEAST_GAIN:
        return
    source = "the path should carry" if rate_mbit else "the upload gets"
    command = f"sudo modprobe tcp_bbr; sudo sysctl -w {_ALLOWED}='reno cubic bbr'"
    why = (
        f"the download gets {_mbit(way.mbit)} under {way.congestion}, where {source} "
        f"{_mbit(reach)}; expect up to {gain:.1f} times that under bbr"
    )
    yield Advice("coordinator", command, gain, "down", why)


def _allow_bbr(machine: TcpSettings) -> str:
    if "bbr" in machine.allowed:
        return "link.congestion=auto"
    if "bbr" in machine.available:
        return f"sudo sysctl -w {_ALLOWED}='{' '.join((*machine.allowed, 'bbr'))}'"
    # Once loaded, any user may take it. Without a list the kernel is none that has modules.
    return "sudo modprobe tcp_bbr" if machine.available else ""


def _buffers(found: Measurement, rate_mbit: float) -> Iterator[Advice]:
    """Larger limits of the site's socket buffers, where transfers fill them."""
    cases = (
        ("up", found.up, "tcp_wmem", found.machine.send),
        ("down", found.down, "tcp_rmem", found.machine.receive),
    )
    for name, way, key, sizes in cases:
        if len(sizes) != 3 or not found.rtt_ms:
            continue
        limit = found.channels * sizes[2] * TCP_SHARE * 8 / 1e6 / (found.rtt_ms / 1e3)
        size = round(sizes[2] * rate_mbit / limit) if rate_mbit else sizes[2] * GROWTH
        size = min(1 << (size - 1).bit_length(), LARGEST_BUFFER)
        gain = min(size / sizes[2], rate_mbit / way.mbit if rate_mbit else GROWTH)
        if not FILLED * limit <= way.mbit <= limit / FILLED or gain < LEAST_GAIN:
            continue
        command = f"sudo sysctl -w net.ipv4.{key}='{sizes[0]} {sizes[1]} {size}'"
        why = (
            f"socket buffers of {sizes[2] / 1e6:.1f} MB carry {_mbit(limit)} on {found.channels} "
            f"channels at {found.rtt_ms:.0f} ms, and the {name}load gets {_mbit(way.mbit)}; "
            f"expect up to {gain:.1f} times that"
        )
        yield Advice("site", command, gain, name, why)


def _mbit(rate: float) -> str:
    return f"{rate:.3g} Mbit/s" if rate < 1000 else f"{rate:.0f} Mbit/s"
