"""A site's checkpoints: which are kept, and what they bring back."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.errors import CheckpointError, SessionLost, UserError
from fedwan.fragments import whole
from fedwan.rng import NamedGenerators
from fedwan.site import checkpoint
from fedwan.site.checkpoint import Ledger, Residuals, SiteCheckpoints
from fedwan.site.meter import Work
from fedwan.site.replica import Replica
from fedwan.state import read_tensors, write_tensors
from tests.planes import in_thread
from tests.support import BATCH, NET, TinyWorkload, keep_local, same_bits, spec, tiny_shard


class Site:
    def __init__(self, folder: Path, *, is_beside: bool = False, name: str = "s1") -> None:
        self.workload = TinyWorkload(NET)
        self.replica = Replica(self.workload.networks, self.workload.optimizers)
        self.rng = NamedGenerators(0, "s1")
        self.stream = tiny_shard(1).loader(BATCH, self.rng["data"])
        state = {"data": self.stream, "rng": self.rng}
        kept = (name, self.replica, {}, state)
        self.checkpoints = SiteCheckpoints(folder, *kept, is_beside=is_beside)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.workload.step(next(self.stream), self.rng, keep_local)

    def save(self, version: int, durable: int = 0) -> None:
        owed = {"net/owed": torch.tensor([1.5])}
        residual = {"net/owed": torch.tensor([0.5])}
        self.checkpoints.durable_version = durable
        self.checkpoints.save(version, Ledger(residual, owed, Work(3, 12), (7,)))


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_site_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    is_beside: bool, tmp_path: Path
) -> None:
    first = Site(tmp_path, is_beside=is_beside)
    first.train(1)
    first.save(1)
    first.train(2)
    first.save(2)  # beside the steps into the memory of the first
    torch_draw = torch.rand(3)
    first.train(4)
    first.checkpoints.settle()

    second = Site(tmp_path)
    restored = second.checkpoints.load(2, with_model=True, is_start=False)
    assert torch.equal(torch.rand(3), torch_draw)
    second.train(4)
    assert same_bits(second.replica.live, first.replica.live)
    assert same_bits(second.replica.inner.state(), first.replica.inner.state())
    assert restored.residual["net/owed"].tolist() == [0.5]
    assert restored.owed["net/owed"].tolist() == [1.5]
    assert (restored.work, restored.versions) == (Work(3, 12), (7,))

    third = Site(tmp_path)
    before = {name: value.clone() for name, value in third.replica.live.items()}
    third.checkpoints.load(2, with_model=False, is_start=False)
    assert same_bits(third.replica.live, before) and third.replica.inner.state()


def test_what_a_script_keeps_of_the_networks_does_not_take_the_place_of_the_coordinator_s(
    tmp_path: Path,
) -> None:
    """As of an average that holds the network that it follows."""

    def checkpoints(site: Site) -> SiteCheckpoints:
        (network,) = site.workload.networks.values()
        return SiteCheckpoints(tmp_path, "s1", site.replica, {}, {"average": network})

    first = Site(tmp_path)
    checkpoints(first).save(1, Ledger({}, {}, Work(0, 0), (1,)))
    second = Site(tmp_path)
    second.train(1)
    before = {name: value.clone() for name, value in second.replica.live.items()}
    checkpoints(second).load(1, with_model=False, is_start=False)
    assert same_bits(second.replica.live, before)
    checkpoints(second).load(1, with_model=True, is_start=False)
    assert same_bits(second.replica.live, first.replica.live)


def test_all_are_kept_from_the_one_that_the_coordinator_would_resume_from(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.train(1)
    for version, durable in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4)):
        site.save(version, durable)
    assert site.checkpoints.versions() == [4, 5]
    site.save(7, 4)
    site.save(5, 4)  # the coordinator resumed at 4: what came later was taken back
    assert site.checkpoints.versions() == [4, 5]
    kept = (tmp_path / "site-00000005.safetensors").read_bytes()
    site.train(1)
    site.checkpoints.begin_anew()
    site.save(5, 4)  # the same version once more, of other steps
    assert (tmp_path / "site-00000005.safetensors").read_bytes() != kept


@pytest.mark.parametrize("is_beside", [False, True])
def test_who_has_been_replaced_writes_and_deletes_nothing_in_the_other_s_folder(
    is_beside: bool, tmp_path: Path
) -> None:
    first = Site(tmp_path, is_beside=is_beside)
    first.checkpoints.claim("first")
    first.save(1)
    first.checkpoints.settle()
    second = Site(tmp_path)
    second.checkpoints.claim("second")
    (fragment,) = whole(second.replica.layout)
    second.checkpoints.keep_global(fragment, 3)
    second.checkpoints.await_global(fragment)
    second.save(2)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    first.checkpoints.keep_global(fragment, 1)
    with pytest.raises(SessionLost, match="another process of this site goes on in"):
        first.checkpoints.await_global(fragment)
    for act in (lambda: first.save(2), lambda: first.save(3), lambda: first.checkpoints.drop(2)):
        with pytest.raises(SessionLost, match="another process of this site goes on in"):
            act()
            first.checkpoints.settle()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
    shutil.rmtree(tmp_path)
    second.save(3)
    assert second.checkpoints.versions() == [3]


def test_what_a_site_goes_on_with_after_a_refusal_is_kept_until_its_version_is_made_anew(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.train(1)
    site.save(1)
    site.train(1)
    ledger = Ledger({}, {}, Work(0, 0), (1,))
    site.checkpoints.save_start(1, ledger)
    draws = torch.rand(3)
    site.save(2)
    assert (site.checkpoints.versions(), site.checkpoints.starts()) == ([1, 2], {1})

    second = Site(tmp_path)
    assert second.checkpoints.load(1, with_model=True, is_start=True) == ledger
    assert torch.equal(torch.rand(3), draws)
    assert same_bits(second.replica.live, site.replica.live)
    second.save(1)  # the coordinator resumed before it
    assert (second.checkpoints.versions(), second.checkpoints.starts()) == ([1], set())

    second.checkpoints.save_start(1, ledger)
    (tmp_path / "two").mkdir()  # of a site that had two processes then
    tensors, meta = read_tensors(tmp_path / "start-00000001.safetensors")
    write_tensors(tmp_path / "two" / "start-00000001.safetensors", tensors, meta | {"processes": 2})
    with pytest.raises(UserError, match="start-00000001.* is of 2 processes, this site has 1"):
        Site(tmp_path / "two").checkpoints.starts()
    with pytest.raises(UserError, match="start-00000001.* is of site 's1', and this is 's2'; put"):
        Site(tmp_path, name="s2").checkpoints.starts()
    path = tmp_path / "start-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    third = Site(tmp_path)  # version 1 alone would be other data and optimisers
    assert not third.checkpoints.versions() and not third.checkpoints.starts()


def test_what_was_owed_at_another_version_is_partly_paid_and_forgotten() -> None:
    residuals, fragments = Residuals(1), whole({"net/w": spec((1,))})
    ledger = Ledger({}, {"net/w": torch.ones(1)}, Work(3, 12), (7,))
    for version, found, is_owed in ((7, ledger, True), (7, None, True), (8, ledger, False)):
        residuals.restore(fragments, [version], found)
        assert (residuals.of(fragments[0]) == ledger.owed) is is_owed
        assert residuals.ledger(Work(0, 0)).versions == (version,)


def test_what_was_dropped_is_written_when_its_version_is_made_anew(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for kept in ([1], [1, 2], [1, 2]):
        site.save(kept[-1])
        assert site.checkpoints.versions() == kept
        if kept[-1] == 2:
            site.checkpoints.drop(2)
            assert site.checkpoints.versions() == [1]


def test_a_file_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.train(1)
    (tmp_path / "site-00000009.safetensors.tmp").write_bytes(b"half")
    (tmp_path / ".site-00000008.safetensors.1.tmp").write_bytes(b"half")
    assert site.checkpoints.versions() == []
    site.save(1)
    path = tmp_path / "site-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="site-00000001"):
        site.checkpoints.load(1, with_model=True, is_start=False)


def test_global_weights_of_the_last_two_versions_are_kept_and_damaged_ones_are_none(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    base, (fragment,) = site.replica.base, whole(site.replica.layout)
    for version in (1, 2, 3):
        for value in base.values():
            value.fill_(version)
        site.checkpoints.keep_global(fragment, version)
        site.save(version + 1)
    loaded = [site.checkpoints.load_global(fragment, version) for version in (3, 2, 1)]
    assert loaded == [True, True, False]
    assert all(bool((value == 2).all()) for value in base.values())
    path = tmp_path / "global-0-00000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert not site.checkpoints.load_global(fragment, 3)
    assert all(bool((value == 2).all()) for value in base.values())


def test_what_stood_when_it_was_taken_is_written_and_the_next_save_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits = threading.Semaphore(0)

    def write_when_allowed(*args: Any, **kwargs: Any) -> None:
        assert permits.acquire(timeout=20)
        write_tensors(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", write_when_allowed)
    site = Site(tmp_path, is_beside=True)
    taken = {name: value.clone() for name, value in site.replica.live.items()}
    site.save(1)
    site.train(1)
    saving = in_thread(lambda: site.save(2))
    with pytest.raises(AssertionError, match="still running"):
        saving(0.1)
    permits.release(2)
    saving(10.0)
    site.checkpoints.close()
    assert site.checkpoints.versions() == [1, 2]
    site.checkpoints.load(1, with_model=True, is_start=False)
    assert same_bits(site.replica.live, taken)


def test_one_that_could_not_be_written_is_told_by_the_next_save_the_settling_and_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "s1"
    folder.write_text("no folder")
    site = Site(folder, is_beside=True)
    for ask in (lambda: site.save(2), site.checkpoints.settle):
        site.save(1)
        with pytest.raises(OSError, match="s1"):
            ask()
    site.checkpoints.settle()  # told once
    site.save(2)
    site.checkpoints.close()  # raises nothing: another error may be under way
    assert "the last checkpoint could not be written" in caplog.text
