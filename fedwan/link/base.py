"""What carries contributions and updates: the site's end (`Link`) and the coordinator's (`Hub`).

Both speak in the messages of `wire.proto`, whatever lies between them: `LoopbackLink` calls the hub
in the same process, `GrpcLink` and `DataPlane` put mutual TLS between them, `ShapedLink` slows any
of them down. Payloads are `Source`s: random access, so that a transfer can resume anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fedwan.errors import WireError
from fedwan.link import wire_pb2 as wire

if TYPE_CHECKING:  # Flower's apps read tickets, without torch
    from fedwan.codecs.payload import Source
    from fedwan.link.buffer import UploadReception

PROTOCOL = 18
"""Version of the wire protocol; Join refuses any other."""

Signals = SimpleQueue[wire.CoordinatorSignal]
"""What the coordinator has to say to a site, in order."""


class Delivery(NamedTuple):
    """The answer to a download request."""

    header: wire.DownloadHeader
    payload: Source | None
    """None unless the header says READY."""


class Proof(NamedTuple):
    """Of who has sent a contribution."""

    certificate: bytes
    """PEM: what TLS has verified."""
    signature: bytes
    """Of `fedwan.protocol.evidence.statement`, by the certificate's key; empty if it has none."""


class Link(Protocol):
    """A site's end. Calls block, retry while patience lasts, then raise `LinkLost`."""

    @property
    def signals(self) -> Signals:
        """Evaluate, stop, and the like, as they arrive."""

    @property
    def bytes_up(self) -> int:
        """Bytes sent so far: serialised messages with gRPC's 5-byte prefix."""

    @property
    def bytes_down(self) -> int:
        """Bytes received so far, counted alike."""

    def join(self, hello: wire.Hello) -> wire.Welcome:
        """Introduce the site and begin heartbeats; else a `JoinRefused` or an `IdentityError`."""

    def heartbeat(self, step: int) -> None:
        """Note the step that the next heartbeat will carry. Costs nothing."""

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        """Bring a payload to the coordinator, resuming as often as needed."""

    def download(self, request: wire.DownloadRequest) -> Delivery:
        """Fetch a payload, or the reason why there is none yet."""

    def report(self, report: wire.QualityReport) -> None:
        """Hand in the quality of the EMA weights."""

    def unmask(self, answer: wire.Unmasked) -> None:
        """Hand in a part in taking the masks off a sum."""

    def leave(self, farewell: wire.Farewell) -> None:
        """Say the last word and stop the heartbeats."""

    def close(self) -> None:
        """Release sockets and threads; nothing can be called afterwards."""


class Hub(Protocol):
    """The coordinator's end. Every call names the site, whose certificate proved the name."""

    def join(self, site: str, hello: wire.Hello) -> wire.Welcome:
        """Admit a site, or say in `refusal` why not."""

    def attach(self, site: str, session: str) -> Signals:
        """The signals for a session, from now on."""

    def heard(self, site: str, signal: wire.SiteSignal) -> None:
        """A heartbeat arrived."""

    def detach(self, site: str, session: str) -> None:
        """The Control stream of a session ended."""

    def open_upload(self, site: str, header: wire.UploadHeader) -> UploadReception | wire.Receipt:
        """Where to put a payload's chunks, or a receipt if none are wanted."""

    def close_stripe(
        self, site: str, header: wire.UploadHeader, proof: Proof | None = None
    ) -> wire.Receipt:
        """A stripe ended: the receipt if the payload is whole, else what is missing.

        Within a process nothing proves the site's name, and contributions are not signed.
        """

    def download(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """What was asked for, after waiting up to `wait_s` for it."""

    def report(self, site: str, report: wire.QualityReport) -> None:
        """Quality figures from a site."""

    def unmask(self, site: str, answer: wire.Unmasked) -> None:
        """A site's part in taking the masks off a sum."""

    def leave(self, site: str, farewell: wire.Farewell) -> None:
        """A site's last word."""

    def refuse(self, site: str, text: str) -> None:
        """A call was refused before it came here, of a site or of who knows; told as others are."""


@dataclass(frozen=True)
class Ticket:
    """The one message that a site gets per run, through Flower, and all it needs to take part."""

    address: str
    """`host:port` of the data plane, as sites dial it."""
    run_id: str
    """The same after a resume, so that a site still alive rejoins without a new ticket."""
    config: str
    """The resolved configuration, as JSON."""
    start: str
    """Of the coordinator: a site that it has joined already needs no ticket."""

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Ticket:
        """From its fields; those that a newer coordinator added are ignored."""
        found: dict[str, str] = {}
        for field in fields(cls):
            value = values.get(field.name)
            if not isinstance(value, str) or not value:
                raise WireError(
                    f"ticket field {field.name!r} is {value!r}, not a non-empty string; "
                    "run the same fedwan version on the coordinator and on every site"
                )
            found[field.name] = value
        if not re.fullmatch("[0-9a-f]{32}", found["run_id"]):  # part of a path at the site
            raise WireError(f"ticket's run_id is {found['run_id']!r}, not 32 hexadecimal digits")
        return cls(**found)
