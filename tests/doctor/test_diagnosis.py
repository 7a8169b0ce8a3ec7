"""Findings of whole files of records, and of a run that goes on."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

import pytest

from fedwan.doctor import diagnosis
from fedwan.doctor.diagnosis import Doctor, diagnose
from fedwan.doctor.rules import SITE_RULES, Rule
from fedwan.output.records import EventRecord, Record, RoundRecord, to_record
from tests.doctor.records import SITES, at, figures, healthy


def rounds(num: int, fragment: int = 0) -> list[Record]:
    bend = at("s3", figures(lr_generator=1.0))
    return [
        replace(bend(healthy(version, site)), fragment=fragment)
        for version in range(1, num + 1)
        for site in SITES
    ]


def test_events_between_rounds_do_not_matter() -> None:
    records = rounds(4)
    records.insert(6, EventRecord(0.0, "join", "s1", "s1 joined"))
    (finding,) = diagnose(records)
    assert (finding.kind, finding.site, finding.version) == ("learning_rate", "s3", 3)


def test_sites_that_come_one_by_one_are_compared_too() -> None:
    bend = at("s3", figures(lr_generator=1.0))
    order = [(version, SITES[version % 4]) for version in range(1, 21)]
    (finding,) = diagnose(bend(healthy(version, site)) for version, site in order)
    assert (finding.kind, finding.site) == ("learning_rate", "s3")


def test_norms_are_compared_within_a_fragment() -> None:
    records: list[Record] = []
    for record in rounds(8):
        assert isinstance(record, RoundRecord)
        norms = {network: 100 * (norm or 0) for network, norm in record.norms.items()}
        plain = healthy(record.version, record.site)
        records += [plain, replace(plain, fragment=1, norms=norms, figures={})]
    records.sort(key=lambda r: (r.version, r.fragment))  # type: ignore[union-attr]
    assert list(diagnose(records)) == []


def test_what_the_gate_refused_and_weights_that_differ_are_told_once_a_site() -> None:
    text = "contribution of s2 refused: tensor 'g/w' holds values that are not finite; lower it"
    joined = EventRecord(0.0, "join", "s2", "s2 joined")
    refused = EventRecord(0.0, "rejected", "s2", text)
    differ = EventRecord(
        0.0, "warning", "s4", "s4 ended with others", {"finding": "different_weights"}
    )
    found = list(
        diagnose([joined, refused, refused, differ, EventRecord(0.0, "warning", "s1", "x")])
    )
    assert [(f.kind, f.site) for f in found] == [("refused", "s2"), ("different_weights", "s4")]
    assert found[0].mend == "lower it" and "not finite" in found[0].why


def test_a_site_that_was_refused_and_then_let_in_is_not_told_of() -> None:
    refused = [EventRecord(0.0, "rejected", name, "another recipe; install it") for name in SITES]
    back = EventRecord(1.0, "join", "s1", "s1 joined")
    assert [found.site for found in diagnose([*refused, back])] == ["s2", "s3", "s4"]


def rows(version: int) -> list[dict[str, object]]:
    bend = at("s2", figures(x_low=0.0, x_high=255.0))
    found = [asdict(bend(healthy(version, site))) for site in SITES]
    for row in found:
        del row["t"]
        row["kind"] = "round"
        row["losses"]["generator"] = float("nan")  # as the wire may bring it
    return found


def test_a_finding_is_logged_once_and_becomes_an_event(caplog: pytest.LogCaptureFixture) -> None:
    doctor = Doctor()
    with caplog.at_level(logging.INFO, diagnosis.__name__):
        events = [*doctor.look([rows(1), rows(2)]), *doctor.look([rows(3), rows(4), rows(5)])]
    (row,) = [event for event in events if event["site"] == "s2"]
    assert (row["event"], row["finding"], row["network"]) == ("finding", "range", None)
    record = to_record({"t": 1.0, **row})
    assert isinstance(record, EventRecord) and record.details["version"] == 3
    (message,) = [r for r in caplog.records if "s2" in r.getMessage()]
    assert message.levelno == logging.WARNING
    assert message.getMessage() == record.text


def test_a_rule_that_fails_says_so_once_a_site_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chart: object, site: str, network: str) -> None:
        raise TypeError(f"no order at {site}")

    monkeypatch.setattr(diagnosis, "SITE_RULES", [Rule("odd", fail, ()), *SITE_RULES])
    (finding,) = diagnose(rounds(4))
    assert (finding.kind, finding.site) == ("learning_rate", "s3")
    assert [record.getMessage() for record in caplog.records] == [
        f"{site} cannot be looked at for 'odd': TypeError('no order at {site}')" for site in SITES
    ]
