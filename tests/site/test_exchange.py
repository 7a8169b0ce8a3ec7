"""What becomes of contributions and updates that are in flight."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from fedwan.codecs import fp32
from fedwan.config import InnerConfig
from fedwan.errors import FedwanError, NotJoined, PayloadError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.site import checkpoint, exchange
from fedwan.site.checkpoint import Residuals
from fedwan.site.exchange import Exchange
from fedwan.site.flight import Anew, CannotMerge, Flight, Refused
from fedwan.site.group import Group
from fedwan.site.meter import Work
from fedwan.site.replica import Replica, evaluating
from fedwan.site.stub import CoordinatorStub
from fedwan.state import clone, ema_name, hash_state, is_moment
from tests.site.support import (
    BATCH,
    WIDTH,
    Masters,
    Ran,
    asked,
    at_site,
    network,
    overflow_once,
    take_steps,
)
from tests.support import same_bits, spec


def test_what_ended_one_flight_is_told_when_another_makes_the_site_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: CoordinatorStub, payload: Any, header: wire.UploadHeader) -> wire.Receipt:
        if header.kind == wire.UploadHeader.INITIAL:
            return real(self, payload, header)
        if header.fragment:
            raise PayloadError("torn")
        return wire.Receipt(status=wire.Receipt.REJECTED, text="not finite")

    real = CoordinatorStub.upload
    monkeypatch.setattr(CoordinatorStub, "upload", send)
    config = asked("strategy=streaming_diloco", "stream.fragments=2", "stream.tau=3", "steps=16")
    with pytest.raises(PayloadError, match="torn"):
        at_site(config, tmp_path, take_steps)


@pytest.mark.timeout(60)
def test_a_device_that_fails_before_anything_is_coded_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(exchange, "queued_until_now", lambda _: taken)
    config = asked("strategy=streaming_diloco", "stream.fragments=2", "stream.tau=3", "steps=16")
    with pytest.raises(FedwanError, match="RuntimeError: an illegal memory access"):
        at_site(config, tmp_path, take_steps)


@pytest.mark.parametrize("fails", [False, True])
def test_a_contribution_travels_while_its_checkpoint_is_written_and_ends_after_it(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, begun = list[str](), threading.Event()
    send, write = CoordinatorStub.upload, checkpoint.write_tensors

    def sent(self: CoordinatorStub, payload: Any, header: wire.UploadHeader) -> wire.Receipt:
        if header.kind == wire.UploadHeader.INITIAL:
            return send(self, payload, header)
        begun.set()
        receipt = send(self, payload, header)
        told.append("taken")
        return receipt

    def written(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name.startswith("site-"):
            assert begun.wait(30), "it is on its way meanwhile"
            if fails:
                raise OSError(errno.EIO, "Input/output error")
            begun.clear()
            told.append("written")
        write(path, *args, **kwargs)

    monkeypatch.setattr(CoordinatorStub, "upload", sent)
    monkeypatch.setattr(checkpoint, "write_tensors", written)
    config = asked("strategy=diloco", "steps=16")
    if fails:
        with pytest.raises(OSError, match="Input/output error"):
            at_site(config, tmp_path, take_steps)
        assert not told
    else:
        at_site(config, tmp_path, take_steps)
        assert told == ["written", "taken"] * 4


def test_fragments_that_one_overflow_has_spoilt_together_are_one_try(tmp_path: Path) -> None:
    words = ["strategy=streaming_diloco", "stream.fragments=4", "stream.tau=3", "steps=16"]
    ran = at_site(asked(*words), tmp_path, lambda: overflow_once(8))
    assert isinstance(ran, Ran) and ran.sha256 == {ran.ended.sha256}
    refused = [row for row in ran.records if row.get("event") == "rejected"]
    assert len(refused) >= 3, refused


def test_what_is_a_sites_own_is_put_back_after_an_overflow(tmp_path: Path) -> None:
    nets: list[nn.Module] = []
    words = ["strategy=diloco", "steps=16", 'network.net.exclude=["6.*"]']
    ran = at_site(asked(*words), tmp_path, lambda: overflow_once(10, nets.append))
    (refused,) = [row for row in ran.records if row.get("event") == "rejected"]
    assert "not finite" in refused["text"]
    assert all(bool(value.isfinite().all()) for value in nets[0].parameters())


def exchange_of(place: dict[str, Any], **more: Any) -> Any:
    """An exchange that was lost at version 4 or so, at a place of which this is known."""
    exchange = object.__new__(Exchange)
    usual = {"is_behind": False, "keeps_pace": True, "run_step": 8, "reached": lambda versions: 8}
    vars(exchange).update(
        _place=SimpleNamespace(**usual, go_back=lambda held, versions: held, **place),
        _strategy=SimpleNamespace(policy=SimpleNamespace(leaves_behind=False)),
        _in_vain=threading.Event(),
        _group=Group(),
        _tau=0,
        _join_anew=lambda is_bound: place["versions"],
        **more,
    )
    return exchange


LOST = NotJoined("site 's1' has not joined; join first")


@pytest.mark.parametrize(
    ("present", "is_made_anew", "is_sent"), [(3, False, True), (4, False, False), (3, True, False)]
)
def test_what_is_sent_again_is_of_the_weights_that_the_site_has_still(
    present: int, is_made_anew: bool, is_sent: bool
) -> None:
    """At a pace of its own it follows others' updates while its contribution is on its way."""
    owed = Residuals(1)
    (fragment,) = whole({"net/w": spec((2,))})
    flight = Flight(fragment, fragment, 3, 8, Work(1, 1), wire.UploadHeader(), "", {})
    flight.is_taken, flight.paid = True, {"net/w": torch.ones(2)}
    begun, sent = list[Any](), list[Any]()
    place = {
        "versions": [present],
        "holds_present": lambda: not is_made_anew,
        "start_over": begun.append,
    }
    exchange = exchange_of(place, _flights={0: flight}, _residuals=owed)
    exchange._travel = lambda flights, step: sent.extend(flights)
    exchange.rejoin(LOST, 8)
    assert sent == [flight] * is_sent and len(begun) == (not is_sent)
    assert (owed.of(fragment) != {}) == is_sent, "what was owed before it left is owed again"


