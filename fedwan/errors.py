"""Every error that fedwan raises on purpose.

Bugs of our own are `AssertionError`s and keep their traceback.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

STOPPED = "the run was stopped from outside"
"""Of a run that its operator has stopped."""


class FedwanError(Exception):
    """Root of the tree; its text is one line that a user can act on."""

    exit_code = 1


class UserError(FedwanError):
    """Something the user asked for cannot be done as asked."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key is unknown, a value is out of range, or a setting has no effect."""


class IdentityError(UserError):
    """A certificate or key is missing, expired, revoked, or of another authority."""


class JoinRefused(UserError):
    """The coordinator refused this site: another run, protocol, or initial weights."""


class SiteEjected(JoinRefused):
    """The run's operator has put this site out."""


class WireError(FedwanError):
    """Bytes that came from outside do not hold what they claim."""


class PayloadError(WireError):
    """An encoded payload is truncated, oversized, of an unknown layout, or not finite."""


class CheckpointError(WireError):
    """A checkpoint is missing, truncated, or belongs to another run."""

    exit_code = 2


class DiskFull(FedwanError, OSError):
    """A disk has no room for what has to be written; trying again helps once there is room."""


class LinkLost(FedwanError):
    """The other side could not be reached for as long as patience allows."""


class SessionLost(FedwanError):
    """Another process of the same site took over, or the coordinator was started anew."""


class NotJoined(SessionLost):
    """The coordinator was started again, and has not let this site in yet."""


class RunStopped(FedwanError):
    """The run ended before its last step: stopped from outside, or below its quorum."""


class FailedAfter(FedwanError):
    """A script took part to its run's end, and then failed."""


class SiteDrained(RunStopped):
    """The run's operator has asked this site to leave, which it has done in order."""

    exit_code = 0


class ProcessLost(FedwanError):
    """A process of the coordinator's was killed, or Flower took it for dead and ended it."""


TREE = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, FedwanError)
}
"""By name."""

_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_OWN = ("<", str(Path(__file__).parent), *_LIBRARIES)
"""What the names of files begin with that are not the user's."""


def place_of(error: BaseException) -> str:
    """File and line of the last call that is the user's own, ` (train.py:7)`; '' if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    return last_own((frame.filename, str(frame.lineno)) for frame in frames)


def last_own(places: Iterable[tuple[str, str]]) -> str:
    """Of files and lines, as `place_of`."""
    own = [f"{Path(file).name}:{line}" for file, line in places if not file.startswith(_NOT_OWN)]
    return f" ({own[-1]})" if own else ""
