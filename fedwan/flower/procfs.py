"""What the kernel says about processes: who is alive, whose child, in which session.

Read from /proc/PID/stat, see proc(5). On systems without /proc every answer is "unknown": lists
are empty and `stat` is None, and callers fall back to process groups.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessStat", "in_sessions", "is_known", "list_processes", "stat"]

_PROC = Path("/proc")


class ProcessStat(NamedTuple):
    """One process at one moment."""

    pid: int
    parent: int
    session: int
    """Id of its session leader; survives the death of its parents, unlike `parent`."""
    state: str
    """One letter; `Z` is dead but not yet reaped."""
    started: int
    """Clock ticks since boot; with `pid` it names a process for good."""

    @property
    def alive(self) -> bool:
        """Whether the process still runs code."""
        return self.state not in "ZX"


def is_known() -> bool:
    """Whether this system tells about its processes."""
    return (_PROC / "self" / "stat").exists()


def stat(pid: int) -> ProcessStat | None:
    """The process with this id, None where there is none (or nothing is known)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command, in parentheses, may itself hold blanks and parentheses: count from the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(pid, int(fields[1]), int(fields[3]), fields[0], int(fields[19]))


def list_processes() -> list[ProcessStat]:
    """Every process of the system, the dead ones included."""
    if not is_known():
        return []
    found = (stat(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return [process for process in found if process is not None]


def in_sessions(sessions: set[int], since: int) -> list[ProcessStat]:
    """Live processes of these sessions, their descendants, and the sessions those opened.

    Args:
        sessions: ids of session leaders; sessions that are found on the way are added to it, so
            that a later call finds their members even when the process that linked them is gone.
        since: ignore processes that started before this tick, which cannot be ours.
    """
    processes = [p for p in list_processes() if p.started >= since]
    while True:
        members = {p.pid for p in processes if p.session in sessions}
        grown = sessions | {p.session for p in processes if p.parent in members}
        if grown == sessions:
            return [p for p in processes if p.session in sessions and p.alive]
        sessions |= grown
