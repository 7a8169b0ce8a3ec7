"""What a site can ask of the coordinator, asked directly."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.codecs import Payload
from fedwan.codecs.payload import Source
from fedwan.coordinator import servicer
from fedwan.coordinator.intake import Upload
from fedwan.coordinator.snapshots import MOST
from fedwan.errors import PayloadError, SessionLost, SiteEjected
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.protocol.agreement import Claim
from fedwan.state import hash_hashes
from tests.planes import (
    RUN,
    Bench,
    header_of,
    in_thread,
    payload_of,
    read_all,
    update_request,
)

CHUNK = 1 << 10


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.set_model()
    for site in ("s1", "s2"):
        bench.hub.join(site, bench.hello(site))
    return bench


def prepared(payload: Payload, session: str = "s1-first", **changes: int) -> wire.UploadHeader:
    header = header_of(payload, **changes)
    header.session, header.chunk_bytes = session, CHUNK
    return header


def write(bench: Bench, header: wire.UploadHeader, payload: Payload, chunks: range) -> None:
    reception = bench.hub.open_upload("s1", header)
    assert not isinstance(reception, wire.Receipt)
    data = read_all(payload)
    for index in chunks:
        reception.write(index * CHUNK, data[index * CHUNK : (index + 1) * CHUNK])


def upload(bench: Bench, header: wire.UploadHeader, payload: Payload) -> wire.Receipt:
    write(bench, header, payload, range(-(-payload.num_bytes // CHUNK)))
    return bench.hub.close_stripe("s1", header)


# Join ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}, this coordinator {PROTOCOL}"),
        ({"layout_json": "nonsense"}, "layout cannot be read"),
        ({"initial_sha256": "0" * 64}, "initial weights hash to 000000000000"),
        ({"site": "s2"}, "calls itself 's2' but its certificate says 's3'"),
    ],
)
def test_a_site_that_does_not_belong_is_refused_in_one_line(
    bench: Bench, changes: dict[str, Any], expected: str
) -> None:
    hello = bench.hello("s3")
    for name, value in changes.items():
        setattr(hello, name, value)
    refusal = bench.hub.join("s3", hello).refusal
    assert expected in refusal and "\n" not in refusal
    assert ";" in refusal or "cannot be read" in refusal  # what to do about it
    assert not bench.registry.sites["s3"].session
    assert bench.events[-1] == ("rejected", "s3", refusal)


def test_a_site_of_another_start_of_the_run_is_sent_for_a_new_ticket_and_not_refused(
    bench: Bench,
) -> None:
    hello = bench.hello("s3")
    hello.run_id = "another"
    with pytest.raises(SessionLost, match="of run another, this is run-1"):
        bench.hub.join("s3", hello)
    bench.hub._rounds = None
    bench.hub.finish("no site came")
    with pytest.raises(SessionLost, match="the run is over: no site came"):
        bench.hub.join("s3", bench.hello("s3"))
    assert not any(site == "s3" for _, site, _ in bench.events)


def test_a_site_of_another_run_that_was_led_here_hears_nothing_that_would_end_it(
    bench: Bench,
) -> None:
    bench.set_model()
    bench.registry.decide("eject", "s1", (), True)
    hello = bench.hello("s1", "of-another")
    hello.run_id = "another"
    kind = wire.DownloadRequest.GLOBAL
    payload = payload_of(1.0, bench.layout)
    calls: list[Callable[[], object]] = [
        lambda: bench.hub.join("s1", hello),
        lambda: bench.hub.download("s1", wire.DownloadRequest(run_id="another", kind=kind)),
        lambda: bench.hub.open_upload("s1", prepared(payload, "of-another")),
        lambda: bench.hub.attach("s1", "of-another"),
    ]
    for call in calls:
        with pytest.raises(SessionLost):
            call()
    with pytest.raises(PayloadError, match="of run another"):
        bench.hub.report("s1", wire.QualityReport(run_id="another"))
    with pytest.raises(SiteEjected):
        bench.hub.download("s1", wire.DownloadRequest(run_id=RUN, kind=kind))


def test_layouts_that_nobody_has_said_before_are_read_slowly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    of = Claim.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Claim, "of", classmethod(lambda cls, hello: read.append(1) or of(cls, hello))
    )
    for number in range(100):
        hello = bench.hello("s3", f"session-{number}")
        hello.layout_json = json.dumps({"x": number})
        bench.hub.join("s3", hello)
    assert 0 < len(read) < 10
    hello.run_id = "another"
    with pytest.raises(SessionLost):
        bench.hub.join("s3", hello)
    assert len(read) < 10
    for _ in range(20):  # what is known costs nothing, and who waits may ask again
        assert not bench.hub.join("s2", bench.hello("s2", "one")).is_waiting
    assert bench.registry.sites["s2"].session == "one"


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_site_that_is_a_version_behind_keeps_its_weights_or_others_are_told(
    bench: Bench, is_kept: bool
) -> None:
    present = bench.set_model()
    bench.rounds.versions, present.versions = [2], [2]
    bench.rounds._merged[0]["s1"] = (1, 2)
    hello = bench.hello("s1", "second")
    hello.checkpoint = 1
    bench.hub.join("s1", hello)
    assert bench.events[-1][2] == "s1 rejoined at version 2, and takes the steps to it again"
    kind, held = wire.DownloadRequest.GLOBAL, "of version 1" if is_kept else ""
    for version, expected in ((2, [1] if is_kept else [2]), (0, [2])):
        request = wire.DownloadRequest(run_id=RUN, kind=kind, version=version, held_sha256=held)
        header, payload = bench.hub.download("s1", request)
        assert list(header.versions) == expected
        assert (payload is None) == (expected == [1])
    assert header.anew_from == (0 if is_kept else 3)
    assert (bench.events[-1][0] == "warning") is not is_kept
    assert bench.details[-1].get("anew_from") == (None if is_kept else [3])
    if not is_kept:  # and once only, however often it asks
        request = wire.DownloadRequest(run_id=RUN, kind=kind, version=1)
        bench.hub.download("s1", request)
        assert [event for event, _, _ in bench.events].count("warning") == 1


def test_a_site_that_has_the_present_weights_is_sent_none(bench: Bench) -> None:
    model = bench.set_model()
    sha256 = hash_hashes([model.hash_of(model.fragments[0])])
    for held, is_held in ((sha256, True), ("0" * 64, False), ("", False)):
        request = wire.DownloadRequest(
            run_id=RUN, kind=wire.DownloadRequest.GLOBAL, held_sha256=held
        )
        header, payload = bench.hub.download("s1", request)
        assert (header.status == wire.DownloadHeader.HELD) is is_held
        assert (payload is None) is is_held and list(header.versions) == [0]


@pytest.mark.parametrize(
    ("held", "status"),
    [([0], "BEHIND"), ([1], "READY"), ([2], "READY"), ([0, 0], "READY"), ([1 << 53], "READY")],
)
def test_a_site_that_is_behind_follows_updates_that_are_held(
    bench: Bench, held: list[int], status: str
) -> None:
    bench.set_model().versions = [1]
    bench.publish(1, payload_of(1.0, bench.layout))
    request = wire.DownloadRequest(run_id=RUN, kind=wire.DownloadRequest.GLOBAL)
    request.held_sha256, request.held_versions[:] = "0" * 64, held
    header, payload = bench.hub.download("s1", request)
    assert wire.DownloadHeader.Status.Name(header.status) == status
    assert (payload is None) is (status == "BEHIND") and list(header.versions) == [1]


def test_a_site_that_is_ejected_while_it_waits_is_given_no_update(bench: Bench) -> None:
    find, waits = bench.registry.find, threading.Event()

    def found(*args: Any) -> Any:
        waits.set()
        return find(*args)

    bench.registry.find = found  # type: ignore[method-assign]
    waiting = in_thread(lambda: bench.hub.download("s1", update_request(wait_s=10.0)))
    assert waits.wait(10)
    bench.hub.decide("eject", "s1")
    bench.publish(1, payload_of(1.0, bench.layout))
    with pytest.raises(SiteEjected, match="s1 was ejected from the run"):
        waiting()


def test_versions_that_no_run_reaches_are_refused(bench: Bench) -> None:
    request = wire.DownloadRequest(run_id=RUN, kind=wire.DownloadRequest.GLOBAL)
    request.held_versions[:] = [1, (1 << 53) + 1]
    with pytest.raises(PayloadError, match="held_versions of 9007199254740993"):
        bench.hub.download("s1", request)


# Uploads ---------------------------------------------------------------------------------------


def test_the_same_contribution_twice_is_one(bench: Bench) -> None:
    payload = payload_of(1.0, bench.layout)
    header = prepared(payload)
    assert upload(bench, header, payload).status == wire.Receipt.ACCEPTED
    first = bench.contribution("s1")
    bench.hub.join("s1", bench.hello("s1", "second"))
    for session, again in (("second", payload), ("second", payload_of(2.0, bench.layout))):
        receipt = bench.hub.open_upload("s1", prepared(again, session))
        assert isinstance(receipt, wire.Receipt) and receipt.status == wire.Receipt.ACCEPTED
    assert bench.hub.close_stripe("s1", header).status == wire.Receipt.ACCEPTED
    assert bench.contribution("s1") is first


@pytest.mark.parametrize("written", [3, 4])  # the last: whole, its own stripe still to be closed
def test_a_late_stripe_of_the_old_session_does_not_speak_for_the_new_one_s_bytes(
    bench: Bench, written: int
) -> None:
    old, new = payload_of(1.0, bench.layout), payload_of(2.0, bench.layout)
    old_header, new_header = prepared(old), prepared(new, "second", samples=8)
    write(bench, old_header, old, range(0, 2))
    bench.hub.join("s1", bench.hello("s1", "second"))
    write(bench, new_header, new, range(0, written))
    assert bench.hub.close_stripe("s1", old_header).status == wire.Receipt.INCOMPLETE
    assert upload(bench, new_header, new).status == wire.Receipt.ACCEPTED
    assert bench.hub.close_stripe("s1", old_header).status == wire.Receipt.ACCEPTED
    contribution = bench.contribution("s1")
    assert contribution is not None and bench.value("s1") == 2.0
    assert contribution.work.samples == 8


def test_a_payload_replaced_while_it_is_checked_touches_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = payload_of(1.0, bench.layout), payload_of(2.0, bench.layout)
    inspect, inspecting, go_on = bench.intake.inspect, threading.Event(), threading.Event()

    def slowly(key: Upload, payload: Source) -> dict[str, float]:
        inspecting.set()
        assert go_on.wait(10)
        return inspect(key, payload)

    monkeypatch.setattr(bench.intake, "inspect", slowly)
    first = in_thread(lambda: upload(bench, prepared(old), old))
    assert inspecting.wait(10)
    monkeypatch.setattr(bench.intake, "inspect", inspect)
    bench.hub.join("s1", bench.hello("s1", "second"))
    write(bench, prepared(new, "second"), new, range(0, 2))
    go_on.set()
    assert first().status == wire.Receipt.INCOMPLETE
    assert bench.hub.rejected == 0
    assert upload(bench, prepared(new, "second"), new).status == wire.Receipt.ACCEPTED
    assert bench.value("s1") == 2.0


def test_a_refusal_counts_once_however_often_its_receipt_is_asked_for(bench: Bench) -> None:
    spoilt = payload_of(float("nan"), bench.layout)
    header = prepared(spoilt)
    assert upload(bench, header, spoilt).status == wire.Receipt.REJECTED
    for _ in range(3):
        assert "not finite" in upload(bench, header, spoilt).text
    assert bench.hub.rejected == bench.rounds.refused["s1"] == 1
    header.work.compute_s = 0.01  # another one, of the same bytes
    assert upload(bench, header, spoilt).status == wire.Receipt.REJECTED
    assert bench.rounds.refused["s1"] == 2


def test_a_contribution_to_a_version_that_is_past_is_stale(bench: Bench) -> None:
    payload = payload_of(1.0, bench.layout)
    for _ in range(2):
        receipt = bench.hub.open_upload("s1", prepared(payload, version=3))
        assert isinstance(receipt, wire.Receipt) and receipt.status == wire.Receipt.STALE
        assert "version 3 is not wanted, the present one is 0" in receipt.text
    assert bench.rounds.dropped == 1
    header = prepared(payload)
    write(bench, header, payload, range(1))
    bench.publish(1, payload)  # its round did not wait for the rest
    assert bench.hub.close_stripe("s1", header).status == wire.Receipt.STALE
    assert bench.rounds.dropped == 2


def test_a_site_holds_few_snapshots_back_and_is_told_to_come_again(bench: Bench) -> None:
    model = bench.set_model()
    request = wire.DownloadRequest(run_id="run-1", kind=wire.DownloadRequest.GLOBAL)
    slow = []
    for version in range(1, MOST + 2):
        slow.append(bench.hub.download("s1", request))
        payload = model.commit(model.fragments[0], {"net/w": torch.ones(1000)}, samples=4)
        bench.publish(version, payload)
    assert slow.pop().header.status == wire.DownloadHeader.NOT_YET
    assert all(delivery.payload is not None for delivery in slow)
    slow.pop()
    bench.hub._snapshots.clear("s1")
    assert bench.hub.download("s1", request).payload is not None


def test_sessions_that_come_one_after_the_other_are_let_in_slowly(bench: Bench) -> None:
    first = len(bench.events)
    welcomes = [bench.hub.join("s1", bench.hello("s1", session=f"s{n}")) for n in range(100)]
    assert 0 < sum(not welcome.is_waiting for welcome in welcomes) < 10
    assert "joined too often" in welcomes[-1].text
    assert len(bench.events) - first < 10
    assert not bench.hub.join("s2", bench.hello("s2")).is_waiting


def test_calls_with_an_identity_that_holds_no_more_do_not_shut_out_the_site_itself(
    bench: Bench,
) -> None:
    bench.hub.attach("s1", "s1-first")
    for _ in range(5):
        bench.hub.refuse("s1", "its certificate has expired")
    assert not bench.rounds.setbacks["s1"]


def test_receptions_that_are_replaced_or_past_hold_no_descriptor(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_values=3_000_000)  # large enough for the disk
    model = bench.set_model()
    bench.hub.join("s1", bench.hello("s1"))
    before = len(os.listdir("/proc/self/fd"))
    for value in range(5):
        payload = payload_of(float(value), bench.layout)
        write(bench, prepared(payload), payload, range(1))
    bench.intake.free()  # as the next call does
    assert len(os.listdir("/proc/self/fd")) == before + 1
    model.versions[0] = 1
    bench.publish(1, payload)
    assert len(os.listdir("/proc/self/fd")) == before


def test_heartbeats_are_heard_while_a_large_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=3_000_000)  # large enough for the disk
    bench.set_model()
    bench.hub.join("s1", bench.hello("s1"))
    payload, work = payload_of(1.0, bench.layout), os.posix_fallocate
    is_slow, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        is_slow.set()
        assert go_on.wait(10)
        return work(*args)

    monkeypatch.setattr("fedwan.link.buffer.os.posix_fallocate", slowly)
    busy = in_thread(lambda: upload(bench, prepared(payload), payload))
    assert is_slow.wait(10)
    in_thread(lambda: bench.hub.heard("s1", wire.SiteSignal(session="s1-first", step=3)))(2.0)
    assert bench.registry.sites["s1"].step == 3
    go_on.set()
    busy()


def test_nobody_but_who_tells_waits_for_a_line_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines keep the order in which things happened."""
    keep, is_writing, go_on = Bench._keep, threading.Event(), threading.Event()

    def slowly(self: Bench, *event: Any, **details: Any) -> None:
        is_writing.set()
        assert go_on.wait(10)
        keep(self, *event, **details)

    monkeypatch.setattr(Bench, "_keep", slowly)
    bench = Bench(tmp_path)
    joining = in_thread(lambda: bench.hub.join("s1", bench.hello("s1")))
    assert is_writing.wait(10)
    heartbeat = wire.SiteSignal(session="s1-first", step=3)
    in_thread(lambda: bench.hub.join("s2", bench.hello("s2")))(2.0)  # one more line is told
    in_thread(lambda: bench.hub.heard("s1", heartbeat))(2.0)
    assert bench.registry.sites["s1"].step == 3 and joining.is_running()
    with bench.hub.changed:
        bench.hub.event("second", None, "under the lock")
        leaving = in_thread(lambda: bench.hub.event("third", None, "without it"))
        assert not bench.events
        go_on.set()
    joining(), leaving()
    assert [event for event, *_ in bench.events] == ["join", "join", "second", "third"]