def test_what_was_merged_and_its_receipt_is_late_is_paid_at_a_pace_of_its_own_too() -> None:
    owed, told, dropped = Residuals(1), list[wire.Receipt](), list[int]()
    (fragment,) = whole({"net/w": spec((2,))})
    flight = Flight(fragment, fragment, 3, 8, Work(1, 1), wire.UploadHeader(), "", {})
    flight.has_left, flight.owed = True, {"net/w": torch.ones(2)}
    owed.settle(fragment, 3, {"net/w": torch.zeros(2)})
    checkpoints = SimpleNamespace(drop=dropped.append)
    place = {"versions": [3], "checkpoints": checkpoints, "note_others": told.append}
    exchange = exchange_of(place, _flights={0: flight}, _residuals=owed)
    with pytest.raises(CannotMerge) as error:
        exchange._settle(flight, wire.Receipt(status=wire.Receipt.STALE))
    assert dropped == [4], "nobody sends it again"
    version, debt = exchange._give_up(error.value).unpaid[0]
    assert (version, debt["net/w"].any()) == (3, False), "owed on, if it was not merged"
    assert owed.of(fragment)["net/w"].all()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("into", "is_paid"), [(6, False), (5, True)])
def test_what_is_too_old_to_be_merged_is_not_waited_for_and_owed_on(
    into: int, is_paid: bool, is_late: bool
) -> None:
    """At a pace of its own; behind a barrier what came too late is told by its receipt."""
    owed = Residuals(1)
    (fragment,) = whole({"net/w": spec((2,))})
    flight = Flight(fragment, fragment, 3, 8, Work(1, 1), wire.UploadHeader(), "", {})
    flight.paid = {"net/w": torch.zeros(2)}
    owed.settle(fragment, 4, {"net/w": torch.ones(2)})
    place = {
        "versions": [4],
        "checkpoints": SimpleNamespace(),
        "note": lambda header: None,
        "note_sizes": lambda *_: None,
        "is_mirrored": True,
    }
    exchange = exchange_of(place, _flights={0: flight}, _residuals=owed)
    exchange._strategy.policy.max_staleness = 2
    exchange._place.keeps_pace, flight.is_late = not is_late, is_late
    exchange._rejections = 2
    exchange._advance = exchange._listen = lambda *_: None
    header = wire.DownloadHeader(version=6, merged_from=3 if is_paid else 1, merged_into=into)
    exchange._stub = SimpleNamespace(receive=lambda *_: Delivery(header, None))
    exchange._land(flight, False)
    assert owed.of(fragment)["net/w"].all() == is_paid
    assert not exchange._rejections, "those that end a site are in a row"


