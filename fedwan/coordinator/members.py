"""What the run's operator asks at its socket, and decides: `fedwan status`, `fedwan sites`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedwan.coordinator.federation import LONGEST_FAILURE
from fedwan.errors import UserError
from fedwan.output.board import ABSENT, clock_text, waiting_text
from fedwan.protocol.limits import shown
from fedwan.protocol.registry import DECIDED, Verb

if TYPE_CHECKING:
    from fedwan.coordinator.run import CoordinatedRun

_TEXTS: dict[Verb, str] = {
    "admit": "may take part again; start its service, unless it runs",
    "drain": "leaves once what it is sending has come; nobody waits for it any more",
    "eject": "is out; nothing more of it is taken",
}


def answer(run: CoordinatedRun, request: Mapping[str, Any]) -> dict[str, Any]:
    """Of `{"ask": "status"}`, or `{"ask": "drain", "site": "s1"}`; may be a `UserError`.

    `{"ask": "ending", "text": …}` is of who started the run, and is about to end it;
    `{"ask": "refused", "site": "s1", "text": …}` of the front door, which is another process.
    """
    ask, site = request.get("ask"), shown(str(request.get("site")), 80)
    if ask == "status":
        return _status(run)
    if ask == "ending":
        run.cause = str(request.get("text"))
        return {}
    if ask == "refused":
        text = shown(str(request.get("text")), LONGEST_FAILURE)
        run.hub.event("rejected", site or None, text)
        return {}
    if not isinstance(ask, str) or ask not in DECIDED:
        raise UserError(f"ask = {str(ask)[:80]!r}; it is status, {', '.join(DECIDED)}")
    verb: Verb = ask
    with run.hub.deciding:  # what is objected to depends on what was decided before
        registry, masking = run.hub.registry, run.hub.masking
        with run.hub.changed:
            objection = registry.objection(verb, site)
            if masking and verb != "admit" and not objection:
                entries = registry.sites.items()
                others = [n for n, entry in entries if n != site and entry.standing == "in"]
                objection = masking.needs(site, others)
                masking.is_deciding = not objection
        if objection:
            raise UserError(objection)
        text = f"{site} {_TEXTS['eject' if masking and verb == 'drain' else verb]}"
        try:
            # On disk before it is done: it outlives the coordinator.
            run.hub.event(DECIDED[verb], site, text)
            run.hub.decide(verb, site)
        finally:
            if masking:
                masking.is_deciding = False
    return {"site": site, "event": DECIDED[verb], "text": text}


def _status(run: CoordinatedRun) -> dict[str, Any]:
    found, config = run.hub.survey(), run.config
    since = found["since"]
    for row in found["sites"]:
        row |= run.totals.of_site(row["site"])
    states = {row["site"]: row["state"] for row in found["sites"]}
    absent = [
        (row["site"], row["state"], row["heard"] or since)
        for row in found["sites"]
        if row["site"] in found["waits_for"] and row["state"] in ABSENT
    ]
    text = run.hub.stop_text or waiting_text(absent, states, config)
    text = text or (
        f"the present round began at {clock_text(since)}; contributions of "
        f"{', '.join(found['waits_for']) or 'no site'} are still to come"
    )
    return {"is_running": True, "versions": config.steps // max(1, config.h), "text": text, **found}
