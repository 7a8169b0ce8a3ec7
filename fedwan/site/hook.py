"""What a strategy may do at a site: state that it keeps there, and when it is asked.

A strategy that only merges needs none. One that corrects steps (`strategies/scaffnew.py`) or writes
estimates into the local weights (`strategies/eager_diloco.py`) has one of its own on its page, and
gives `Strategy.hook`, which makes it for a site's replica. Where a network lies in pieces, a hook
works on this process's own.
"""

from __future__ import annotations

from typing import NamedTuple

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.fragments import Fragment
from fedwan.state import State

__all__ = ["Landing", "SiteHook"]


class Landing(NamedTuple):
    """An update that is about to land: the global weights have moved, the local ones have not."""

    steps: int
    """Taken since the fragment landed last."""
    is_merged: bool
    """Whether this site's latest contribution is in the update."""
    is_replaced: bool
    """Whether the local weights will simply become the global ones."""
    residual: State
    """What error feedback added to that contribution: whole tensors, at rank 0 alone."""
    owed: State
    """What it owed afterwards: as above."""


class SiteHook:
    """Does nothing. A subclass overrides what it needs; all run in the step loop's thread.

    Attributes:
        state: tensors that go into the site's checkpoints; put back by writing into them.
    """

    state: State

    def __init__(self) -> None:
        self.state = {}

    def after_step(self) -> None:
        """A step is complete, and no contribution has left yet."""

    def before_send(self, fragment: Fragment) -> None:
        """A fragment's Δ was taken and is about to leave; local weights may be changed."""

    def on_update(self, fragment: Fragment, payload: Source, codec: Codec) -> None:
        """The global weights were moved by this update; may be called in another thread."""

    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        """An update lands; True if the hook has written the local weights itself."""
        return False

    def on_adopt(self) -> None:
        """The global weights were taken over whole, at whatever versions they are."""

    def forget(self, fragment: Fragment) -> None:
        """Begin anew: another site has lost its state."""
