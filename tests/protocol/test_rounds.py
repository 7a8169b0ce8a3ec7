"""Rounds without IO: what is wanted, merged, dropped, and told, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs import fp32
from fedwan.errors import PayloadError
from fedwan.fragments import Fragment, whole
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.pace import RoundTimes
from fedwan.protocol.policy import RoundPolicy
from fedwan.protocol.round import Key, Merge
from fedwan.protocol.rounds import Rounds
from fedwan.state import Role, TensorSpec
from fedwan.strategy import Strategy

Header = wire.DownloadHeader
SITES = ("s1", "s2", "s3")


class Sent(NamedTuple):
    work: wire.Work


class Update(NamedTuple):
    num_bytes: int


def make(
    policy: RoundPolicy,
    num_fragments: int = 1,
    num_versions: int = 4,
    versions: Sequence[int] = (),
    h: int = 2,
    **words: Any,
) -> Rounds[Sent, Update]:
    words.setdefault("clock", "versions" if policy.arrivals_from is None else "samples")
    no_step: Any = None
    strategy = Strategy("delta", h, whole, no_step, fp32(), fp32(), policy, **words)
    layout = {"net/weight": TensorSpec((5,), torch.float32, Role.PARAMETER)}
    fragments = [Fragment(index, layout, index) for index in range(num_fragments)]
    return Rounds(strategy, fragments, SITES, num_versions, 1, versions)


def send(
    rounds: Rounds[Sent, Update],
    site: str,
    version: int,
    now_s: float = 0.0,
    steps: int = 2,
    compute_s: float = 1.0,
) -> None:
    key = Key(0, version, site)
    assert rounds.settled(key) == ""
    rounds.announce(key, now_s)
    rounds.arrive(key, Sent(wire.Work(steps=steps, samples=steps, compute_s=compute_s)), now_s)


def close(rounds: Rounds[Sent, Update], *sites: str, live: int = 3) -> list[tuple[str, int, int]]:
    """A round from its beginning to its update; what is in it, with staleness."""
    present = rounds.begin(0.0)
    for site in sites:
        send(rounds, site, present.version)
    verdict, _ = rounds.advance(1000.0, live)
    assert verdict == "close"
    rounds.publish(Update(1))
    return [(merge.key.site, merge.key.version, merge.staleness) for merge in present.merged]


@settings(deadline=None)
@given(st.permutations(SITES))
def test_behind_a_barrier_sites_are_merged_in_their_order_whatever_the_arrivals(
    order: list[str],
) -> None:
    rounds = make(RoundPolicy(3, 3))
    rounds.begin(0.0)
    merged: list[str] = []
    for site in order:
        send(rounds, site, 0)
        verdict, merges = rounds.advance(1.0, 3)
        merged += [merge.key.site for merge in merges]
        assert merged == list(SITES[: len(merged)])
    assert verdict == "close" and merged == list(SITES)


def test_a_round_that_is_held_merges_when_it_closes_without_what_is_left_out() -> None:
    rounds = make(RoundPolicy(3, 3, 10.0, max_staleness=1))
    rounds.begin(0.0).is_held = True
    for number, site in enumerate(SITES, start=1):
        send(rounds, site, 0)
        verdict, merges = rounds.advance(1.0, 3)
        assert len(merges) == (3 if number == 3 else 0)
        assert rounds.is_idle(3) == (number < 3)
    rounds.leave_out(merges[1])
    assert [merge.key.site for merge in rounds.present.merged] == ["s1", "s3"]
    assert rounds.settled(Key(0, 0, "s2")) == "accepted", "its bytes are not wanted again"
    assert len(rounds.publish(Update(1))) == 3 and rounds.latest == ["s1", "s3"]
    assert not rounds.is_merged(Key(0, 0, "s2")) and close(rounds, "s1", "s2", "s3")[1][0] == "s2"


def test_a_site_may_leave_before_the_update_without_its_contribution_is_out() -> None:
    rounds = make(RoundPolicy(3, 2, 10.0))
    rounds.begin(0.0).is_held = True
    for site in SITES:
        send(rounds, site, 0)
    _, merges = rounds.advance(1.0, 3)
    rounds.leave_out(merges[2])
    assert rounds.forget("s3") == [], "it is done with when the update is out"
    assert len(rounds.publish(Update(1))) == 3 and rounds.latest == ["s1", "s2"]


def test_what_a_round_was_given_is_not_waited_for_again_when_sites_change() -> None:
    rounds = make(RoundPolicy(3, 2, 10.0))
    rounds.begin(0.0)
    send(rounds, "s1", 0)
    _, merges = rounds.advance(1.0, 3)
    rounds.leave_out(merges[0])
    rounds.expect(["s1", "s2"])
    send(rounds, "s2", 0)
    assert rounds.advance(1.0, 2)[1][0].key.site == "s2" and rounds.is_stuck
    rounds.expect(["s2"])
    assert not rounds.is_stuck, "the quorum is of those that are left"
    assert rounds.advance(1.0, 2)[0] == "close" and len(rounds.publish(Update(1))) == 2
    rounds.expect(SITES)
    rounds.begin(0.0)
    send(rounds, "s1", 1)
    assert rounds.advance(10.0, 1)[0] == "stop", "it is of all again once they are back"


def test_a_contribution_that_is_forgotten_is_not_waited_for() -> None:
    rounds = make(RoundPolicy(3, 2, 10.0))
    rounds.begin(0.0)
    send(rounds, "s2", 0)
    rounds.expect(["s1", "s3"])
    assert rounds.present.waiting == ["s1", "s2", "s3"], "it is whole"
    rounds.forget("s2")
    assert rounds.present.waiting == ["s1", "s3"] and not rounds.is_stuck


def test_fragments_take_turns_by_when_they_are_due() -> None:
    rounds = make(RoundPolicy(1, 1), num_fragments=2, num_versions=2)
    turns = []
    while not rounds.is_done:
        present = rounds.begin(0.0)
        turns.append((present.fragment.index, present.version))
        for site in SITES:
            key = Key(present.fragment.index, present.version, site)
            rounds.arrive(key, Sent(wire.Work(samples=2)), 0.0)
        rounds.advance(0.0, 3)
        rounds.publish(Update(1))
    assert turns == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert (rounds.version, rounds.run_step) == (2, 4)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_late_contribution_is_merged_after_the_others_or_dropped(max_staleness: int) -> None:
    rounds = make(RoundPolicy(3, 2, 10.0, max_staleness=max_staleness))
    assert close(rounds, "s2", "s3") == [("s2", 0, 0), ("s3", 0, 0)]
    if not max_staleness:
        for _ in range(3):  # stripes, or attempts
            assert rounds.settled(Key(0, 0, "s1")) == "stale"
            rounds.note_dropped(Key(0, 0, "s1"), wire.Work(), 0.0)
        assert rounds.dropped == 1
        return
    rounds.begin(0.0)
    for site in ("s2", "s3"):
        send(rounds, site, 1)
    assert rounds.advance(10.0, 3)[0] == "close"
    send(rounds, "s1", 0)  # while the round is committed: it waits for the next
    assert len(rounds.publish(Update(1))) == 2
    assert close(rounds, "s2", "s3") == [("s2", 2, 0), ("s3", 2, 0), ("s1", 0, 2)]
    assert rounds.settled(Key(0, 0, "s1")) == "accepted" and rounds.dropped == 0


def test_only_the_present_version_and_the_next_are_wanted() -> None:
    rounds = make(RoundPolicy(3, 3))
    wanted = [rounds.settled(Key(0, version, "s1")) for version in range(3)]
    assert wanted == ["", "", "stale"]  # a site may be ahead of an update that is not out yet
    send(rounds, "s1", 0)
    assert rounds.settled(Key(0, 0, "s1")) == "accepted"
    rounds.is_over = True
    assert rounds.settled(Key(0, 0, "s2")) == "stale"
    rounds = make(RoundPolicy(3, 1, max_staleness=4, arrivals_from=0))
    rounds.begin(0.0)
    send(rounds, "s1", 1)
    stale = [rounds.settled(Key(0, 0, site)) for site in ("s1", "s2")]
    assert stale == ["stale", ""], "on arrival a site has one contribution waiting at most"


def test_on_arrival_the_first_to_come_makes_a_version() -> None:
    rounds = make(RoundPolicy(3, 2, max_staleness=1, discount=0.5, arrivals_from=0))
    rounds.begin(0.0)
    for site in ("s2", "s1"):
        send(rounds, site, 0)
    assert rounds.advance(0.0, 1)[0] == "wait", "below its quorum of live sites"
    (merge,) = rounds.advance(0.0, 2)[1]
    rounds.publish(Update(1), own="s2")
    assert (merge.key.site, merge.scale) == ("s2", 1.0)
    assert rounds.tell("s2", 0).is_own and not rounds.tell("s1", 0).is_own
    rounds.begin(0.0)
    (merge,) = rounds.advance(0.0, 2)[1]
    assert (merge.key.site, merge.staleness) == ("s1", 1)
    assert merge.scale == pytest.approx(2**-0.5)
    rounds.publish(Update(1))
    rounds.begin(0.0)
    send(rounds, "s3", 3)  # it has the global weights, whose update is not out yet
    (merge,) = rounds.advance(0.0, 2)[1]
    assert (merge.staleness, merge.scale) == (0, 1.0)


def test_what_grows_too_old_while_it_waits_is_named_and_counted_once() -> None:
    rounds = make(RoundPolicy(3, 1, max_staleness=1, arrivals_from=0), least_steps=1)
    rounds.begin(0.0)
    for site in SITES:
        send(rounds, site, 0)
    for outdated in ([], [(Key(0, 0, "s3"), 2)]):
        rounds.advance(0.0, 3)
        rounds.publish(Update(1))
        assert [(key, work.steps) for key, work in rounds.outdated] == outdated
        rounds.begin(0.0)
    assert rounds.settled(Key(0, 0, "s3")) == "stale"
    assert not rounds.note_dropped(Key(0, 0, "s3"), wire.Work(), 0.0), "its receipt was lost"
    assert rounds.dropped == 1 and rounds.tell("s3", 0).steps, "its speed is known"
    assert close(rounds, "s3") == [("s3", 2, 0)] and not rounds.outdated


def test_a_barrier_does_not_wait_for_a_site_that_waits_to_be_merged() -> None:
    """Its late contribution would be merged when the round closes, which waits for its next one."""
    rounds = make(RoundPolicy(3, 2, max_staleness=1, arrivals_from=2))
    assert len(close(rounds, "s1", "s2")) == 2
    rounds.begin(0.0)
    assert rounds.settled(Key(0, 0, "s3")) == "stale"
    assert close(rounds, "s1", "s2")
    assert rounds.settled(Key(0, 1, "s3")) == "", "on arrival it makes a version of its own"


def test_a_pace_of_the_sites_own_ends_with_the_samples_of_all() -> None:
    rounds = make(RoundPolicy(3, 1, arrivals_from=0), least_steps=1)
    for count in range(1, 13):
        rounds.begin(0.0)
        send(rounds, "s1" if count % 2 else "s2", rounds.versions[0], steps=2 if count % 2 else 1)
        rounds.advance(0.0, 3)
        rounds.publish(Update(1))
        assert rounds.progress == rounds.samples // 6
    assert not rounds.is_done and rounds.run_step == 6
    assert rounds.tell("s1", 0).steps == 2 and rounds.tell("s2", 0).steps == 1
    assert rounds.tell("s3", 0).steps == 0, "nothing is known of its speed"
    rounds.expect(["s1"])
    assert rounds.run_step == 6, "sites that leave bring the end no nearer"


def test_steps_are_told_by_the_fastest_site_of_those_that_are_there() -> None:
    rounds = make(RoundPolicy(3, 1, arrivals_from=0), num_versions=99, h=20, least_steps=1)
    for site, compute_s in (("s1", 1.0), ("s2", 20.0), ("s3", 40.0)):
        rounds.begin(0.0)
        send(rounds, site, rounds.versions[0], steps=20, compute_s=compute_s)
        rounds.advance(0.0, 3)
        rounds.publish(Update(1))
    rounds.begin(0.0)
    assert [rounds.tell(site, 0).steps for site in SITES] == [20, 1, 1]
    rounds.advance(1.0, 2, ["s1"])
    assert [rounds.tell(site, 0).steps for site in SITES] == [20, 20, 10]
    rounds.advance(2.0, 3)
    assert [rounds.tell(site, 0).steps for site in SITES] == [20, 1, 1], "it is back"


@pytest.mark.parametrize("most", [0, 2])
def test_what_a_closed_round_was_not_given_is_late_though_its_update_is_not_out(most: int) -> None:
    rounds = make(RoundPolicy(3, 2, 10.0, max_staleness=most))
    for version in range(3):
        rounds.begin(0.0)
        for site in SITES[:2]:
            send(rounds, site, version)
        assert rounds.settled(Key(0, version - most, "s3")) == ""
        assert rounds.advance(10.0, 3)[0] == "close"
        assert rounds.settled(Key(0, version - most, "s3")) == "stale"
        assert rounds.settled(Key(0, version, "s1")) == "accepted"
        assert rounds.settled(Key(0, version + 1, "s3")) == ""
        rounds.publish(Update(1))


# What sites are told -----------------------------------------------------------------------------


def test_an_update_is_waited_for_then_ready_then_superseded_and_in_the_end_done() -> None:
    rounds = make(RoundPolicy(3, 2, 10.0))
    assert rounds.answer("s1", 0, 1) == (Header.NOT_YET, None)
    close(rounds, "s1", "s2")
    assert rounds.answer("s1", 0, 1) == (Header.READY, Update(1))
    told = rounds.tell("s1", 0)
    assert (told.merged_from, told.merged_into, told.run_step) == (0, 1, 2)
    rounds.begin(0.0)
    send(rounds, "s1", 1)
    send(rounds, "s2", 1)
    rounds.advance(10.0, 3)
    # Its round is over: who still wants it takes the global weights.
    assert rounds.answer("s3", 0, 1) == (Header.SUPERSEDED, None)
    rounds.is_over = True
    assert rounds.answer("s1", 0, 2) == (Header.DONE, None)


def test_an_update_s_memory_is_freed_once_all_sites_have_it() -> None:
    rounds = make(RoundPolicy(3, 3))
    close(rounds, *SITES)
    for site in SITES[:2]:
        rounds.announce(Key(0, 1, site), 0.0)
        assert rounds.answer(site, 0, 1)[0] == Header.READY
    rounds.announce(Key(0, 1, "s3"), 0.0)
    # A question that the network has repeated, of who had the answer long ago.
    assert rounds.answer("s1", 0, 1)[0] == Header.SUPERSEDED and rounds.anew_from == [0]
    # A new process asks whether it is held; who waits for it can no longer learn from it.
    rounds.note_back("s1", 1)
    for waits, anew_from in ((False, 0), (True, 2)):
        assert rounds.answer("s1", 0, 1, waits=waits)[0] == Header.SUPERSEDED
        assert rounds.anew_from == [anew_from]


@pytest.mark.parametrize(
    "policy", [RoundPolicy(3, 1, arrivals_from=0), RoundPolicy(3, 2, has_deadline=True)]
)
def test_past_updates_are_kept_up_to_the_weight_of_their_fragment(policy: RoundPolicy) -> None:
    rounds = make(policy)
    for version in range(1, 5):
        rounds.hold(0, version, Update(8))
    assert [rounds.answer("s1", 0, version)[0] for version in range(1, 5)] == [
        *[Header.SUPERSEDED] * 2,
        *[Header.READY] * 2,
    ]
    assert rounds.updates.lead([2], [4]) and rounds.updates.lead([4], [4])
    assert not any(rounds.updates.lead(versions, [4]) for versions in ([1], [5], []))
    rounds.hold(0, 5, Update(100))  # the newest in any case
    assert rounds.answer("s1", 0, 5)[0] == Header.READY


def test_where_the_sites_stand_that_keep_up_follows_from_their_last_rounds() -> None:
    """H = 2, one step a half second; contributions leave 3 s after a round has begun."""
    rounds = make(RoundPolicy(3, 2, has_deadline=True), num_versions=20)
    for version in range(6):
        rounds.begin(10.0 * version)
        assert (rounds.others_step(10.0 * version + 2.0, "s1") > 0) == (version > 0), (
            "nothing is known"
        )
        for site in SITES:
            send(rounds, site, version, 10.0 * version + 3.0)
        assert rounds.advance(10.0 * version + 4.0, 3)[0] == "close"
        rounds.publish(Update(1))
    rounds.begin(60.0)
    assert [rounds.others_step(60.0 + s, "s1") for s in (0, 2, 2.6, 3, 9)] == [8, 12, 13, 14, 14]
    rounds.expect(["s1", "s2"])
    send(rounds, "s1", 6, 61.0)
    assert rounds.others_step(61.2, "s3") == 14, (
        "most have sent, and wait: it is one contribution so far"
    )


@pytest.mark.parametrize("step_s", [1.2, 1.5, 3.0])
def test_a_slower_site_that_was_away_for_long_is_merged_again(step_s: float) -> None:
    """Two sites take a second for a step, H = 20; rounds close after 23 s by then."""
    rounds = make(RoundPolicy(3, 2, has_deadline=True), num_versions=60, h=20)
    now_s, merged = 0.0, list[int]()
    coming: tuple[float, int, int] | None = None  # when, to which version, of how many steps

    def come(until_s: float, present: int) -> None:
        nonlocal coming
        while coming is not None and coming[0] <= until_s:
            (at_s, version, steps), coming = coming, None
            spent = {"steps": steps, "compute_s": steps * step_s}
            if rounds.settled(key := Key(0, version, "s3")) != "stale":
                send(rounds, "s3", version, at_s, **spent)
                continue
            rounds.note_dropped(key, wire.Work(**spent), at_s)
            step = min(rounds.others_step(at_s, "s3"), 20 * present + 19)
            steps = 20 * (present + 1) - max(step, 20 * present)
            coming = (at_s + steps * step_s, present, steps)

    for version in range(60):
        present = rounds.begin(now_s)
        is_away = 5 <= version < 25
        if is_away or coming is None:
            coming = None if is_away else (now_s + 20 * step_s, version, 20)
        sent_s = now_s + 20.0
        come(sent_s, version)
        for site in ("s1", "s2"):
            send(rounds, site, version, sent_s, steps=20, compute_s=20.0)
        come(deadline_s := rounds.deadline_s(), version)
        now_s = sent_s if len(present.whole) == 3 or is_away else deadline_s
        assert rounds.advance(now_s, 3 - is_away, ["s3"] if is_away else [])[0] == "close"
        merged += [version for merge in present.merged if merge.key.site == "s3"]
        rounds.publish(Update(1))
    assert len([version for version in merged if version >= 25]) >= 11, merged


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_site_whose_link_becomes_slower_is_in_time_again(max_staleness: int) -> None:
    """H = 20 steps of a second at all sites; from version 10 on one's bytes take 12 s, not 0.1."""
    rounds = make(RoundPolicy(3, 2, 600.0, True, max_staleness), num_versions=40, h=20)
    now_s, merged = 0.0, list[int]()
    leaves_s, start, steps = 0.0, -1, 0

    def depart(at_s: float, version: int, step: int) -> None:
        nonlocal leaves_s, start, steps
        start, steps = version, 20 * (version + 1) - max(20 * version, min(step, 20 * version + 19))
        leaves_s = at_s + steps
        rounds.announce(Key(0, version, "s3"), leaves_s)

    for version in range(40):
        present = rounds.begin(now_s)
        if start < version and (not version or rounds.is_merged(Key(0, start, "s3"))):
            depart(now_s, version, rounds.others_step(now_s, "s3"))
        sent_s = now_s + 20.0
        for site in ("s1", "s2"):
            rounds.announce(Key(0, version, site), sent_s)
            work = wire.Work(steps=20, samples=20, compute_s=20.0)
            rounds.arrive(Key(0, version, site), Sent(work), sent_s + 0.1)
        while (comes_s := leaves_s + (12.0 if start >= 10 else 0.1)) <= rounds.deadline_s():
            key, work = Key(0, start, "s3"), wire.Work(steps=steps, samples=steps, compute_s=steps)
            if rounds.settled(key) == "":
                rounds.arrive(key, Sent(work), comes_s)
                break
            rounds.note_dropped(key, work, comes_s)
            depart(comes_s, version, rounds.others_step(comes_s, "s3"))
        now_s = rounds.deadline_s() + 0.01 if present.lacking() else max(sent_s + 0.1, comes_s)
        assert rounds.advance(now_s, 3)[0] == "close"
        merged += [m.key.version for m in present.merged if m.key.site == "s3" and not m.staleness]
        rounds.publish(Update(1))
    assert [v for v in merged if v < 10] == [*range(10)]
    assert len([v for v in merged if v >= 10]) >= 20, [*map(str, merged)]


