"""What the doctor says: which round, which site, which network, what, why, and the mend."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """One thing that is wrong, or worth knowing."""

    kind: str
    """As the table in docs/doctor.md has it."""
    site: str | None
    """Where; None for the run as a whole."""
    network: str | None
    """In which network; None for all of them, as with data."""
    version: int
    """The round in which it was told first."""
    why: str
    """The figures behind it, in one sentence."""
    mend: str
    """What to do about it, in one sentence."""
    is_warning: bool = True
    """False for a note: nothing needs to be mended."""

    @property
    def text(self) -> str:
        """One line for a log."""
        where = self.site or "the run"
        network = f", {self.network}" if self.network else ""
        return f"{where}{network}: {self.kind.replace('_', ' ')}: {self.why}; {self.mend}"
