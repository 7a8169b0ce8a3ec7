from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedwan.flower import serverapp
from fedwan.flower.serverapp import ACTION, RECORD, TicketSender
from fedwan.link.base import Ticket
from tests.planes import eventually

TICKET = Ticket("127.0.0.1:7000", "1" * 32, '{"seed": 0, "text": "with \\"quotes\\""}', "a")


class FakeGrid:
    """Holds messages for nodes, and the answers that a test puts in."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = set(nodes)
        self.sent: list[Message] = []
        self.answers: dict[str, Message] = {}
        self.forgotten: set[str] = set()
        self.status = 500  # of these
        self.announced: set[str] = set()
        """Answers whose content does not come before `are_sent`."""
        self.are_sent = threading.Event()
        self.away = False

    def get_node_ids(self) -> Iterable[int]:
        return set(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            self.sent.append(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self.away:
            raise httpx.ConnectError("SuperLink is away")
        ids = list(message_ids)
        if self.announced & set(ids):
            self.are_sent.wait()
        if self.forgotten & set(ids):
            request = httpx.Request("POST", "http://superlink")
            response = httpx.Response(self.status, request=request)
            raise httpx.HTTPStatusError("forgotten", request=request, response=response)
        return [self.answers.pop(message) for message in ids if message in self.answers]

    def answer(self, index: int, **record: str) -> None:
        asked = self.sent[index]
        content = RecordDict({RECORD: ConfigRecord(dict(record))})
        self.answers[asked.metadata.message_id] = Message(content, reply_to=asked)

    def fail(self, index: int, code: int, reason: str) -> None:
        asked = self.sent[index]
        self.answers[asked.metadata.message_id] = Message(Error(code, reason), reply_to=asked)

    def to(self) -> list[int]:
        return [message.metadata.dst_node_id for message in self.sent]


class Office:
    """A sender of tickets, with time in the test's hands."""

    def __init__(self, *nodes: int) -> None:
        self.now = 1000.0
        self.grid = FakeGrid(*nodes)
        self.failures: list[tuple[str, str]] = []
        fail = lambda *told: self.failures.append(told)  # noqa: E731
        self._sender = TicketSender(self.grid, TICKET, fail, clock=lambda: self.now)  # type: ignore[arg-type]
        self.look()

    def look(self, times: int = 1, every_s: float = 0.0) -> list[int]:
        """The nodes that tickets were sent to so far."""
        for _ in range(times):
            self._sender.look()
            self.now += every_s
        return self.grid.to()


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made only inside a task of Flower's."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def test_every_connected_node_gets_one_ticket_as_it_is_and_no_second() -> None:
    office = Office(11, 12)
    assert sorted(office.look(5, every_s=100)) == [11, 12]
    message = office.grid.sent[0]
    assert Ticket.from_dict(message.content.config_records[RECORD]) == TICKET
    assert message.metadata.message_type == ACTION
    assert message.metadata.ttl >= 30 * 24 * 3600


def test_a_node_that_went_away_gets_its_ticket_when_it_is_back_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    office = Office(11)
    office.grid.nodes.clear()
    office.grid.fail(0, 5, "Node Unavailable")
    assert office.look() == [11]
    office.grid.nodes.add(11)
    assert office.look() == [11, 11]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nodes_that_are_gone_are_forgotten_once_they_hold_no_ticket() -> None:
    office = Office(*range(20))
    for index in range(20):
        outcome = "done" if index % 2 else "refused"
        office.grid.answer(index, site="s1", outcome=outcome, text="")
    office.look(5)
    office.grid.nodes = {18, 19, 20}
    assert office.look(2, every_s=1000) == list(range(21)), "who is done or refused gets no other"
    office.grid.nodes = {18, 19}
    office.look()
    assert set(office._sender._nodes) == {18, 19, 20}, "20 has not answered yet"