def test_how_long_bytes_travel_counts_from_the_first_announcement() -> None:
    times = RoundTimes()
    for version, now_s in ((3, 10.0), (3, 14.0), (2, 15.0)):  # a stripe, and a late one
        times.announce(version, "s1", now_s)
    times.arrive(2, "s1", 16.0)
    assert times.travel_s("s1") == 0.0
    times.arrive(3, "s1", 20.0)
    assert times.travel_s("s1") == 10.0


def test_a_site_that_missed_an_update_it_is_merged_into_has_all_sites_begin_anew() -> None:
    rounds = make(RoundPolicy(3, 1, 10.0))
    close(rounds, "s1")
    close(rounds, "s2")
    assert rounds.answer("s2", 0, 1)[0] == Header.SUPERSEDED and rounds.tell("s2", 0).anew_from == 0
    assert rounds.answer("s1", 0, 1)[0] == Header.SUPERSEDED
    assert rounds.tell("s1", 0).anew_from == rounds.tell("s2", 0).anew_from == 3


@pytest.mark.parametrize(("checkpoint", "anew_from"), [(1, 0), (0, 2)])
def test_what_a_new_process_has_lost_others_are_not_corrected_for(
    checkpoint: int, anew_from: int
) -> None:
    rounds = make(RoundPolicy(3, 1, 10.0))
    close(rounds, "s1")
    rounds.note_back("s1", checkpoint)
    assert rounds.tell("s2", 0).anew_from == anew_from


