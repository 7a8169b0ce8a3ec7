"""Sites that the operator drains, ejects and admits: who is waited for, and what is merged."""

from __future__ import annotations

import pytest

from fedwan.errors import SessionLost, SiteDrained, SiteEjected
from fedwan.protocol.policy import RoundPolicy
from fedwan.protocol.registry import Registry
from fedwan.protocol.rounds import Rounds
from tests.protocol.test_rounds import Sent, Update, close, make, send


@pytest.fixture
def registry() -> Registry:
    registry = Registry(["s1", "s2", "s3"], 10.0)
    for name in registry.sites:
        registry.admit(name, name, 0.0)
    return registry


def test_a_site_that_drains_leaves_when_what_it_was_sending_is_here(registry: Registry) -> None:
    registry.decide("drain", "s2", ["first"], True)
    assert registry.release(["first", "second"]) == [] and registry.awaited() == [*registry.sites]
    assert registry.find("s2", "s2").standing == "draining"
    assert registry.release(["second"]) == ["s2"] and registry.awaited() == ["s1", "s3"]
    assert registry.live(0.0) == ["s1", "s3"], "its farewell is not waited for"
    registry.decide("admit", "s2", (), True)
    registry.admit("s2", "again", 0.0)
    registry.decide("drain", "s2", ["half"], True)
    registry.sites["s2"].has_left = True  # its script has failed in mid-upload
    assert registry.release(["half"]) == ["s2"]
    registry.decide("drain", "s1", ["third"], True)
    registry.decide("drain", "s3", ["fourth"], True)
    registry.decide("admit", "s3", (), True)  # taken back: nothing changes
    assert registry.notice(11.0)[0] == ["s1", "s3"]
    assert registry.release(["third"]) == ["s1"], "silent"
    assert registry.find("s3", "s3").standing == "in" and registry.awaited() == ["s3"]
    with pytest.raises(SiteDrained, match="left the run in order; .*admit s2"):
        registry.find("s2", "again")
    with pytest.raises(SessionLost, match="replaced or never joined"):
        registry.find("s2", "s2")
    assert registry.state_of("s2", 0.0, True, False) == "drained"
    registry.decide("admit", "s2", (), True)
    assert registry.state_of("s2", 0.0, True, False) == "expected"


def test_a_site_that_is_admitted_again_is_waited_for_once_it_has_joined(registry: Registry) -> None:
    registry.decide("eject", "s2", (), True)
    registry.decide("eject", "s1", (), True)
    with pytest.raises(SiteEjected, match="s2 was ejected"):
        registry.find("s2")
    registry.replace_first([], 1.0)
    assert registry.first == "s3", "it sends the first weights"
    registry.decide("admit", "s1", (), True)
    registry.admit("s1", "new", 1.0)
    registry.decide("admit", "s2", (), True)
    assert registry.admitted() == ["s1", "s2", "s3"] and registry.awaited() == ["s1", "s3"]
    with pytest.raises(SessionLost):  # its process may not have heard of it: it would go on
        registry.find("s2", "s2")
    registry.admit("s2", "new", 1.0)
    assert registry.awaited() == ["s1", "s2", "s3"]


def test_what_cannot_be_decided_is_said_in_one_line(registry: Registry) -> None:
    assert "this run, which has s1, s2, s3; a new one is" in registry.objection("drain", "s9")
    assert registry.objection("admit", "s1") == "s1 is in the run already"
    registry.decide("eject", "s2", (), True)
    for verb in ("eject", "drain"):
        said = registry.objection(verb, "s2")
        assert said == "s2 is ejected already; admit it if it shall take part again"
    registry.decide("admit", "s2", (), True)  # and has not joined: the run does not wait for it
    registry.decide("drain", "s3", ["first"], True)
    assert "s1 is the last site that the run waits for" in registry.objection("drain", "s1")
    assert registry.objection("eject", "s3") == ""


@pytest.mark.parametrize("least", [1, 2])
def test_rounds_wait_for_as_many_sites_as_the_run_needs(registry: Registry, least: int) -> None:
    registry.least = least
    for name in ("s1", "s2"):
        registry.decide("drain", name, (), True)
    registry.release(())
    registry.decide("admit", "s1", (), True)
    expected = [["s3"], ["s1", "s3"]]
    assert registry.awaited() == expected[least - 1], "s1 has not joined yet"
    registry.decide("drain", "s3", (), True)
    registry.release(())
    expected = [["s1"], ["s1", "s2", "s3"]]
    assert registry.awaited() == expected[least - 1], "a round of nobody would close with nothing"


def verdict(rounds: Rounds[Sent, Update]) -> tuple[str, list[str]]:
    said, merges = rounds.advance(1.0, 3)
    return said, [merge.key.site for merge in merges]


def test_a_round_does_not_wait_for_a_site_that_left_but_merges_what_it_sent() -> None:
    rounds = make(RoundPolicy(3, 3))
    rounds.begin(0.0)
    send(rounds, "s3", 0)
    rounds.expect(["s1"])  # s2 has sent nothing, s3 has
    assert verdict(rounds) == ("wait", []) and rounds.owing(["s1"]) == ["s1"]
    send(rounds, "s2", 0)  # its upload outlives its stay, and closes no round
    assert verdict(rounds) == ("wait", [])
    send(rounds, "s1", 0)
    assert verdict(rounds) == ("close", ["s1", "s3"])
    rounds.publish(Update(1))
    assert close(rounds, "s1") == [("s1", 1, 0)]
    assert rounds.tell("s1", 0).anew_from == 1, "what sites hold together begins anew"


def test_a_site_that_is_back_is_waited_for_in_site_order() -> None:
    rounds = make(RoundPolicy(3, 3))
    rounds.expect(["s1", "s3"])
    rounds.begin(0.0)
    send(rounds, "s3", 0)
    rounds.expect(["s1", "s2", "s3"])
    send(rounds, "s1", 0)
    assert verdict(rounds) == ("wait", ["s1"])
    send(rounds, "s2", 0)
    assert verdict(rounds) == ("close", ["s2", "s3"])


def test_what_an_ejected_site_sent_is_dropped_unless_it_was_merged() -> None:
    rounds = make(RoundPolicy(3, 3))
    rounds.begin(0.0)
    for name in ("s1", "s2"):
        send(rounds, name, 0)
    assert verdict(rounds) == ("wait", ["s1", "s2"])
    send(rounds, "s1", 1)  # it went ahead
    assert len(rounds.forget("s1")) == 1 and rounds.forget("s2") == []
    rounds.expect(["s2", "s3"])
    send(rounds, "s3", 0)
    assert verdict(rounds) == ("close", ["s3"])
    assert len(rounds.publish(Update(1))) == 3


def test_a_quorum_counts_no_more_sites_than_are_left() -> None:
    rounds = make(RoundPolicy(3, quorum=2, max_staleness=4, arrivals_from=0))
    rounds.expect(["s2"])
    rounds.begin(0.0)
    send(rounds, "s2", 0)
    assert rounds.advance(1.0, 1)[0] == "close"