def test_repeated_failures_are_slowed_but_never_given_up() -> None:
    office, waits = Office(11), []
    for index in range(12):
        office.grid.fail(index, 2, "ValueError")
        failed_at = office.now
        while len(office.grid.sent) == index + 1:
            office.look(every_s=0.5)
        waits.append(office.now - failed_at)
    assert waits[0] <= 1.0
    assert waits == sorted(waits)
    assert 50 < waits[-1] < 70


@pytest.mark.parametrize(
    ("outcome", "lines"),
    [
        ("done", []),
        ("stopped", []),
        ("refused", ["site s1 takes no part: initial weights differ; use seed 0"]),
    ],
)
def test_a_site_that_is_done_or_refused_gets_no_other_ticket(
    outcome: str, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    office = Office(11)
    office.grid.answer(0, site="s1", outcome=outcome, text="initial weights differ; use seed 0")
    with caplog.at_level(logging.WARNING):
        assert office.look(3, every_s=1000) == [11]
    assert [record.getMessage() for record in caplog.records] == lines
    assert len(office.failures) == len(lines)


def test_the_coordinator_is_told_who_failed_and_how_and_a_new_ticket_is_sent() -> None:
    office = Office(11)
    office.grid.answer(0, site="s1", outcome="failed", text="'train.py' was killed (status -9)")
    assert office.look(3, every_s=10) == [11, 11]
    assert office.failures == [("s1", "'train.py' was killed (status -9)")]


def test_what_a_supernode_says_is_cut_and_does_nothing_to_a_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    office = Office(11)
    office.grid.answer(0, site="s" * 999, outcome="refused", text="\x1b]0;owned\x07\n" * 999)
    office.look(3, every_s=1000)
    ((site, text),) = office.failures
    assert len(site) == 64 and len(text) == 1000
    assert all(line.isprintable() for line in (text, *caplog.messages))


def test_a_ticket_that_superlink_forgot_hides_no_other_answer() -> None:
    office = Office(11, 12)
    office.grid.forgotten.add(office.grid.sent[0].metadata.message_id)
    office.grid.answer(1, site="s2", outcome="done", text="")
    assert office.look() == [11, 12, 11]


def test_a_superlink_that_is_in_trouble_for_a_moment_has_lost_no_ticket() -> None:
    office = Office(11)
    office.grid.forgotten, office.grid.status = {office.grid.sent[0].metadata.message_id}, 503
    with pytest.raises(httpx.HTTPStatusError):
        office.look()
    office.grid.forgotten = set()
    assert office.look(2) == [11]
    office.grid.fail(0, 2, "ValueError")
    assert office.look() == [11, 11]


def test_an_answer_that_is_announced_and_not_sent_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serverapp, "_PULL_S", 0.1)
    office = Office(11, 12)
    office.grid.announced.add(office.grid.sent[0].metadata.message_id)
    office.grid.fail(1, 2, "ValueError")
    office.grid.nodes.add(13)
    assert office.look(5, every_s=1) == [11, 12, 12, 13]
    assert sum(thread.name == "answer" for thread in threading.enumerate()) == 1
    office.grid.fail(0, 2, "ValueError")
    office.grid.are_sent.set()
    eventually(lambda: office.look(every_s=1) == [11, 12, 12, 13, 11])


def test_of_many_holders_each_is_asked_in_turn() -> None:
    office = Office(*range(20))
    office.grid.fail(19, 2, "ValueError")
    office.grid.fail(0, 2, "ValueError")
    assert office.look(5, every_s=1) == [*range(20), 0, 19]


def test_tickets_go_out_from_the_thread_and_trouble_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverapp, "_POLL_S", 0.01)
    grid = FakeGrid(11)
    with caplog.at_level(logging.WARNING):
        with TicketSender(grid, TICKET, print):  # type: ignore[arg-type]
            eventually(lambda: grid.to() == [11])
            grid.away = True
            time.sleep(0.2)
            grid.nodes.add(12)
            grid.away = False
            eventually(lambda: grid.to() == [11, 12])
    assert caplog.text.count("cannot hand out tickets for now") == 1