def test_where_a_new_process_cannot_make_again_what_was_sent_it_is_not_its_own() -> None:
    rounds = make(RoundPolicy(3, 3, 10.0), num_fragments=2)
    send(rounds, "s1", 0, 0.0)
    rounds.note_back("s1", 1)
    assert rounds.settled(Key(0, 0, "s1")) == "stale" and rounds.settled(Key(0, 0, "s2")) == ""
    assert rounds.tell("s2", 0).anew_from == 1 and not rounds.tell("s2", 1).anew_from
    rounds.note_dropped(Key(0, 0, "s1"), wire.Work(), 0.0)
    assert not rounds.dropped, "in its place another one is merged"
    send(rounds, "s2", 0, 1.0)
    send(rounds, "s3", 0, 1.0)
    close(rounds)
    assert rounds.latest == ["s1", "s2", "s3"], "it is merged all the same"
    told = [rounds.tell(site, 0).merged_into for site in ("s1", "s2", "s3")]
    assert told == [0, 1, 1], "but a process that did not send it learns nothing from it"
    rounds.note_back("s2", 1)
    assert rounds.tell("s2", 0).merged_into == 0 and rounds.tell("s3", 0).anew_from == 2


@pytest.mark.parametrize(("checkpoint", "anew_from"), [(6, 0), (5, 0), (4, 6), (0, 6)])
def test_a_coordinator_that_went_on_knows_not_whom_its_weights_are_of_and_has_all_begin_anew(
    checkpoint: int, anew_from: int
) -> None:
    rounds = make(RoundPolicy(3, 1, 10.0), num_versions=9, versions=[5])
    rounds.note_back("s2", checkpoint)
    assert rounds.tell("s1", 0).anew_from == anew_from


