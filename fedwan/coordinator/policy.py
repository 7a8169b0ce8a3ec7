"""When a round closes: a pure function of what has arrived and how long it took."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["RoundPolicy", "Verdict", "barrier"]

Verdict = Literal["wait", "close", "stop"]


class RoundPolicy(NamedTuple):
    """Waits for all sites; after `patience_s` a quorum will do, and below it the run stops."""

    num_sites: int
    quorum: int
    patience_s: float

    def decide(self, num_arrived: int, elapsed_s: float) -> Verdict:
        """What to do `elapsed_s` seconds after the round's first contribution could have come.

        >>> barrier(4, quorum=3, patience_s=60).decide(3, 59.0)
        'wait'
        >>> barrier(4, quorum=3, patience_s=60).decide(3, 60.0)
        'close'
        >>> barrier(4, quorum=3, patience_s=60).decide(2, 60.0)
        'stop'
        """
        if num_arrived >= self.num_sites:
            return "close"
        if elapsed_s < self.patience_s:
            return "wait"
        return "close" if num_arrived >= self.quorum else "stop"


def barrier(num_sites: int, quorum: int = 0, patience_s: float = 600.0) -> RoundPolicy:
    """A round needs every site; with `quorum` > 0 it makes do with that many after `patience_s`."""
    return RoundPolicy(num_sites, quorum or num_sites, patience_s)
