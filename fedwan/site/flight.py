"""A contribution from a site's weights to the update that answers it, and what may end its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.site.meter import Work
from fedwan.state import State


class CannotMerge(FedwanError):
    """This site's steps cannot be merged: it must start over from the global weights."""


class Refused(CannotMerge):
    """What it sent is not late, but cannot be used; the text says why."""


class Over(Exception):  # noqa: N818
    """The run is complete: nothing more will come."""


class Anew(NamedTuple):
    """How a site starts over from the global weights."""

    is_refused: bool
    """Whether its contribution could not be used."""
    held: Sequence[int | None]
    """By fragment, the version of the global weights that it has, if it knows."""
    unpaid: Mapping[int, tuple[int, State]]
    """By fragment, the version of a contribution that came too late, and what it was to pay."""


@dataclass
class Flight:
    """A contribution on its way up, or the update that answers it on its way down."""

    fragment: Fragment
    part: Fragment
    """What this site contributes of it."""
    version: int
    """That it contributes to."""
    lands_at: int
    done: Work
    """In the contribution."""
    header: wire.UploadHeader
    weights_sha256: str
    """Of the global weights that it starts from, where masks need it."""
    residual: State
    """What error feedback owes before it is encoded, beside what the delta holds of that."""
    owed: State = field(default_factory=dict)
    """Afterwards, at rank 0."""
    has_left: bool = False
    """Whether it may have reached the coordinator."""
    held: State = field(default_factory=dict)
    """With overlap, Δ when it departed, until it is encoded."""
    is_taken: bool = False
    """Whether the coordinator has said what becomes of it."""
    paid: State = field(default_factory=dict)
    """Then, what was owed until then, in the delta or beside it."""
    is_late: bool = False
    """If so, `paid` is owed on, unless it was merged and only the receipt was late."""
    update: Future[Delivery] | None = None
    """The answer to come, at rank 0."""
