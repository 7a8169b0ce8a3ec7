"""Inside Flower's own processes: what the ServerApp and the ClientApp do around a run.

Both write their output to a file of the run, leave a status that tells how they ended, and end when
the process that started them is gone.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedwan.errors import ConfigError, FedwanError
from fedwan.flower.site_file import SiteFile
from fedwan.flower.status import (
    Signalled,
    Start,
    Status,
    clientapp_log,
    clientapp_status,
    serverapp_log,
    serverapp_status,
)
from fedwan.flower.tickets import RECORD
from fedwan.link.ticket import Ticket

__all__ = ["answer_ticket", "started_run"]

_ORPHAN_GRACE_S = 5.0

_log = logging.getLogger(__name__)


@contextmanager
def started_run(context: Context) -> Iterator[tuple[str, Start]]:
    """The configuration, as JSON, and start of a ServerApp, with its log and status around them.

    Raises:
        ConfigError: the run was not submitted by `fedwan coordinator`.
    """
    text = str(context.run_config.get("config", ""))
    try:
        out = Path(json.loads(text)["out"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run config `config` is no fedwan configuration ({type(error).__name__}: {error}); "
            "start runs with fedwan, not with `flwr run`"
        ) from error
    start = Start.read(out)
    with _process(serverapp_log(out), serverapp_status(out), start.run_id):
        yield text, start


def answer_ticket(
    message: Message, context: Context, run: Callable[[Ticket, SiteFile], None]
) -> Message:
    """Take part in the run that a ticket is for, and answer how it ended.

    `run` does the site's work; it returns when the coordinator says that the run is over.
    """
    site = SiteFile.read(Path(str(context.node_config.get("settings", ""))))
    ticket = Ticket.from_dict(message.content.config_records.get(RECORD, ConfigRecord()))
    error: FedwanError | None = None
    try:
        folder = Path(site.dir)
        with _process(clientapp_log(folder), clientapp_status(folder), ticket.run_id):
            run(ticket, site)
    except FedwanError as caught:
        error = caught
    ended = Status.of(ticket.run_id).ended(error)
    record = {"site": site.site, "outcome": ended.outcome, "text": ended.text}
    return Message(RecordDict({RECORD: ConfigRecord(dict(record))}), reply_to=message)


@contextmanager
def _process(log: Path, status_path: Path, run_id: str) -> Iterator[None]:
    """This process's log file and status, its answer to signals, and its end with its parent."""
    _write_output_to(log)
    _end_with_parent()
    status = Status.of(run_id)
    status.write(status_path)
    try:
        with _signals_as_errors():
            yield
    except BaseException as error:
        status.ended(error).write(status_path)
        if isinstance(error, Exception) and not isinstance(error, FedwanError):
            _log.exception("ended by a bug")
        else:
            _log.error("ended by %s: %s", type(error).__name__, error)
        raise
    status.ended(None).write(status_path)


@contextmanager
def _signals_as_errors() -> Iterator[None]:
    """Raise the first SIGTERM or SIGINT as an error while the block runs, and ignore the others.

    Flower's own handler leaves without an answer, after which its SuperNode waits for ever. And
    signals come in pairs: ours, and Flower's a moment later when its parent is gone; the second
    must not cut short how the first is cleaned up after.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    came = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not came.is_set():
            came.set()
            raise Signalled(f"ended by {signal.Signals(number).name}")

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_output_to(log: Path) -> None:
    """Send this process's output and logging to a file, C libraries' and crashes' included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    faulthandler.enable()
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("fedwan")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _end_with_parent() -> None:
    """End this process soon after its parent, even where it no longer heeds signals.

    Flower sends it SIGINT then; this is for a process that hangs.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(_ORPHAN_GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="leash", daemon=True).start()