def test_what_a_full_disk_refuses_is_told_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, has_room = Bench._keep, False

    def try_to(self: Bench, *event: Any, **details: Any) -> None:
        if not has_room:
            raise OSError(errno.ENOSPC, "full")
        keep(self, *event, **details)

    monkeypatch.setattr(Bench, "_keep", try_to)
    bench = Bench(tmp_path)
    hello = bench.hello("s1")
    hello.certificate = b"PEM"
    bench.hub.join("s1", hello)
    bench.hub.heard("s1", wire.SiteSignal(session="s1-first", step=3))  # no concern of this thread
    with pytest.raises(OSError, match="full"):
        bench.hub.event("started", None, "who tells it must know")
    has_room = True
    bench.hub.heard("s1", wire.SiteSignal(session="s1-first", step=4))
    assert [event for event, *_ in bench.events] == ["join"]
    assert bench.details[0]["certificate"] == "PEM"


# Downloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [wire.DownloadRequest.GLOBAL, wire.DownloadRequest.EMA])
def test_sites_share_a_snapshot_of_the_same_versions(bench: Bench, kind: Any) -> None:
    model = bench.set_model()
    request = wire.DownloadRequest(run_id="run-1", kind=kind)
    first, second = (bench.hub.download(site, request) for site in ("s1", "s2"))
    assert first.payload is second.payload is not None
    (fragment,) = model.fragments
    model.commit(fragment, {"net/w": torch.ones(1000)}, samples=4)
    bench.publish(1, payload_of(1.0, bench.layout))
    later = bench.hub.download("s1", request)
    assert later.payload is not first.payload and list(later.header.versions) == [1]
    request.checksum = second.header.checksum  # the other one goes on with what it began
    assert bench.hub.download("s2", request).payload is second.payload