def test_a_coordinator_that_is_lost_while_a_site_starts_over_is_joined_again() -> None:
    told = []

    def start_over(anew: Anew) -> None:
        told.append((anew.is_refused, anew.held))
        if len(told) < 3:
            raise LOST

    def refused() -> None:
        raise Refused("not finite")

    checkpoints = SimpleNamespace(drop=lambda version: None)
    place = {"versions": [4], "start_over": start_over, "checkpoints": checkpoints}
    exchange = exchange_of(place, _flights={}, _rejections=0)
    assert exchange._try(refused, 9) == 8
    assert told == [(True, [4]), (True, [None]), (True, [None])]
    assert exchange._rejections == 1, "one refusal, whatever became of the coordinator"


def test_what_half_precision_rounds_away_as_an_update_lands_is_no_step_of_the_site() -> None:
    net = nn.Linear(8, 8).bfloat16()
    replica = Replica({"net": net}, {"net": torch.optim.SGD(net.parameters(), lr=0.1)})
    (fragment,) = whole(replica.layout)
    for value in replica.base.values():
        value.add_(1e-4)
    land(replica)
    for taken in (replica.delta(fragment), replica.take_delta(fragment, {})):
        assert not any(bool(delta.any()) for delta in taken.values())


def test_a_forward_pass_changes_no_global_weights_where_the_sites_steps_make_them() -> None:
    """A site may be asked for its initial weights in the middle of its first step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    replica = Replica({"net": net}, {"net": optimizer}, is_mirrored=True)
    net(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
    assert net[1].num_batches_tracked == 1
    assert replica.global_sha256() == hash_state(dict(replica.whole_base()))
    assert replica.global_sha256() == replica.initial_sha256, "no running statistic of its own"

    (fragment,) = whole(replica.layout)
    merged = clone(replica.gradients(fragment))
    merged["net/1.running_mean"] += 1.0  # the mean with that of other sites
    sent, _ = fp32().encode(merged, {}, fragment.layout)
    replica.apply_gradients(sent, fragment, fp32())
    assert torch.equal(net[1].running_mean, merged["net/1.running_mean"])
    optimizer.step()
    assert replica.global_sha256() == hash_state(replica.live) != replica.initial_sha256


def test_gradients_are_compared_between_processes_at_first_and_then_now_and_then() -> None:
    """It takes a hash of all of them."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    replica = Replica({"net": net}, {"net": optimizer}, is_mirrored=True)
    (fragment,), replica.group = whole(replica.layout), Mock(size=2)
    compared = list[int]()
    for number in range(120):
        replica.group.agree.reset_mock()
        replica.gradients(fragment)
        compared += [number] * replica.group.agree.call_count
    assert compared == [0, 1, 2, 50, 100]


def test_who_takes_whole_weights_forgets_moments_as_with_every_update() -> None:
    for state in ("keep", "reset"):
        net = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters())
        replica = Replica({"net": net}, {"net": optimizer}, {"net": InnerConfig(state=state)})
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        replica.adopt()
        assert len(optimizer.state) == (2 if state == "keep" else 0)


def test_other_weights_are_shown_for_a_while_and_leave_no_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    replica = Replica({"net": net}, {"net": torch.optim.SGD(net.parameters(), lr=0.1)})
    before, shown = clone(replica.live), {name: v + 1 for name, v in replica.base.items()}
    with pytest.raises(ZeroDivisionError), replica.showing(shown):
        assert same_bits(replica.live, shown) and not net[1].training
        raise ZeroDivisionError
    assert same_bits(replica.live, before) and net[1].training


