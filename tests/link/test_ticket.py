from __future__ import annotations

import pytest

from fedwan.errors import WireError
from fedwan.link.ticket import Ticket

TICKET = Ticket("coordinator.example.com:7444", "run-1", '{"seed": 0}')


def test_a_ticket_survives_a_carrier_of_strings() -> None:
    values = TICKET.to_dict()
    assert all(isinstance(value, str) for value in values.values())
    assert Ticket.from_dict(values) == TICKET


def test_fields_of_a_newer_coordinator_are_ignored() -> None:
    assert Ticket.from_dict(TICKET.to_dict() | {"colour": "red"}) == TICKET


@pytest.mark.parametrize("field", ["address", "run_id", "config"])
@pytest.mark.parametrize("value", [None, "", 3])
def test_a_missing_field_is_named(field: str, value: object) -> None:
    with pytest.raises(WireError, match=f"ticket field '{field}'"):
        Ticket.from_dict({**TICKET.to_dict(), field: value})
