"""Inside Flower's own processes: what the ServerApp and the ClientApp do around a run.

Both write their output to a file of the run, leave a mark that tells how they ended
(`fedwan.flower.marks`), and end when the process that started them is gone.
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
from fedwan.flower import marks
from fedwan.flower.errand import Errand
from fedwan.flower.logs import clientapp_log, serverapp_log
from fedwan.flower.site_file import SiteFile
from fedwan.flower.tickets import RECORD
from fedwan.link.ticket import Ticket

__all__ = ["answer_ticket", "errand_of"]

_ORPHAN_GRACE_S = 5.0

_log = logging.getLogger(__name__)


@contextmanager
def errand_of(context: Context) -> Iterator[tuple[str, Errand]]:
    """The configuration and errand of a ServerApp, with its log and mark around them.

    Args:
        context: Flower's context of the run; `config` of its run config is the resolved
            configuration as JSON.

    Yields:
        The JSON, and the errand.

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
    errand = Errand.read(out)
    with _process(serverapp_log(out), marks.serverapp_mark(out), errand.run_id):
        yield text, errand


def answer_ticket(
    message: Message, context: Context, run: Callable[[Ticket, SiteFile], None]
) -> Message:
    """Take part in the run that a ticket is for, and answer how it ended.

    Args:
        message: the ticket.
        context: Flower's context; `settings` of its node config is a path that `SiteFile` reads.
        run: does the site's work; returns when the coordinator says that the run is over.

    Returns:
        The answer, with the site's name, `outcome` (see `marks.Outcome`) and the error's line.
    """
    site = SiteFile.read(Path(str(context.node_config.get("settings", ""))))
    ticket = Ticket.from_dict(message.content.config_records.get(RECORD, ConfigRecord()))
    ended = marks.Mark(0, 0, ticket.run_id, "done")
    try:
        path = marks.clientapp_mark(Path(site.dir))
        with _process(clientapp_log(Path(site.dir)), path, ticket.run_id):
            run(ticket, site)
    except FedwanError as error:
        ended = marks.ended(ended, error)
    record = {"site": site.site, "outcome": ended.outcome, "text": ended.text}
    return Message(RecordDict({RECORD: ConfigRecord(dict(record))}), reply_to=message)


@contextmanager
def _process(log: Path, mark_path: Path, run_id: str) -> Iterator[None]:
    """This process's log file and mark, its answer to signals, and its end with its parent."""
    _write_output_to(log)
    _end_with_parent()
    mark = marks.start(mark_path, run_id)
    try:
        with _signals_as_errors():
            yield
    except BaseException as error:
        marks.write_mark(mark_path, marks.ended(mark, error))
        if isinstance(error, Exception) and not isinstance(error, FedwanError):
            _log.exception("ended by a bug")
        else:
            _log.error("ended by %s: %s", type(error).__name__, error)
        raise
    marks.write_mark(mark_path, marks.ended(mark, None))


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
            raise marks.Signalled(f"ended by {signal.Signals(number).name}")

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
