"""Who is asked how good the weights are, where a site lives and does not answer."""

from __future__ import annotations

from fedwan.protocol.evaluation import MOST_MISSED, PAIR_EVERY, Evaluation
from fedwan.protocol.limits import Report

SITES = ["s1", "s2", "s3"]
REPORT = Report(1, {"fd": 1.0})


def test_of_data_that_may_differ_the_same_site_is_asked_while_it_is_there_and_answers() -> None:
    evaluation = Evaluation(asks_all=False)
    assert evaluation.choose(SITES, SITES) == ["s1"]
    assert evaluation.choose(SITES, ["s2"]) == ["s2"]
    assert not evaluation.is_idle(SITES) and evaluation.is_idle(["s1"])
    evaluation.hear("s2", REPORT)
    assert evaluation.found(SITES) == [{"s2": REPORT}] and evaluation.found(SITES) == []
    assert evaluation.choose([], []) == []
    for latest in (SITES, ["s3"], []):
        assert evaluation.choose(SITES, latest) == ["s2"]
        evaluation.hear("s2", REPORT)
    assert evaluation.choose(["s1", "s3"], ["s3"]) == ["s3"]
    evaluation.hear("s3", REPORT)
    assert evaluation.choose(SITES, SITES) == ["s3"]


def test_of_shared_data_two_are_asked_the_first_time_every_fourth_and_at_the_end() -> None:
    evaluation = Evaluation(asks_all=False, pairs=True)
    for number in range(2 * PAIR_EVERY):
        asked = evaluation.choose(SITES, ["s3"])
        assert asked == (["s3", "s1"] if number % PAIR_EVERY == 0 else ["s3"])
        for site in asked:
            assert not evaluation.is_idle(SITES)
            evaluation.hear(site, REPORT)
        assert evaluation.found(SITES) == [{site: REPORT} for site in asked]
    assert evaluation.choose(SITES, SITES) == ["s1", "s2"]
    assert evaluation.choose(SITES, SITES, is_last=True) == ["s3"], "the others may not answer"
    assert evaluation.choose(["s1"], [], is_last=True) == ["s1"]


def test_of_data_of_their_own_the_others_go_on_without_it() -> None:
    evaluation = Evaluation(asks_all=True)
    assert evaluation.choose(SITES, SITES) == SITES
    for site in SITES[1:]:
        evaluation.hear(site, REPORT)
    for _ in range(MOST_MISSED - 1):
        assert evaluation.choose(SITES, SITES) == [] == evaluation.found(SITES)
    assert evaluation.choose(SITES, SITES) == SITES[1:]
    assert evaluation.found(SITES) == [{"s2": REPORT, "s3": REPORT}]
    for site in SITES:  # what the first one was asked for before comes now, too late
        evaluation.hear(site, REPORT)
    assert evaluation.found(SITES) == [{"s2": REPORT, "s3": REPORT}]
    assert evaluation.choose(SITES, SITES) == SITES[1:]
