"""Findings of whole files of records, and of a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

import pytest

from fedwan.doctor import diagnosis
from fedwan.doctor.diagnosis import Doctor, Finding, diagnose
from fedwan.doctor.rules import SITE_RULES, Rule
from fedwan.output.records import EventRecord, RoundRecord, to_record
from tests.doctor.records import SITES, at, figures, healthy


def rounds(num: int) -> Iterator[list[RoundRecord]]:
    bend = at("s3", figures(lr_generator=1.0))
    return ([bend(healthy(version, site)) for site in SITES] for version in range(1, num + 1))


def found_in(rounds: Iterable[list[RoundRecord]]) -> list[Finding]:
    doctor = Doctor()
    return [found for records in rounds for found in doctor.take(records)]


def test_sites_that_come_one_by_one_are_compared_too() -> None:
    bend = at("s3", figures(lr_generator=1.0))
    order = [(version, SITES[version % 4]) for version in range(1, 21)]
    (finding,) = found_in([bend(healthy(version, site))] for version, site in order)
    assert (finding.kind, finding.site) == ("learning_rate", "s3")


def test_norms_are_compared_within_a_fragment() -> None:
    def of(version: int, fragment: int) -> list[RoundRecord]:
        plain = [healthy(version, site) for site in SITES]
        if fragment == 0:
            return plain
        norms = [{network: 100 * (norm or 0) for network, norm in r.norms.items()} for r in plain]
        pairs = zip(plain, norms, strict=True)
        return [replace(r, fragment=1, norms=norm, figures={}) for r, norm in pairs]

    assert found_in(of(version, fragment) for version in range(1, 9) for fragment in (0, 1)) == []


def test_who_has_left_is_compared_with_nobody() -> None:
    """The rate falls everywhere; that of two sites stands where they were drained."""

    def record(version: int, site: str) -> RoundRecord:
        return figures(lr_generator=0.9**version)(healthy(version, site))

    def here(version: int) -> tuple[str, ...]:
        return SITES if version <= 5 else SITES[:2]

    assert not found_in([record(v, site) for site in here(v)] for v in range(1, 40))

    def grown(version: int, site: str) -> RoundRecord:
        return replace(healthy(version, site), losses={"generator": 1e6 ** (version > 25)})

    left = found_in([grown(v, site) for site in here(v)] for v in range(1, 40))
    assert [(found.kind, found.site) for found in left] == [("diverging", None)]


def test_a_run_that_goes_on_remembers_what_its_losses_began_with_and_what_was_told() -> None:
    def record(version: int, site: str) -> RoundRecord:
        loss = 0.93**version + 0.1 + 0.5 * (site == "s1")  # a harder shard
        bent = replace(healthy(version, site), losses={"generator": loss})
        return at("s3", figures(x_high=255.0))(bent)

    rows = [[record(v, site) for site in SITES] for v in range(1, 80)]
    (told,) = found_in(rows)
    event = EventRecord(0.0, "finding", told.site, told.text, told.details)
    resumed = Doctor()
    resumed.recall([*(record for records in rows[:40] for record in records), event])
    assert not [found for records in rows[40:] for found in resumed.take(records)]
    anew = found_in(rows[40:])
    assert {found.kind for found in anew} == {told.kind, "diverging"}, "or this shows nothing"


def test_what_the_gate_refused_and_weights_that_differ_are_told_once_a_site() -> None:
    text = "contribution of s2 refused: tensor 'g/w' holds values that are not finite; lower it"
    joined = EventRecord(0.0, "join", "s2", "s2 joined")
    refused = EventRecord(0.0, "rejected", "s2", text)
    other = Finding("different_weights", "s4", None, 9, "it ended with others", "see there")
    differ = EventRecord(0.0, "finding", "s4", other.text, other.details)
    warning = EventRecord(0.0, "warning", "s1", "x")
    found = list(diagnose([joined, refused, refused, differ, warning, differ]))
    assert [(f.kind, f.site) for f in found] == [("refused", "s2"), ("different_weights", "s4")]
    assert found[0].mend == "lower it" and "not finite" in found[0].why and found[1] == other


def test_a_site_that_was_refused_and_then_let_in_is_not_told_of() -> None:
    refused = [EventRecord(0.0, "rejected", name, "another recipe; install it") for name in SITES]
    back = EventRecord(1.0, "join", "s1", "s1 joined")
    assert [found.site for found in diagnose([*refused, back])] == ["s2", "s3", "s4"]


@pytest.mark.parametrize(
    ("versions", "is_told"),
    [([2, 2, 4], True), ([2, 8, 20], False), ([2, 2, None, 4], False)],
    ids=["soon", "over weeks", "the coordinator was started again"],
)
def test_a_site_whose_processes_end_again_and_again_is_told_of_once(
    versions: list[int | None], is_told: bool
) -> None:
    error = "s1 rejoined at version 2; at step 8: CUDA out of memory"
    records = [EventRecord(0.0, "join", "s1", "s1 joined")]
    for version in versions:
        if version is None:
            records.append(EventRecord(0.0, "listening", None, ""))
            continue
        records += [healthy(version, "s1"), EventRecord(0.0, "rejoin", "s1", error)]
    records.append(EventRecord(0.0, "rejoin", "s1", error)) if is_told else None
    found = list(diagnose(records))
    assert [f.kind for f in found] == ["ends_often"] * is_told
    assert all("CUDA out of memory" in f.why for f in found)


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
        events = [event for version in range(1, 6) for event in doctor.look(rows(version))]
    (row,) = [event for event in events if event["site"] == "s2"]
    assert (row["event"], row["finding"], row["network"]) == ("finding", "range", None)
    record = to_record({"t": 1.0, **row})
    assert isinstance(record, EventRecord) and record.details["version"] == 3
    assert [found.kind for found in diagnose([record])] == ["range"]
    (message,) = [r for r in caplog.records if "s2" in r.getMessage()]
    assert message.levelno == logging.WARNING
    assert message.getMessage() == record.text


def test_a_rule_that_fails_says_so_once_a_site_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chart: object, site: str, network: str) -> None:
        raise TypeError(f"no order at {site}")

    monkeypatch.setattr(diagnosis, "SITE_RULES", [Rule("odd", fail, ()), *SITE_RULES])
    (finding,) = found_in(rounds(4))
    assert (finding.kind, finding.site) == ("learning_rate", "s3")
    assert [record.getMessage() for record in caplog.records] == [
        f"{site} cannot be looked at for 'odd': TypeError('no order at {site}')" for site in SITES
    ]
