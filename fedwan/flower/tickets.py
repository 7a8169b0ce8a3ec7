"""Tickets: a thread sees to it that every connected site holds one while the run lasts.

It runs in the ServerApp. Each SuperNode that is connected and holds no ticket is sent one; its
ClientApp answers only when it ends. An answer that is a refusal (the user's mistake: wrong
weights, a foreign certificate) stands until that SuperNode restarts; any other end before the
run's own is answered with a new ticket, slower and slower if they keep failing at once.

What Flower 1.41 reports, and how fast: an exception in a ClientApp, within a second; a SuperNode
that says goodbye, at once (NODE_UNAVAILABLE); one that vanishes, and a ClientApp that is killed,
after 40 to 60 s. The site service (`fedwan.flower.site`) turns the last into the second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedwan.link.ticket import Ticket

__all__ = ["ACTION", "RECORD", "TicketSender"]

ACTION = "train.ticket"
"""Flower's message type of a ticket, handled by `@app.train("ticket")`."""
RECORD = "fedwan"
"""Name of the record that holds a ticket, or the answer to one."""

_TTL_S = 60.0 * 60 * 24 * 90
# A ticket that lasted this long did its work: its end is news, not a loop.
_LASTED_S = 60.0
_LONGEST_WAIT_S = 60.0

_log = logging.getLogger(__name__)


@dataclass
class _Holder:
    """What we know about one SuperNode."""

    message: str = ""
    """Id of the ticket it holds; empty while it holds none."""
    sent_at: float = 0.0
    due_at: float = 0.0
    """When it may have the next one."""
    failures: int = 0
    """Tickets in a row that ended soon after they were sent."""
    settled: bool = False
    """It answered that it is done or refused; it gets no more."""


class TicketSender:
    """Sends every connected site a ticket, between enter and exit; looks every `poll_s`."""

    def __init__(
        self,
        grid: Grid,
        ticket: Ticket,
        *,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid = grid
        self._ticket = ticket
        self._poll_s = poll_s
        self._clock = clock
        self._holders: dict[int, _Holder] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tickets", daemon=True)
        self._trouble = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        # Flower's client retries without end while SuperLink is away: do not wait for it.
        self._thread.join(timeout=2 * self._poll_s)

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
            self._closed.wait(self._poll_s)

    def look(self) -> None:
        """Collect answers once, then send the tickets that are due."""
        holders = {h.message: node for node, h in self._holders.items() if h.message}
        for answer in self._pull(list(holders)):
            node = holders.get(answer.metadata.reply_to_message_id)
            if node is not None:
                self._settle(node, answer)
        self._send(set(self._grid.get_node_ids()))

    def _pull(self, wanted: list[str]) -> list[Message]:
        if not wanted:
            return []
        try:
            return list(self._grid.pull_messages(wanted))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
                raise
        # SuperLink fails on a ticket it no longer knows, and answers for none of the others.
        if len(wanted) == 1:
            node = next(n for n, h in self._holders.items() if h.message == wanted[0])
            self._again(node, "SuperLink lost its ticket")
            return []
        return [answer for message in wanted for answer in self._pull([message])]

    def _settle(self, node: int, answer: Message) -> None:
        if answer.has_error():
            self._again(node, " ".join(f"{answer.error.reason} ({answer.error.code})".split()))
            return
        record = answer.content.config_records.get(RECORD, ConfigRecord())
        outcome, text = str(record.get("outcome", "")), str(record.get("text", ""))
        site = record.get("site", "unknown")
        if outcome not in ("done", "stopped", "refused"):
            self._again(node, f"site {site}: {text or 'no outcome in its answer'}")
            return
        self._holders[node] = _Holder(settled=True)
        if outcome == "refused":
            _log.error("site %s takes no part: %s", site, text)
        else:
            _log.info("site %s is done (%s)", site, outcome)

    def _again(self, node: int, reason: str) -> None:
        holder = self._holders[node]
        now = self._clock()
        holder.failures = 0 if now - holder.sent_at > _LASTED_S else holder.failures + 1
        # The first failure is mended at once, the next after 1, 2, 4 … seconds.
        wait = 0.0 if holder.failures < 2 else min(_LONGEST_WAIT_S, 2.0 ** (holder.failures - 2))
        holder.message, holder.due_at = "", now + wait
        _log.warning("node %d: %s; new ticket in %.0f s if it is there", node, reason, wait)

    def _send(self, connected: set[int]) -> None:
        now = self._clock()
        holders = {n: self._holders.setdefault(n, _Holder()) for n in sorted(connected)}
        due = [
            node
            for node, holder in holders.items()
            if not holder.message and not holder.settled and holder.due_at <= now
        ]
        if not due:
            return
        content = RecordDict({RECORD: ConfigRecord(dict(self._ticket.to_dict()))})
        messages = [Message(content, n, message_type=ACTION, ttl=_TTL_S) for n in due]
        for node, message in zip(due, self._grid.push_messages(messages), strict=True):
            if message:
                self._holders[node].message = message
                self._holders[node].sent_at = now
                _log.info("ticket sent to node %d", node)