# Reports and farewells -------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "told"), [(4, ""), (2, ""), (1, "go on from version 1")])
def test_a_site_that_lost_checkpoints_is_told_of(bench: Bench, checkpoint: int, told: str) -> None:
    bench.publish(3, payload_of(1.0, bench.layout))
    hello = bench.hello("s3")
    hello.checkpoint = checkpoint
    bench.hub.join("s3", hello)
    assert bench.events[-1][0] == "join", "its process may be dead, and the Join late"
    bench.hub.attach("s3", hello.session)
    found = [text for event, _, text in bench.events if event == "warning"]
    assert len(found) == bool(told) and all(told in text for text in found)


def test_a_site_whose_stream_comes_after_its_first_contributions_lost_no_checkpoint(
    bench: Bench,
) -> None:
    hello, payload = bench.hello("s1", "new"), payload_of(1.0, bench.layout)
    bench.hub.join("s1", hello)
    header = header_of(payload)
    header.session = "new"
    bench.hub.open_upload("s1", header)
    bench.publish(3, payload)
    bench.hub.attach("s1", "new")
    assert not [text for event, _, text in bench.events if event == "warning"]
    assert bench.rounds.anew_from == [0]


def test_how_a_site_failed_is_told_once_it_is_silent_or_at_once_if_nobody_else_tells(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, sites=("s1", "s2", "s3"))
    bench.hub.join("s1", bench.hello("s1"))
    del bench.events[:]
    for site in ("s1", "s3", "stranger"):
        bench.hub.fail(site, f"no GPU\x1b at {site}")
    bench.registry.sites["s1"].heard_s = -100.0
    bench.hub.notice()
    assert bench.events == [
        ("failed", "s3", "s3: no GPU? at s3"),
        ("rejected", None, "no GPU? at stranger"),
        ("lost", "s1", "s1 has fallen silent: no GPU? at s1"),
    ]
    bench.hub.join("s1", bench.hello("s1", "again"))
    assert [row["error"] for row in bench.hub.survey()["sites"]] == ["", "", "no GPU? at s3"]


