"""Findings of whole files of records."""

from __future__ import annotations

from dataclasses import replace

from fedwan.doctor.diagnosis import diagnose
from fedwan.output.records import EventRecord, Record, RoundRecord
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
    refused = EventRecord(0.0, "rejected", "s2", text)
    differ = EventRecord(
        0.0, "warning", "s4", "s4 ended with others", {"finding": "different_weights"}
    )
    found = list(diagnose([refused, refused, differ, EventRecord(0.0, "warning", "s1", "x")]))
    assert [(f.kind, f.site) for f in found] == [("refused", "s2"), ("different_weights", "s4")]
    assert found[0].mend == "lower it" and "not finite" in found[0].why


def test_records_of_earlier_versions_have_nothing_to_find() -> None:
    plain = [
        replace(healthy(v, s), figures={}, cosines={}, agreement={}, backward={})
        for v in range(1, 9)
        for s in SITES
    ]
    assert list(diagnose(plain)) == []
