"""What the journal tells of a run's earlier starts, and the checkpoint that it goes on from not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedwan.coordinator.records import Totals
from fedwan.link import wire_pb2 as wire
from fedwan.output.records import SPENT
from fedwan.protocol.registry import DECIDED, Verb

_VERBS: dict[str, Verb] = {event: verb for verb, event in DECIDED.items()}
_UNMERGED = ("leave", "late", "rejected")
"""What may tell of time and bytes that are part of no merged contribution."""
_EVENTS = (*_VERBS, *_UNMERGED, "join", "rejoin", "checkpoint", "resume", "warning")


@dataclass
class Past:
    """Of all earlier starts."""

    decisions: list[tuple[Verb, str, bool]] = field(default_factory=list)
    """What the operator decided, in order; with each, whether the site has joined since."""
    rejoins: int = 0
    unmerged: Totals = field(default_factory=Totals)
    """What sites did after their last contributions, as they said when they left."""
    saved: list[int] = field(default_factory=list)
    """Versions of the fragments in the checkpoint that was written last."""
    spent: int = 0
    """Steps of privacy of whole sites, with those of versions that were made twice."""
    anew_from: list[int] = field(default_factory=list)
    """See `Rounds.anew_from`."""

    @classmethod
    def read(cls, journal: Path) -> Past:
        """From the journal's file; nothing if there is none."""
        past, wanted = cls(), [event.encode() for event in _EVENTS]
        with suppress(FileNotFoundError), journal.open("rb") as lines:
            for line in (line for line in lines if any(event in line for event in wanted)):
                with suppress(ValueError, KeyError, TypeError):  # `fedwan verify` tells of damage
                    past._take(json.loads(line))
        return past

    def _take(self, row: Mapping[str, Any]) -> None:
        match row["event"]:
            case "join" | "rejoin" as event:
                self.rejoins += event == "rejoin"
                self.decisions = [
                    (verb, site, has_joined or site == row["site"])
                    for verb, site, has_joined in self.decisions
                ]
            # Who is drained says farewell yet.
            case event if event in _UNMERGED and row.keys() >= {*SPENT}:
                self.unmerged.add_work(wire.Work(**{name: row[name] for name in SPENT}))
            case "checkpoint":
                self.saved = list(row["versions"])
                self.spent = max(self.spent, row.get("spent", 0))
            case "warning" if "anew_from" in row:
                self.anew_from = list(row["anew_from"])
            case "resume":  # that the sites began anew at a version that is taken back was so, too
                both = zip(self.anew_from, row["versions"], strict=False)
                self.anew_from = [min(version, at + 1) for version, at in both]
            case event if event in _VERBS:
                self.decisions.append((_VERBS[event], row["site"], False))
