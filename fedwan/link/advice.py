"""The one command that would speed a link up most, from what was measured on it.

Two things can be mended from outside. Congestion control: reno and cubic take every lost packet
for a full link. At a loss of p one flow gets no more than MSS / RTT · √(3/2) / √p (Mathis et al.
1997), or with cubic 1.054 · MSS · (RTT / p)^(3/4) / RTT (RFC 9438, section 5.1, C = 0.4, β = 0.7);
bbr follows the rate at which packets arrive instead (Cardwell et al. 2016). And socket buffers: a
flow has no more under way than they hold, about half of their size in data, in a round trip.

A gain is told only as far as it was seen: a path that carried more for a second than it carried in
the long run, or one whose rate the user knows. What was sent again is no proof of a bad path by
itself: a full one loses packets too, so many that theory agrees. But there packets queue first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedwan.link.measure import Machine, Measurement, Way
from fedwan.link.shaped import MSS_BYTES, goodput_mbit

__all__ = ["Advice", "advise", "flow_mbit"]

LEAST_GAIN = 1.3
"""Below it, a measurement of seconds cannot tell a gain from chance."""
LEAST_LOSS = 1e-5
HELD = 2.0
"""How far above theory a flow may be that loss holds back: losses come in bursts."""
QUEUED = 1.5
"""Above this many idle round trips packets wait in a queue: the path is full."""
LIMITED = 0.3
"""Share of the time from which buffers are said to limit."""
GROWTH = 4
"""How much larger buffers are proposed where the rate of the path is not known."""
LARGEST_BUFFER = 1 << 30
TCP_SHARE = 0.5
"""Of a socket buffer, what holds data; the rest is the kernel's book-keeping."""


@dataclass(frozen=True)
class Advice:
    """What to do, where, and what for."""

    machine: str
    """`site` or `coordinator`."""
    command: str
    """For a shell of that machine, or a setting."""
    gain: float
    """How many times the goodput of `way` may be expected."""
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
    ways = (
        ("up", found.up, ("site", found.here), ("coordinator", found.there)),
        ("down", found.down, ("coordinator", found.there), ("site", found.here)),
    )
    candidates: list[Advice] = []
    for name, way, sender, receiver in ways:
        candidates += _other_control(found, name, way, sender, rate_mbit)
        candidates += _larger_buffers(found, name, way, sender, receiver, rate_mbit)
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


def _other_control(
    found: Measurement, name: str, way: Way, sender: tuple[str, Machine], rate_mbit: float
) -> Iterator[Advice]:
    """bbr, where loss holds another one back."""
    if not way.congestion or way.congestion.startswith("bbr") or not way.all_mbit:
        return
    if way.loss is None or way.loss < LEAST_LOSS or way.window + way.buffer > 0.5:
        return
    bound = found.channels * flow_mbit(way.congestion, found.rtt_ms, way.loss)
    reach = rate_mbit or way.best_mbit
    gain = reach / way.all_mbit
    is_full = way.rtt_ms > QUEUED * found.rtt_ms
    grows = found.channels == 1 or way.all_mbit >= 1.5 * way.one_mbit
    is_held = way.all_mbit <= HELD * bound and grows
    if (is_full and not rate_mbit) or (gain < LEAST_GAIN and (rate_mbit or not is_held)):
        return
    why = (
        f"{way.loss:.2%} of the {name}load is sent again on one channel, and {way.congestion} "
        f"takes that for a full link: {_mbit(way.all_mbit)} on {found.channels} channels"
    )
    if is_held:
        why += f", where theory gives {_mbit(bound)}"
    if gain >= LEAST_GAIN:
        hope = f"expect {_least(rate_mbit)}{gain:.1f} times that, {_mbit(reach)}"
    else:
        hope = "expect more than that; --rate MBIT, what the path should carry, tells how much"
    machine, settings = sender
    command = _allow_bbr(settings)
    if command:
        yield Advice(machine, command, max(gain, 1.0), name, f"{why}; {hope}")


def _allow_bbr(settings: Machine) -> str:
    if "bbr" in settings.allowed:
        return "link.congestion=auto"
    if "bbr" in settings.available:
        allowed = " ".join((*settings.allowed, "bbr"))
        return f"sudo sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed}'"
    # Once loaded, any user may take it. Without a list the kernel is none that has modules.
    return "sudo modprobe tcp_bbr" if settings.available else ""


def _larger_buffers(
    found: Measurement,
    name: str,
    way: Way,
    sender: tuple[str, Machine],
    receiver: tuple[str, Machine],
    rate_mbit: float,
) -> Iterator[Advice]:
    """Larger limits of socket buffers, where flows wait for them and they are really short."""
    cases = (
        (way.window, "tcp_rmem", receiver[0], receiver[1].receive),
        (way.buffer, "tcp_wmem", sender[0], sender[1].send),
    )
    for share, key, machine, sizes in cases:
        if share < LIMITED or len(sizes) != 3 or not found.rtt_ms or not way.all_mbit:
            continue
        cap = found.channels * _buffer_mbit(sizes[2], found.rtt_ms)
        size = _enough(found, sizes[2], rate_mbit)
        # Waiting alone is no proof: a receiver that is slow to read makes a sender wait as well.
        if way.all_mbit < 0.5 * cap or size <= sizes[2]:
            continue
        gain = min(size / sizes[2], rate_mbit / way.all_mbit if rate_mbit else GROWTH)
        if gain < LEAST_GAIN:
            continue
        yield Advice(
            machine,
            f"sudo sysctl -w net.ipv4.{key}='{_words((*sizes[:2], size))}'",
            gain,
            name,
            f"the {name}load waits {share:.0%} of the time for socket buffers of "
            f"{sizes[2] / 1e6:.1f} MB, which carry {_mbit(cap)} on {found.channels} channels at "
            f"{found.rtt_ms:.0f} ms; expect up to {gain:.1f} times the {_mbit(way.all_mbit)} "
            "measured",
        )


def _buffer_mbit(size: int, rtt_ms: float) -> float:
    return size * TCP_SHARE * 8 / 1e6 / (rtt_ms / 1e3)


def _enough(found: Measurement, size: int, rate_mbit: float) -> int:
    """Bytes of a buffer for the channel's share of the rate, a power of two; or just more."""
    wanted = float(size * GROWTH)
    if rate_mbit:
        wanted = rate_mbit / found.channels * 1e6 / 8 * found.rtt_ms / 1e3 / TCP_SHARE
    enough = 1 << 16
    while enough < wanted:
        enough *= 2
    return min(enough, LARGEST_BUFFER)


def _least(rate_mbit: float) -> str:
    return "up to " if rate_mbit else "at least "


def _mbit(rate: float) -> str:
    return f"{rate:.3g} Mbit/s" if rate < 1000 else f"{rate:.0f} Mbit/s"


def _words(sizes: Sequence[int]) -> str:
    return " ".join(str(size) for size in sizes)
