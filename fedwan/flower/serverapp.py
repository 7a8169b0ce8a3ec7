"""Inside the ServerApp: every connected site is handed a ticket, as long as the run lasts.

Each SuperNode that is connected and holds no ticket is sent one; its ClientApp answers only when it
ends. An answer that is a refusal (the user's mistake: wrong weights, a foreign certificate) stands
until that SuperNode restarts or comes back; any other end before the run's own is answered with a
new ticket, slower and slower if they keep failing at once.

What Flower 1.41 reports, and how fast: an exception in a ClientApp, within a second; a SuperNode
that says goodbye, at once (NODE_UNAVAILABLE); one that vanishes, and a ClientApp that is killed,
after 40 to 60 s. The site service (`fedwan.flower.site`) turns the last into the second.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedwan.errors import ConfigError, FedwanError
from fedwan.flower.processes import Backoff
from fedwan.flower.status import RUN, Start, reported, serverapp_files, service_file
from fedwan.link.base import Ticket
from fedwan.protocol.limits import shown

ACTION = "train.ticket"
"""Flower's message type of a ticket, handled by `@app.train("ticket")`."""
RECORD = "fedwan"
"""Name of the record that holds a ticket, or the answer to one."""

_TTL_S = 60.0 * 60 * 24 * 90
_POLL_S = 1.0
_LONGEST_WAIT_S = 60.0
_PULL_S = 2.0
"""For an answer that SuperLink has; who announces one and does not send it holds up nobody."""
_PULLS_AT_ONCE = 8
"""Sites that are asked for in one look, in turn: each costs SuperLink a query."""
_LONGEST_TEXT, _LONGEST_NAME = 1000, 64

_log = logging.getLogger(__name__)


@contextmanager
def started_run() -> Iterator[tuple[Start, Callable[..., None]]]:
    """The start of this ServerApp, with its log and status around it, and what tells of the status.

    How it ends is in both: Flower, which would log a traceback, need not know.
    """
    if RUN not in os.environ:
        raise ConfigError("this ServerApp belongs to no run; start runs with fedwan, not with flwr")
    out = Path(os.environ[RUN])
    start = Start.read(out)
    with suppress(FedwanError), reported(*serverapp_files(out), service_file(out)) as tell:
        yield start, tell


@dataclass
class _Node:
    """What we know about one SuperNode."""

    ticket: str = ""
    """Id of the one it holds; empty while it holds none."""
    sent_at: float = 0.0
    due_at: float = 0.0
    """When it may have the next one; never, once it is done or refused."""
    backoff: Backoff = field(default_factory=lambda: Backoff(_LONGEST_WAIT_S))
    asked_at: float = 0.0
    answer: Future[list[Message]] | None = None
    """Being pulled."""


class TicketSender:
    """Sends every connected site a ticket, between enter and exit; looks every second.

    `on_failure` is told which site says that its training has failed, and how.
    """

    def __init__(
        self,
        grid: Grid,
        ticket: Ticket,
        on_failure: Callable[[str, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid = grid
        self._ticket = ticket
        self._on_failure = on_failure
        self._clock = clock
        self._nodes: dict[int, _Node] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tickets", daemon=True)
        self._trouble = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        # Flower's client retries without end while SuperLink is away: do not wait for it.
        self._thread.join(timeout=2 * _POLL_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self.look()
                self._trouble = ""
            except Exception as error:
                # Whatever it is, sites already at work do not need us: say it once, go on.
                if (trouble := f"{type(error).__name__}: {error}") != self._trouble:
                    _log.warning("cannot hand out tickets for now: %s", trouble)
                self._trouble = trouble
            self._closed.wait(_POLL_S)

    def look(self) -> None:
        """Collect answers once, then send the tickets that are due."""
        idle = (node for node in self._nodes.values() if node.ticket and node.answer is None)
        asked = sorted(idle, key=lambda node: node.asked_at)[:_PULLS_AT_ONCE]
        wait([self._pull(node) for node in asked], _PULL_S)
        trouble: Exception | None = None
        for node in self._nodes.values():
            if (answer := node.answer) is None or not answer.done():
                continue
            node.answer = None
            try:
                for message in answer.result():
                    self._settle(node, message)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
                    self._again(node, "SuperLink lost a ticket")  # at which it fails
                else:
                    trouble = error
            except Exception as error:
                trouble = error
        self._send(sorted(self._grid.get_node_ids()))
        if trouble is not None:
            raise trouble

    def _pull(self, node: _Node) -> Future[list[Message]]:
        node.asked_at, node.answer = self._clock(), (answer := Future[list[Message]]())

        def pull() -> None:
            try:
                answer.set_result(list(self._grid.pull_messages([node.ticket])))
            except Exception as error:
                answer.set_exception(error)

        # Flower waits for up to two hours for what was announced.
        threading.Thread(target=pull, name="answer", daemon=True).start()
        return answer

    def _settle(self, node: _Node, answer: Message) -> None:
        if answer.has_error() and answer.error.code == ErrorCode.NODE_UNAVAILABLE:
            self._again(node, "a SuperNode is gone", logging.INFO)
            return
        if answer.has_error():
            reason = shown(answer.error.reason, _LONGEST_TEXT)
            self._again(node, f"a SuperNode answered: {reason} ({answer.error.code})")
            return
        record = answer.content.config_records.get(RECORD, ConfigRecord())
        outcome = str(record.get("outcome", ""))
        # As the SuperNode has it; what decides anything is the data plane's.
        text = shown(str(record.get("text", "")), _LONGEST_TEXT)
        site = shown(str(record.get("site", "unknown")), _LONGEST_NAME)
        if outcome in ("refused", "failed"):
            self._on_failure(site, text)
        if outcome not in ("done", "stopped", "refused"):
            self._again(node, f"site {site}: {text or 'no outcome in its answer'}")
            return
        node.ticket, node.due_at = "", math.inf
        if outcome == "refused":
            _log.error("site %s takes no part: %s", site, text)
        else:
            _log.info("site %s is done (%s)", site, outcome)

    def _again(self, node: _Node, reason: str, level: int = logging.WARNING) -> None:
        now = self._clock()
        wait_s = node.backoff.wait_s(now - node.sent_at)
        node.ticket, node.due_at = "", now + wait_s
        _log.log(level, "%s; new ticket in %.0f s if it is there", reason, wait_s)

    def _send(self, connected: Sequence[int]) -> None:
        now = self._clock()
        # A SuperNode that restarts is another node.
        self._nodes = {n: node for n, node in self._nodes.items() if node.ticket or n in connected}
        nodes = [(number, self._nodes.setdefault(number, _Node())) for number in connected]
        due = [(number, node) for number, node in nodes if not node.ticket and node.due_at <= now]
        if not due:
            return
        content = RecordDict({RECORD: ConfigRecord(asdict(self._ticket))})
        messages = [Message(content, number, message_type=ACTION, ttl=_TTL_S) for number, _ in due]
        ids = self._grid.push_messages(messages)
        for (number, node), ticket in zip(due, ids, strict=True):
            if ticket:
                node.ticket, node.sent_at = ticket, now
                _log.info("ticket sent to node %d", number)
