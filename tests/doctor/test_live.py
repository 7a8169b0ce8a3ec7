"""The doctor in a run: rows of events, warnings in the log, and no harm if it fails."""

from __future__ import annotations

import logging
from dataclasses import asdict

import pytest

from fedwan.doctor import live
from fedwan.doctor.live import LiveDoctor, bounded
from fedwan.output.records import EventRecord, to_record
from tests.doctor.records import SITES, at, figures, healthy


def rows(version: int) -> list[dict[str, object]]:
    bend = at("s2", figures(x_low=0.0, x_high=255.0))
    found = [asdict(bend(healthy(version, site))) for site in SITES]
    for row in found:
        del row["t"]
        row["kind"] = "round"
        row["losses"]["generator"] = float("nan")  # as the wire may bring it
    return found


def test_a_finding_is_logged_once_and_becomes_an_event(caplog: pytest.LogCaptureFixture) -> None:
    doctor = LiveDoctor()
    with caplog.at_level(logging.INFO, live.__name__):
        events = [event for version in range(1, 6) for event in doctor.look(rows(version))]
    (row,) = [event for event in events if event["site"] == "s2"]
    assert (row["event"], row["finding"], row["network"]) == ("finding", "range", None)
    record = to_record({"t": 1.0, **row})
    assert isinstance(record, EventRecord) and record.details["version"] == 3
    (message,) = [r for r in caplog.records if "s2" in r.getMessage()]
    assert message.levelno == logging.WARNING
    assert message.getMessage() == record.text


def test_a_doctor_that_fails_says_so_once_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    doctor = LiveDoctor()
    assert doctor.look([{"kind": "round", "site": "s1"}]) == []
    assert doctor.look(rows(1)) == []
    assert [r.message for r in caplog.records] == [
        "the doctor failed and looks no more; training goes on"
    ]


def test_no_more_figures_are_kept_than_a_record_should_hold() -> None:
    assert bounded({"a/b": 1.0}) == {"a/b": 1.0}
    assert len(bounded({str(number): 0.0 for number in range(1000)})) == live.MOST_FIGURES
    assert bounded({"x" * 1000: 0.0}) == {}