def test_a_farewell_counts_once(bench: Bench) -> None:
    work = wire.Work(bytes_up=3)
    bench.hub.leave("s1", wire.Farewell(session="s1-first", error="first", work=work))
    bench.hub.leave("s1", wire.Farewell(session="s1-first", error="again", work=work))
    assert bench.hub.farewells["s1"].error == "first"
    assert [text for event, _, text in bench.events if event == "leave"] == ["s1 left: first"]
    bench.hub.join("s1", bench.hello("s1", "second"))
    bench.hub.leave("s1", wire.Farewell(session="second", work=work))
    assert bench.hub.unmerged.bytes_up == 6


def test_a_farewell_of_a_process_that_was_replaced_does_not_put_the_next_one_out(
    bench: Bench,
) -> None:
    bench.hub.join("s1", bench.hello("s1", "second"))
    bench.hub.leave("s1", wire.Farewell(session="s1-first", error="late"))
    assert bench.is_live("s1") and not bench.hub.farewells


def test_whole_weights_come_with_what_is_known_of_the_same_version(bench: Bench) -> None:
    """Else a site whose contribution is in them would wait for one more update."""
    model = bench.set_model()
    bench.rounds.updates.keeps_past = True
    payload = model.commit(model.fragments[0], {"net/w": torch.ones(1000)}, samples=4)
    request = wire.DownloadRequest(run_id="run-1", kind=wire.DownloadRequest.GLOBAL)
    asked = in_thread(lambda: bench.hub.download("s1", request))
    with bench.hub.changed:
        bench.hub.changed.wait(0.1)  # committed, and not published yet
    bench.publish(1, payload)
    header = asked(5.0).header
    assert (header.version, list(header.versions)) == (1, [1])


@pytest.mark.parametrize("kind", [wire.DownloadRequest.GLOBAL, wire.DownloadRequest.EMA])
def test_no_version_leaves_before_it_is_published(
    bench: Bench, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_WAIT_S", 0.05)
    model = bench.set_model()
    payload = model.commit(model.fragments[0], {"net/w": torch.ones(1000)}, samples=4)
    request = wire.DownloadRequest(run_id="run-1", kind=kind)
    delivery = bench.hub.download("s1", request)
    assert delivery.payload is None
    assert delivery.header.status == wire.DownloadHeader.NOT_YET
    bench.hub.stop_text = "its disk is full"
    bench.rounds.is_over = True  # before this one was on disk
    with pytest.raises(SessionLost, match="the run is over: its disk is full"):
        bench.hub.download("s1", request)
    bench.publish(1, payload)
    assert list(bench.hub.download("s1", request).header.versions) == [1]
