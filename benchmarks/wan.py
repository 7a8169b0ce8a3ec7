"""An emulated wide area: a star of network namespaces around a coordinator. Needs root and Linux.

    python benchmarks/wan.py up --sites 4 --rate-mbit 200 --rtt-ms 100 --loss 0.1

`--loss` is in percent on this command line. Everything stays up until Ctrl-C or SIGTERM and is
removed then, with what still runs inside. In a program, where `loss` is a share of 1:

    with Star(sites=2, link=WanLink(rate_mbit=200, rtt_ms=100)) as star:
        server = star.coordinator.popen(["my-server", "--host", star.coordinator_address()])
        star.site(0).run(["my-client", star.coordinator_address()])

Each site has a link of its own to the coordinator, with a rate, round-trip time, loss and queue,
full duplex, which may change or fail while it is in use. All sites reach the coordinator at one
address, and each other through it. Real TCP of the kernel runs over it, in real processes.

`tc netem` where the kernel has it, else a process that carries packets between TUN devices
(`wan_tun.py`). Rates count IP bytes, headers of every segment included: TCP gets 96.5 % at most.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import wan_check, wan_spaces  # noqa: E402
from benchmarks.wan_host import available, best_emulation  # noqa: E402
from benchmarks.wan_wires import NetemWires, TunWires, VethWires, Wires  # noqa: E402
from fedwan.errors import UserError  # noqa: E402

__all__ = ["Place", "Star", "WanLink", "WanUnavailable", "available"]

COORDINATOR = "198.18.0.1"  # RFC 2544 keeps 198.18.0.0/15 for benchmarks
LEAST_QUEUE_BYTES = 256 << 10
WIRES = {"tun": TunWires, "netem": NetemWires, "veth": VethWires}

_numbers = itertools.count()  # several stars of one process may be up at once


class WanUnavailable(UserError):
    """This machine cannot emulate a network; fall back to `ShapedLink`."""


@dataclass(frozen=True)
class WanLink:
    """One link; both ways are alike."""

    def __str__(self) -> str:
        return f"{self.rate_mbit:g} Mbit/s, {self.rtt_ms:g} ms, {100 * self.loss:g} % lost"

    rate_mbit: float = 200.0
    """Mbit/s of IP packets, each way; 0 does not limit."""
    rtt_ms: float = 100.0
    """Round-trip time of an empty link."""
    loss: float = 0.0
    """Share of packets lost, each way, 0 to 1."""
    queue_ms: float = 0.0
    """Length of the queue before the link, as time; 0 takes the round trip, 256 KiB at least."""

    def __post_init__(self) -> None:
        for name in ("rate_mbit", "rtt_ms", "queue_ms"):
            if not 0 <= getattr(self, name) < 1e6:
                raise UserError(f"{name} = {getattr(self, name)!r} is no link's; choose 0 to 1e6")
        if not 0 <= self.loss < 1:
            text = f"loss = {self.loss:g} ({100 * self.loss:g} %) is no link's"
            raise UserError(f"{text}; choose 0 or more and less than 1 (100 %)")

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self.rate_mbit * 1e6 / 8

    @property
    def queue_bytes(self) -> float:
        """What the queue holds."""
        queue_s = (self.queue_ms or self.rtt_ms) / 1e3
        least = 0 if self.queue_ms else LEAST_QUEUE_BYTES
        return max(least, self.bytes_per_s * queue_s)


class Place:
    """A machine of the star.

    Args:
        name: of its network namespace.
        address: where the others reach it.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._children: list[subprocess.Popen[Any]] = []
        self._routes: list[list[str]] = []

    def add_route(self, target: str, device: str) -> None:
        """Reach a target through a device."""
        route = [target, "dev", device, "src", self.address]
        wan_spaces.ip("-n", self.name, "route", "add", *route)
        self._routes.append(route)

    def set_congestion(self, name: str) -> None:
        """Set the congestion control of new connections from and to here.

        By route: in a namespace, a sysctl takes only what the machine allows to everybody.
        """
        for route in self._routes:
            wan_spaces.ip("-n", self.name, "route", "change", *route, "congctl", name)

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that runs another one here."""
        return ["ip", "netns", "exec", self.name, *words]

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process here; it is ended with the star at the latest."""
        child = subprocess.Popen(self.command(words), **options)
        self._children.append(child)
        return child

    def run(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a process here to its end."""
        return subprocess.run(self.command(words), **options)

    def reap(self) -> None:
        """End what was started here and did not end with the namespace, as it was not in it yet."""
        for child in self._children:
            child.kill()
            child.wait()


class Star:
    """A coordinator and sites around it, up between `with` and its end.

    Args:
        sites: how many.
        link: every site's, or one for each.
        emulation: `tun` or `netem`, the best that this machine has if left out; `veth` for bare
            links, without a rate, delay or loss.

    Raises:
        WanUnavailable: this machine cannot emulate a network; the text says why.
    """

    def __init__(
        self,
        sites: int = 2,
        link: WanLink | Sequence[WanLink] = WanLink(),  # noqa: B008
        emulation: str | None = None,
    ) -> None:
        links = [link] * sites if isinstance(link, WanLink) else list(link)
        if not 1 <= len(links) == sites <= 200:
            raise UserError(
                f"{len(links)} links for {sites} sites; give 1 to 200 sites a link each"
            )
        self.emulation = emulation or best_emulation()
        if self.emulation not in WIRES:
            raise UserError(f"emulation = {emulation!r} is none of {', '.join(WIRES)}")
        self.links = links
        names = wan_spaces.names_of(next(_numbers), sites)
        self.coordinator = Place(names[0], COORDINATOR)
        self.sites = [Place(name, f"198.18.1.{n + 1}") for n, name in enumerate(names[1:])]
        self._wires: Wires | None = None

    def site(self, index: int) -> Place:
        """The place of a site, from 0."""
        return self.sites[index]

    def coordinator_address(self, site: int = 0) -> str:
        """Where a site reaches the coordinator: the same for every site."""
        return self.coordinator.address

    def __enter__(self) -> Self:
        if (reason := available()) is not None:
            raise WanUnavailable(f"no emulated WAN here: {reason}; use ShapedLink instead")
        wan_spaces.sweep()
        self._wires = WIRES[self.emulation]()
        try:
            self._set_up(self._wires)
        except BaseException:
            self.close()
            raise
        return self

    def _set_up(self, wires: Wires) -> None:
        places = [self.coordinator, *self.sites]
        wires.own([place.name for place in places])
        for place in places:
            wan_spaces.make(place.name)
        hub = self.coordinator
        wan_spaces.set_sysctl(hub.name, "net.ipv4.ip_forward", "1")
        wan_spaces.ip("-n", hub.name, "addr", "add", f"{hub.address}/32", "dev", "lo")
        for index, site in enumerate(self.sites):
            device = f"wan{index}"
            wires.add(index, (hub.name, device), (site.name, "wan"))
            for name, end in ((hub.name, device), (site.name, "wan")):
                wan_spaces.ip("-n", name, "link", "set", end, "mtu", "1500", "up")
                wan_spaces.ip("-n", name, "link", "set", end, "txqueuelen", "10000")
            wan_spaces.ip("-n", site.name, "addr", "add", f"{site.address}/32", "dev", "wan")
            hub.add_route(f"{site.address}/32", device)
            site.add_route("198.18.0.0/15", "wan")
            self.change(index, self.links[index])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove namespaces, devices, and every process inside."""
        places = [self.coordinator, *self.sites]
        if self._wires is not None:
            self._wires.close()
            self._wires = None
        wan_spaces.remove([place.name for place in places])  # what a killed warden left
        for place in places:
            place.reap()

    def change(self, site: int, link: WanLink) -> None:
        """Give a site another link from now on; what is under way keeps its time."""
        self.links[site] = link
        self._up().shape(site, link.bytes_per_s, link.rtt_ms / 2e3, link.loss, link.queue_bytes)

    def outage(self, site: int, seconds: float | None = None) -> None:
        """Cut a site's link for some seconds, or until `mend`; returns at once."""
        self._up().cut(site, seconds)

    def mend(self, site: int) -> None:
        """End an outage."""
        self._up().mend(site)

    def counts(self, site: int) -> dict[str, dict[str, int]]:
        """Packets and bytes carried, and packets dropped by cause, `up` and `down`."""
        return self._up().counts(site)

    def set_congestion(self, name: str, place: Place | None = None) -> None:
        """Set the congestion control of new connections, in one place or everywhere.

        Of those that do not choose their own; `net.ipv4.tcp_congestion_control` stays as it is.
        """
        for target in [place] if place else [self.coordinator, *self.sites]:
            target.set_congestion(name)

    def check(self, seconds: int = 3) -> list[wan_check.Check]:
        """What each link really gives, one after the other: round trip, Mbit/s of one flow."""
        return [
            wan_check.check(self.coordinator, site, link, seconds)
            for site, link in zip(self.sites, self.links, strict=True)
        ]

    def _up(self) -> Wires:
        if self._wires is None:
            raise UserError("the star is not up; use it inside `with Star(...) as star:`")
        return self._wires


def up(sites: int, link: WanLink, do_check: bool) -> None:
    """Keep a star up until a signal, and say what is where."""
    with Star(sites, link) as star:
        print(f"emulated by {star.emulation}; press Ctrl-C to remove everything")
        for role, place in [
            ("coordinator", star.coordinator),
            *zip(itertools.count(1), star.sites),
        ]:
            name = role if isinstance(role, str) else f"site {role}"
            print(f"{name:12} {place.address:14} ip netns exec {place.name} COMMAND", flush=True)
        for check in star.check() if do_check else []:
            print(check, flush=True)
        signal.pause()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["up"], help="keep a star up until Ctrl-C or SIGTERM")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="each way; 0: no limit")
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--loss", type=float, default=0.0, help="in percent, each way")
    parser.add_argument("--queue-ms", type=float, default=0.0, help="0: a round trip")
    parser.add_argument("--check", action="store_true", help="measure every link first")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        link = WanLink(args.rate_mbit, args.rtt_ms, args.loss / 100, args.queue_ms)
        up(args.sites, link, args.check)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