def stepped(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, state: str = "keep"
) -> tuple[Any, ...]:
    """A network after a step, its optimiser, and its replica with other global weights."""
    net = network().to(dtype)
    optimizer = make(net.parameters())
    replica = Replica({"net": net}, {"net": optimizer}, {"net": InnerConfig(state=state)})
    net(torch.ones(BATCH, WIDTH, dtype=dtype)).square().mean().backward()
    optimizer.step()
    for value in replica.base.values():
        value.mul_(0.7).add_(1e-3)
    return net, optimizer, replica


def land(replica: Replica, alpha: float = 0.0) -> None:
    (fragment,) = whole(replica.layout)
    replica.land(fragment, alpha)


def land_in_part(replica: Replica) -> None:
    land(replica, 0.5)


def land_less_what_is_owed(replica: Replica) -> None:
    land(replica)
    replica.owe({name: 0.1 * value for name, value in replica.base.items()})


@pytest.mark.parametrize("state", ["keep", "ema"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lands", [land, land_in_part, land_less_what_is_owed, Replica.adopt])
def test_masters_that_an_optimiser_keeps_follow_what_lands_and_moments_stay(
    lands: Callable[[Replica], object], dtype: torch.dtype, state: str
) -> None:
    net, optimizer, replica = stepped(Masters, dtype, state)
    before = [param.detach().clone() for param in net.parameters()]
    for kept in optimizer.state.values():
        kept["sum"].fill_(2e-3)
    lands(replica)
    landed = [param.detach().clone() for param in net.parameters()]
    assert not any(map(torch.equal, before, landed))
    assert all(bool((kept["sum"] == 2e-3).all()) for kept in optimizer.state.values())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, landed, net.parameters()))


def test_weights_that_an_optimiser_s_state_shares_land_once() -> None:
    """As those of SAM, and masters of weights that are in fp32 already."""
    net, optimizer, replica = stepped(torch.optim.SGD, torch.float32)
    for param in net.parameters():
        optimizer.state[param]["master"] = param.detach()
    land(replica)
    assert all(torch.equal(replica.base[name], live) for name, live in replica.live.items())


def test_networks_are_evaluated_without_what_their_eval_does_to_weights() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Merging:
            raise AssertionError(mode)

    net = nn.Sequential(Merging(2, 2), nn.Dropout())
    net[1].training = False
    with evaluating([net]):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == [True, True, False]


def test_averages_over_every_step_of_half_weights_are_in_fp32_and_are_not_shown() -> None:
    net, _, replica = stepped(torch.optim.SGD, torch.bfloat16, "ema")
    averages = {name: value.clone() for name, value in replica.live.items() if is_moment(name)}
    assert {value.dtype for value in averages.values()} == {torch.float32}
    with replica.showing({name: torch.zeros_like(v) for name, v in replica.live.items()}):
        assert all(not param.any() for param in net.parameters())
        assert all(torch.equal(value, replica.live[name]) for name, value in averages.items())
    replica.average()  # of a half-life of one step
    for name, param in net.named_parameters():
        half = (averages[ema_name(f"net/{name}")] + param.float()) / 2
        torch.testing.assert_close(replica.live[ema_name(f"net/{name}")], half)


def test_a_master_keeps_what_its_weights_round_away() -> None:
    net, optimizer, replica = stepped(Masters, torch.bfloat16)
    held = {p: s["master"].clone() for p, s in optimizer.state.items()}
    for name, value in replica.base.items():  # lands where the weights are
        value.copy_(replica.live[name])
    land(replica)
    assert all(torch.equal(held[p], s["master"]) for p, s in optimizer.state.items())


class Leading(torch.optim.SGD):
    """Steps lead from a sequence that weights are near to, as schedule-free ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["z"] = param.detach() * 1.01


@pytest.mark.parametrize(
    ("make", "state", "is_told"),
    [(Leading, "keep", True), (Leading, "reset", False), (torch.optim.AdamW, "keep", False)],
)
def test_weights_that_an_optimiser_goes_on_from_beside_the_live_ones_are_told_once(
    make: Any, state: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, replica = stepped(make, torch.float32, state)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            land(replica)
    assert len(caplog.messages) == is_told
    assert all("keeps 'z', which is close" in m for m in caplog.messages)
    assert all("set inner.net.state=reset" in m for m in caplog.messages)