def test_no_checkpoint_is_of_all_fragments_and_so_all_begin_anew_whatever_its_version() -> None:
    rounds = make(RoundPolicy(3, 3), num_fragments=2, num_versions=9, versions=[5, 5])
    rounds.note_back("s2", 5)
    assert [rounds.tell("s1", fragment).anew_from for fragment in (0, 1)] == [6, 6]


@pytest.mark.parametrize(("told", "anew_from"), [(4, 4), (5, 5), (6, 6), (8, 6)])
def test_beginning_anew_outlives_the_coordinator_and_comes_before_versions_taken_back(
    told: int, anew_from: int
) -> None:
    rounds = make(RoundPolicy(3, 1, 10.0), num_versions=9, versions=[5])
    rounds.go_back_to([told])
    assert rounds.tell("s1", 0).anew_from == anew_from


@pytest.mark.parametrize(
    ("policy", "merged", "checkpoint", "is_behind"),
    [
        (RoundPolicy(3, 3), "s1 s2 s3", 1, True),
        (RoundPolicy(3, 3), "", 1, True),  # the coordinator is new
        (RoundPolicy(3, 3), "s1 s2 s3", 2, False),
        (RoundPolicy(3, 3), "s1 s2 s3", 0, False),
        (RoundPolicy(3, 2), "s1 s2 s3", 1, False),  # others go on meanwhile
    ],
)
def test_who_lost_what_it_had_after_the_last_round_takes_its_steps_again(
    policy: RoundPolicy, merged: str, checkpoint: int, is_behind: bool
) -> None:
    rounds = make(policy)
    rounds.versions = [2]
    for site in merged.split():
        rounds._merged[0][site] = (1, 2)
    assert rounds.is_behind("s1", checkpoint) is is_behind
    assert rounds.note_back("s1", checkpoint) is (checkpoint < 2 and not is_behind)
    assert rounds.note_back("s1", checkpoint, repeats=False) is (checkpoint < 2)
    rounds._merged[0]["s1"] = (0, 1)
    assert not rounds.is_behind("s1", checkpoint), "its steps of the last round are in no update"
    rounds.versions = [4]
    assert not rounds.is_behind("s1", 3), "there is no round left"


