from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedwan.flower.serverapp import ACTION, RECORD, TicketSender
from fedwan.link.ticket import Ticket

TICKET = Ticket("127.0.0.1:7000", "run-1", '{"seed": 0, "text": "with \\"quotes\\""}')


class FakeGrid:
    """Holds messages for nodes, and the answers that a test puts in."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = set(nodes)
        self.sent: list[Message] = []
        self.answers: dict[str, Message] = {}
        self.forgotten: set[str] = set()
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
        if self.forgotten & set(ids):
            request = httpx.Request("POST", "http://superlink")
            response = httpx.Response(500, request=request)
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


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Messages can be made only inside a task of Flower's."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


def office(grid: FakeGrid, clock: Clock) -> TicketSender:
    return TicketSender(grid, TICKET, clock=clock)  # type: ignore[arg-type]


def test_every_connected_node_gets_one_ticket_and_no_second(clock: Clock) -> None:
    grid = FakeGrid(11, 12)
    tickets = office(grid, clock)
    for _ in range(5):
        tickets.look()
        clock.now += 100
    assert sorted(grid.to()) == [11, 12]


def test_the_ticket_arrives_as_it_was_and_outlives_the_run(clock: Clock) -> None:
    grid = FakeGrid(11)
    office(grid, clock).look()
    message = grid.sent[0]
    assert Ticket.from_dict(message.content.config_records[RECORD]) == TICKET
    assert message.metadata.message_type == ACTION
    assert message.metadata.ttl >= 30 * 24 * 3600


def test_a_crash_is_answered_with_a_new_ticket_at_once(clock: Clock) -> None:
    grid = FakeGrid(11)
    tickets = office(grid, clock)
    tickets.look()
    grid.fail(0, 8, "ClientApp stopped responding.")
    tickets.look()
    assert grid.to() == [11, 11]


def test_a_node_that_went_away_gets_its_ticket_when_it_is_back(clock: Clock) -> None:
    grid = FakeGrid(11)
    tickets = office(grid, clock)
    tickets.look()
    grid.nodes.clear()
    grid.fail(0, 5, "Node Unavailable")
    tickets.look()
    assert grid.to() == [11]
    grid.nodes.add(11)
    tickets.look()
    assert grid.to() == [11, 11]


def test_repeated_failures_are_slowed_but_never_given_up(clock: Clock) -> None:
    grid = FakeGrid(11)
    tickets = office(grid, clock)
    waits = []
    tickets.look()
    for index in range(12):
        grid.fail(index, 2, "ValueError")
        failed_at = clock.now
        while len(grid.sent) == index + 1:
            tickets.look()
            clock.now += 0.5
        waits.append(clock.now - failed_at)
    assert waits[0] <= 1.0
    assert waits == sorted(waits)
    assert 50 < waits[-1] < 70


@pytest.mark.parametrize("outcome", ["done", "stopped"])
def test_a_site_that_is_done_is_left_in_peace(clock: Clock, outcome: str) -> None:
    grid = FakeGrid(11)
    tickets = office(grid, clock)
    tickets.look()
    grid.answer(0, site="s1", outcome=outcome, text="")
    for _ in range(3):
        tickets.look()
        clock.now += 100
    assert grid.to() == [11]


def test_a_refusal_is_one_clear_line_and_is_not_retried(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(11)
    tickets = office(grid, clock)
    tickets.look()
    grid.answer(0, site="s1", outcome="refused", text="initial weights differ; use seed 0")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tickets.look()
            clock.now += 1000
    assert grid.to() == [11]
    assert [record.getMessage() for record in caplog.records] == [
        "site s1 takes no part: initial weights differ; use seed 0"
    ]


def test_a_ticket_that_superlink_forgot_hides_no_other_answer(clock: Clock) -> None:
    grid = FakeGrid(11, 12)
    tickets = office(grid, clock)
    tickets.look()
    grid.forgotten.add(grid.sent[0].metadata.message_id)
    grid.answer(1, site="s2", outcome="done", text="")
    tickets.look()
    assert grid.to() == [11, 12, 11]


def test_tickets_go_out_from_the_thread_and_trouble_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = FakeGrid(11)
    with caplog.at_level(logging.WARNING):
        with TicketSender(grid, TICKET, poll_s=0.01):  # type: ignore[arg-type]
            wait_until(lambda: grid.to() == [11])
            grid.away = True
            threading.Event().wait(0.3)
            grid.nodes.add(12)
            grid.away = False
            wait_until(lambda: grid.to() == [11, 12])
    assert caplog.text.count("cannot hand out tickets for now") == 1


def wait_until(what: object) -> None:
    for _ in range(500):
        if callable(what) and what():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never happened")
