"""What the run's operator asks at its socket, and decides: `fedwan status`, `fedwan sites`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedwan.config import Config
from fedwan.coordinator.records import Totals
from fedwan.coordinator.servicer import Servicer
from fedwan.errors import UserError
from fedwan.output.board import ABSENT, Awaited, clock_text, waiting_text
from fedwan.protocol.registry import DECIDED, Verb

_TEXTS: dict[Verb, str] = {
    "admit": "may take part again; start its service, unless it runs",
    "drain": "leaves once what it is sending has come; nobody waits for it any more",
    "eject": "is out; nothing more of it is taken",
}


def answer(
    request: Mapping[str, Any],
    hub: Servicer,
    config: Config,
    totals: Totals,
    event: Callable[[str, str, str], None],
) -> dict[str, Any]:
    """Of `{"ask": "status"}`, or `{"ask": "drain", "site": "s1"}`; may be a `UserError`."""
    ask, site = request.get("ask"), str(request.get("site"))[:80]
    if ask == "status":
        return _status(hub, config, totals)
    if not isinstance(ask, str) or ask not in DECIDED:
        raise UserError(f"ask = {str(ask)[:80]!r}; it is status, {', '.join(DECIDED)}")
    verb: Verb = ask
    with hub.changed:
        objection = hub.registry.objection(verb, site)
    if objection:
        raise UserError(objection)
    text = f"{site} {_TEXTS[verb]}"
    event(DECIDED[verb], site, text)  # on disk before it is done: it outlives the coordinator
    hub.decide(verb, site)
    return {"site": site, "event": DECIDED[verb], "text": text}


def decisions(journal: Path) -> Iterator[tuple[Verb, str]]:
    """What the operator decided in earlier starts of a run, in order."""
    verbs: dict[str, Verb] = {event: verb for verb, event in DECIDED.items()}
    for line in journal.read_bytes().splitlines() if journal.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # `fedwan verify` tells of damage
            row = json.loads(line)
            if row["event"] in verbs:
                yield verbs[row["event"]], row["site"]


def _status(hub: Servicer, config: Config, totals: Totals) -> dict[str, Any]:
    found = hub.survey()
    for row in found["sites"]:
        row |= totals.of_site(row["site"])
    awaited = [row for row in found["sites"] if row["site"] in found["waits_for"]]
    absent = [
        Awaited(row["site"], row["state"], row["heard"] or found["since"])
        for row in awaited
        if row["state"] in ABSENT
    ]
    text = waiting_text(absent, config) or (
        f"the present round began at {clock_text(found['since'])}; contributions of "
        f"{', '.join(found['waits_for']) or 'no site'} are still to come"
    )
    is_running, versions = True, config.steps // max(1, config.h)
    return {"is_running": is_running, "versions": versions, "text": hub.stop_text or text, **found}