@pytest.mark.parametrize("has_deadline", [False, True])
def test_a_quorum_does_not_wait_for_who_has_gone(has_deadline: bool) -> None:
    rounds = make(RoundPolicy(3, 2, has_deadline=has_deadline))
    rounds.begin(0.0)
    send(rounds, "s1", 0)
    assert rounds.advance(1.0, 1, ["s3"])[0] == "wait"
    assert rounds.owing(["s1", "s2"]) == ["s2", "s3"]
    send(rounds, "s2", 0)
    assert rounds.advance(1.0, 3)[0] == "wait"
    assert rounds.advance(1.0, 2, ["s3"])[0] == "close"
    barrier_of_all = make(RoundPolicy(3, 3))
    barrier_of_all.begin(0.0)
    send(barrier_of_all, "s1", 0)
    assert barrier_of_all.advance(1.0, 1, ["s2", "s3"])[0] == "wait"


def test_on_arrival_a_quorum_of_live_sites_waits_for_nobody_else() -> None:
    rounds = make(RoundPolicy(3, 2, arrivals_from=0))
    rounds.begin(0.0)
    assert rounds.owing(["s1", "s2"]) == ["s1", "s2"]
    assert rounds.owing(["s1"]) == ["s2", "s3"]
    send(rounds, "s2", 0)
    send(rounds, "s3", 0)
    assert rounds.owing(["s1"]) == ["s1"] and not rounds.owing(["s2", "s3"])


