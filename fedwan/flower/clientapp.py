"""Inside the ClientApp: the training processes of a site, started for a ticket and watched.

A recipe runs as `python -m fedwan.site.recipe`, under torchrun where the run asks for several
processes; a run of `workload=command` runs the site's own command. Both find their assignment by an
environment variable and leave word of how they ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict

from fedwan.config import from_json
from fedwan.errors import DiskFull, FailedAfter, FedwanError, UserError
from fedwan.files import no_room
from fedwan.flower.processes import Service, last_line
from fedwan.flower.serverapp import RECORD
from fedwan.flower.site_file import SiteFile, assignment_path, find_command, given_site
from fedwan.flower.status import Status, clientapp_files, reported
from fedwan.link.base import Ticket
from fedwan.site.assignment import (
    VARIABLE,
    Assignment,
    drop_meeting,
    machine,
    newest_version,
    read_outcome,
    welcomed_by,
)

_POLL_S = 0.1
_GRACE_S = 3.0
_LONGEST_TEXT = 10_000
"""Of an answer, of which a coordinator keeps the beginning."""

_log = logging.getLogger(__name__)


def answer_ticket(message: Message) -> Message:
    """Take part in the run that a ticket is for, and answer how it ended."""
    site = given_site()
    error: FedwanError | None = None
    try:
        with reported(*clientapp_files(Path(site.dir))) as tell:
            fields = message.content.config_records.get(RECORD, ConfigRecord())
            train(Ticket.from_dict(fields), site, tell)
    except FedwanError as caught:
        error = caught
    except Exception as bug:  # whose whole text Flower sends, and the door may not pass
        raise RuntimeError(repr(bug)[:_LONGEST_TEXT]) from bug
    ended = Status.of().ended(error)
    record = {"site": site.site, "outcome": ended.outcome, "text": ended.text[:_LONGEST_TEXT]}
    return Message(RecordDict({RECORD: ConfigRecord(dict(record))}), reply_to=message)


def train(ticket: Ticket, site: SiteFile, tell: Callable[[str, str, str], None]) -> None:
    """Run the site's training processes until the run is over; raises what they ended with.

    `tell` hears of the run and the coordinator's start once the site has joined it, and why the
    script is started again.

    A script that fails by itself or is killed is started again at once if it had got further than
    the time before: it goes on from its checkpoint.
    """
    config = from_json(ticket.config)
    argv, folder = find_command(config, site)
    path, log = assignment_path(site), clientapp_files(Path(site.dir))[0]
    name = f"{ticket.run_id} ({config.workload}, {config.strategy})"
    failed_at, has_joined, error = (-1, -1), False, FedwanError()
    outcome, _ = read_outcome(path)
    has_ended = outcome is not None and outcome.error in ("", FailedAfter.__name__)
    if outcome and has_ended and welcomed_by(path) == ticket.start:
        tell(name, "", ticket.start)  # its script joined this start by itself, and took part in it
        if outcome.error:
            raise outcome.exception()
        return
    while True:
        assignment = Assignment(
            address=f"{site.door.rpartition(':')[0]}:{ticket.address.rpartition(':')[2]}",
            run_id=ticket.run_id,
            config=ticket.config,
            site=site.site,
            identity=site.identity,
            dir=site.dir,
            data_path=site.data.path,
            show_samples=site.data.show_samples,
            parent=os.getpid(),
            machine=machine(),
            error=str(error),
        )
        assignment.write(path)
        code = _run(argv, folder, path, log, partial(tell, name, ""))
        outcome, joined = read_outcome(path)
        version = newest_version(assignment.checkpoints)
        has_joined |= joined or version >= 0
        if outcome and not outcome.error:
            if code > 0:
                failure = FailedAfter(
                    "the training script took part to the run's end, and failed after it "
                    f"(exit status {code}): {last_line(log, is_placed=True)} (log {log})"
                )
                replace(outcome, error=type(failure).__name__, text=str(failure)).keep(path)
                raise failure
            return
        if outcome and outcome.is_own:
            error = outcome.exception()
        elif full := no_room(Path(site.dir)):  # not even for how it ended
            error = full
        elif outcome:
            error = UserError(f"{outcome.failure} (exit status {code}, log {log})")
        else:
            error = (FedwanError if has_joined else UserError)(_silent_end(argv, code, joined, log))
        reached = (version, outcome.step if outcome else 0)
        is_final = outcome.is_own if outcome else code >= 0 and not has_joined
        is_final &= not isinstance(error, DiskFull)  # it may have room by now
        if is_final or reached <= failed_at:
            raise error
        failed_at = reached
        _log.warning("%s; it is started again", error)
        tell(name, f"{error}; it is started again", "")


def _run(
    argv: list[str], folder: str, path: Path, log: Path, on_welcome: Callable[[str], None]
) -> int:
    # Else torchrun opens a store on TCP, beside the one it was told of, for processes that use it.
    env = dict(os.environ) | {VARIABLE: str(path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    service = Service("the training script", argv, log, env, folder)
    try:
        while (code := service.poll()) is None:
            if start := welcomed_by(path):
                on_welcome(start)
            time.sleep(_POLL_S)
        return code
    finally:
        service.stop(_GRACE_S)
        drop_meeting(path)


def _silent_end(argv: list[str], code: int, has_joined: bool, log: Path) -> str:
    """Of processes that have not said how they ended."""
    done = "ended" if code == 0 else f"ended with status {code}"
    how = f"was killed (status {code})" if code else "ended before the run did (status 0)"
    how = how if has_joined else f"{done} before it called fedwan.join"
    mend = "" if code else "; it has to train inside `with fedwan.join(...) as site`"
    last = last_line(log, is_placed=True) or "none"
    return f"{' '.join(argv)!r} {how}; last words: {last} (log {log}){mend}"
