"""What joins the places of a star: packets carried between TUN devices, `tc netem`, or bare veth.

Either way a child, `wan_tun.py`, knows the namespaces and removes them when its standard input
ends, so that nothing stays behind when whoever made the star is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.wan_spaces import ip
from fedwan.errors import FedwanError, UserError

__all__ = ["End", "NetemWires", "TunWires", "VethWires", "Wires"]

End = tuple[str, str]
"""A namespace, and a device in it."""

CLOSE_S = 10.0


class Wires(Protocol):
    """All links of a star, numbered from 0."""

    def own(self, names: list[str]) -> None:
        """Remove these namespaces in the end, whatever happens here."""
        ...

    def add(self, link: int, hub: End, site: End) -> None:
        """Make the next link with its two devices."""
        ...

    def shape(
        self, link: int, bytes_per_s: float, delay_s: float, loss: float, queue_bytes: float
    ) -> None:
        """Set both ways of a link."""
        ...

    def cut(self, link: int, seconds: float | None) -> None:
        """Cut a link for some seconds, or until it is mended."""
        ...

    def mend(self, link: int) -> None:
        """Mend a link."""
        ...

    def counts(self, link: int) -> dict[str, dict[str, int]]:
        """What went `up` and `down`."""
        ...

    def close(self) -> None:
        """Remove everything."""
        ...


class TunWires:
    """Links that `wan_tun.py` carries."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("wan_tun.py")
        # Lines both ways; a session of its own, so that Ctrl-C reaches it through us alone.
        self._child = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def _ask(self, do: str, **values: Any) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        with self._lock:
            try:
                self._child.stdin.write(json.dumps({"do": do, **values}) + "\n")
                self._child.stdin.flush()
                answer: dict[str, Any] = json.loads(self._child.stdout.readline())
            except (OSError, ValueError):
                raise FedwanError("the emulator has died; its error stands above") from None
        if "error" in answer:
            raise FedwanError(f"the emulator failed to {do}: {answer['error']}")
        return answer

    def own(self, names: list[str]) -> None:
        """See `Wires`."""
        self._ask("own", spaces=names)

    def add(self, link: int, hub: End, site: End) -> None:
        """See `Wires`."""
        self._ask("add", ends=[hub, site], seed=link)

    def shape(
        self, link: int, bytes_per_s: float, delay_s: float, loss: float, queue_bytes: float
    ) -> None:
        """See `Wires`."""
        shape = {"bytes_per_s": bytes_per_s, "delay_s": delay_s, "loss": loss}
        self._ask("shape", link=link, queue_bytes=queue_bytes, **shape)

    def cut(self, link: int, seconds: float | None) -> None:
        """See `Wires`."""
        self._ask("down", link=link, seconds=seconds)

    def mend(self, link: int) -> None:
        """See `Wires`."""
        self._ask("up", link=link)

    def counts(self, link: int) -> dict[str, dict[str, int]]:
        """See `Wires`."""
        return self._ask("counts", link=link)

    def close(self) -> None:
        """See `Wires`."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


class NetemWires:
    """Links of veth pairs whose ends delay and drop with `tc netem`."""

    def __init__(self) -> None:
        self._warden = TunWires()  # carries nothing, but cleans up
        self._ends: list[tuple[End, End]] = []
        self._shapes: dict[int, list[str]] = {}
        self._timers: dict[int, threading.Timer] = {}

    def own(self, names: list[str]) -> None:
        """See `Wires`."""
        self._warden.own(names)

    def add(self, link: int, hub: End, site: End) -> None:
        """See `Wires`."""
        peer = ["peer", "name", site[1], "netns", site[0]]
        ip("-n", hub[0], "link", "add", hub[1], "type", "veth", *peer)
        for name, device in (hub, site):
            # Segments one by one, as a wire would have them, or netem would lose super-packets.
            ip("-n", name, "link", "set", device, "gso_max_segs", "1")
        self._ends.append((hub, site))

    def shape(
        self, link: int, bytes_per_s: float, delay_s: float, loss: float, queue_bytes: float
    ) -> None:
        """See `Wires`."""
        # netem's limit counts the packets that wait and those that are under way.
        packets = (
            max(100, int((queue_bytes + bytes_per_s * delay_s) / 1500)) if bytes_per_s else 10**6
        )
        words = ["delay", f"{delay_s * 1e6:.0f}us", "limit", str(packets)]
        words += ["loss", f"{100 * loss:.6f}%"] if loss else []
        words += ["rate", f"{bytes_per_s * 8:.0f}bit"] if bytes_per_s else []
        self._shapes[link] = words
        self._apply(link, words)

    def _apply(self, link: int, words: list[str]) -> None:
        for name, device in self._ends[link]:
            command = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root", "netem", *words]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise FedwanError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")

    def cut(self, link: int, seconds: float | None) -> None:
        """See `Wires`."""
        self._forget_timer(link)
        self._apply(link, ["loss", "100%"])
        if seconds is not None:
            timer = self._timers[link] = threading.Timer(seconds, self.mend, [link])
            timer.start()

    def mend(self, link: int) -> None:
        """See `Wires`."""
        self._forget_timer(link)
        self._apply(link, self._shapes[link])

    def _forget_timer(self, link: int) -> None:
        if (timer := self._timers.pop(link, None)) is not None:
            timer.cancel()

    def counts(self, link: int) -> dict[str, dict[str, int]]:
        """See `Wires`; netem does not tell losses from drops of its queue."""
        ways = zip(("down", "up"), self._ends[link], strict=True)
        return {way: _counts_of(*end) for way, end in ways}

    def close(self) -> None:
        """See `Wires`."""
        for link in list(self._timers):
            self._forget_timer(link)
        self._warden.close()


class VethWires:
    """Links of veth pairs that carry all they can: no wide area, for figures beside it."""

    def __init__(self) -> None:
        self._warden = TunWires()  # carries nothing, but cleans up
        self._ends: list[tuple[End, End]] = []

    def own(self, names: list[str]) -> None:
        """See `Wires`."""
        self._warden.own(names)

    def add(self, link: int, hub: End, site: End) -> None:
        """See `Wires`."""
        peer = ["peer", "name", site[1], "netns", site[0]]
        ip("-n", hub[0], "link", "add", hub[1], "type", "veth", *peer)
        self._ends.append((hub, site))

    def shape(
        self, link: int, bytes_per_s: float, delay_s: float, loss: float, queue_bytes: float
    ) -> None:
        """Refuse whatever is no bare link."""
        if bytes_per_s or delay_s or loss:
            raise UserError("a veth link has no rate, delay or loss; set all three to 0")

    def cut(self, link: int, seconds: float | None) -> None:
        """Refuse."""
        raise UserError("a veth link cannot be cut; use the emulation `tun` or `netem`")

    def mend(self, link: int) -> None:
        """See `Wires`."""

    def counts(self, link: int) -> dict[str, dict[str, int]]:
        """See `Wires`; super-packets count as one, with one header."""
        ways = zip(("down", "up"), self._ends[link], strict=True)
        return {way: _sent_by(*end) for way, end in ways}

    def close(self) -> None:
        """See `Wires`."""
        self._warden.close()


def _sent_by(name: str, device: str) -> dict[str, int]:
    (row,) = json.loads(ip("-n", name, "-s", "-j", "link", "show", "dev", device))
    sent = row["stats64"]["tx"]
    return {"packets": sent["packets"], "bytes": sent["bytes"], "lost": sent["dropped"]}


def _counts_of(name: str, device: str) -> dict[str, int]:
    command = ["tc", "-n", name, "-j", "-s", "qdisc", "show", "dev", device, "root"]
    (row,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {"packets": row["packets"], "bytes": row["bytes"], "lost": row["drops"]}
