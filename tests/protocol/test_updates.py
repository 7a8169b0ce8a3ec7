"""Updates that are held for sites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedwan.protocol.updates import Updates

FRAGMENT: Any = SimpleNamespace(num_bytes=10)
UPDATE = FRAGMENT


def test_an_update_is_held_until_all_that_are_awaited_hold_this_one() -> None:
    updates: Updates[Any] = Updates([FRAGMENT], keeps_past=False)
    for version in (1, 2):
        updates.put(0, version, UPDATE)
        updates.note_holder(0, version, "s1", {"s1", "s2"})
        assert updates.get(0, version) is UPDATE, "who held the one before does not hold this one"
        updates.note_holder(0, version, "s2", {"s1", "s2"})
        assert updates.get(0, version) is None and updates.holds_newest(0, "s1")
    updates.forget_holder("s1")
    assert not updates.holds_newest(0, "s1") and updates.holds_newest(0, "s2")


def test_who_holds_an_update_that_is_kept_does_not_hold_the_newest() -> None:
    updates: Updates[Any] = Updates([SimpleNamespace(num_bytes=100)], keeps_past=True)
    for version in (1, 2):
        updates.put(0, version, UPDATE)
    updates.note_holder(0, 1, "s1", {"s1", "s2"})
    assert not updates.holds_newest(0, "s1")
    updates.note_holder(0, 2, "s1", {"s1"})
    assert updates.holds_newest(0, "s1") and updates.get(0, 2) is UPDATE