def test_a_quorum_does_not_wait_for_who_was_refused_three_times() -> None:
    rounds = make(RoundPolicy(3, 2))
    present = rounds.begin(0.0)
    send(rounds, "s1", 0)
    rounds.refused["s2"] = 3
    assert rounds.advance(1.0, 3)[0] == "wait"  # one is no quorum
    send(rounds, "s3", 0)
    rounds.refused["s2"] = 2
    assert rounds.advance(1.0, 3)[0] == "wait"
    rounds.setbacks["s2"] = 1  # and has begun anew
    assert rounds.advance(1.0, 3)[0] == "close"
    assert [merge.key.site for merge in present.merged] == ["s1", "s3"]
    assert not rounds.is_hopeless
    rounds.refused.update(s1=9, s2=1, s3=2)
    rounds.setbacks.update(s3=9)  # as after a certificate expired
    assert not rounds.is_hopeless
    rounds.refused["s3"] += 1
    assert rounds.is_hopeless
    rounds.publish(Update(1))
    assert not rounds.is_hopeless and not rounds.setbacks


# Any order of inputs -----------------------------------------------------------------------------

inputs = st.lists(
    st.tuples(st.sampled_from(["send", "advance", "publish"]), st.sampled_from(SITES)), max_size=60
)


@settings(deadline=None)
@given(inputs, st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_each_contribution_is_merged_once_or_dropped(
    steps: list[tuple[str, str]], max_staleness: int, quorum: int, arrives: bool
) -> None:
    policy = RoundPolicy(3, quorum, 5.0, max_staleness=max_staleness)
    if arrives:
        policy = RoundPolicy(3, quorum, 1e9, max_staleness=max_staleness, arrivals_from=0)
    rounds = make(policy, num_versions=10**6)
    now_s, sent, merged, freed = 0.0, 0, 0, 0
    present = rounds.begin(now_s)
    for what, site in steps:
        now_s += 1.0
        key = Key(0, rounds.versions[0], site)
        if what == "send" and rounds.settled(key) == "":
            send(rounds, site, key.version, now_s)
            sent += 1
        elif what == "advance" and not present.is_closed:
            verdict, merges = rounds.advance(now_s, 3)
            merged += len(merges)
            assert all(merge.staleness <= max_staleness for merge in merges)
            if verdict == "stop":
                return
        elif what == "publish" and present.is_closed:
            assert present.merged and len(present.merged) >= (1 if arrives else quorum)
            freed += len(rounds.publish(Update(1)))
            assert rounds.versions == [present.version + 1]
            present = rounds.begin(now_s)
    assert freed <= sent and merged <= sent
    assert freed == merged - len(present.merged) + rounds.dropped


def test_of_a_sum_that_an_earlier_start_closed_an_ejected_site_s_part_stays() -> None:
    rounds = make(RoundPolicy(3, 2, 600.0), num_fragments=2)
    for index in (0, 1):
        sent = Sent(wire.Work(steps=2, samples=2))
        rounds.close_again(index, [Merge(Key(index, 0, site), sent, 0, 1.0) for site in SITES])
    assert [rounds.settled(Key(1, 0, site)) for site in ("s3", "s4")] == ["accepted", "stale"]
    rounds.begin(0.0)
    assert rounds.forget("s3") == []
    rounds.expect(["s1", "s2"])
    rounds.publish(Update(1))
    assert [merge.key.site for merge in rounds.begin(1.0).merged] == [*SITES]
    rounds.publish(Update(1))


def test_what_is_merged_is_not_wanted_again_whatever_its_site_has_sent_besides() -> None:
    rounds = make(RoundPolicy(3, 1, 10.0, max_staleness=2))
    close(rounds, "s2")
    rounds.begin(0.0)
    for version in (0, 1):  # one too late for its round, and the next one
        send(rounds, "s1", version)
    assert rounds.advance(10.0, 3)[0] == "close"
    rounds.publish(Update(1))
    assert [rounds.settled(Key(0, version, "s1")) for version in (0, 1)] == ["accepted"] * 2
    assert rounds.settled(Key(0, 0, "s3")) == ""


def test_late_contributions_follow_by_version_and_site_whatever_their_arrivals() -> None:
    rounds = make(RoundPolicy(3, 1, 10.0, max_staleness=2))
    close(rounds, "s1")
    close(rounds, "s1")
    present = rounds.begin(0.0)
    for site, version in (("s3", 1), ("s3", 0), ("s2", 1), ("s2", 0), ("s1", 2)):
        send(rounds, site, version)
    assert rounds.advance(10.0, 3)[0] == "close"
    order = [(merge.key.version, merge.key.site) for merge in present.merged]
    assert order == [(2, "s1"), (0, "s2"), (0, "s3"), (1, "s2"), (1, "s3")]


def test_no_contribution_is_of_more_steps_than_its_round_has() -> None:
    rounds, key = make(RoundPolicy(3, 3)), Key(0, 0, "s1")
    rounds.check(key, wire.Work(steps=3, samples=3))  # one is repeated where a site begins anew
    for steps, samples in ((4, 4), (4, 2), (2, 3)):
        with pytest.raises(PayloadError, match="where 3 steps of 1 are the most"):
            rounds.check(key, wire.Work(steps=steps, samples=samples))
    shifted = make(RoundPolicy(3, 3), num_fragments=2)
    shifted.check(Key(1, 0, "s1"), wire.Work(steps=4, samples=4))  # by a step, the first time
    with pytest.raises(PayloadError, match="where 4 steps of 1 are the most"):
        shifted.check(Key(1, 0, "s1"), wire.Work(steps=5, samples=5))
