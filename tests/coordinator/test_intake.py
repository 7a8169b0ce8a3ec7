"""Contributions on their way in: sized, checked, idempotent."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedwan.codecs import fp32
from fedwan.coordinator import intake as intake_module
from fedwan.coordinator.intake import MAX_CHECKS, Contribution, Intake, Key
from fedwan.coordinator.reception import ChunkedReception
from fedwan.errors import PayloadError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer
from tests.support import encoded, read_all, spec

LAYOUT = {"g/w": spec((3,))}
DATA = read_all(encoded({"g/w": torch.tensor([3.0, 0.0, 4.0])}, LAYOUT))
CONTRIBUTION, INITIAL = wire.UploadHeader.CONTRIBUTION, wire.UploadHeader.INITIAL


def make(folder: Path) -> Intake:
    intake = Intake(fp32(), folder)
    intake.set_layout(LAYOUT, whole(LAYOUT))
    return intake


def key(version: int = 0, site: str = "s1", kind: wire.UploadHeader.Kind = CONTRIBUTION) -> Key:
    return Key(kind, 0, version, site)


def header(
    num_bytes: int = len(DATA), checksum: int = 1, chunk_bytes: int = 1 << 20, samples: int = 8
) -> wire.UploadHeader:
    return wire.UploadHeader(
        num_bytes=num_bytes,
        checksum=checksum,
        chunk_bytes=chunk_bytes,
        work=wire.Work(samples=samples),
    )


def source() -> Buffer:
    buffer = Buffer(len(DATA))
    buffer.write(0, DATA)
    return buffer


def accept(intake: Intake, at: Key) -> ChunkedReception:
    reception = intake.open(at, header())
    intake.accept(at, Contribution(at.site, source(), reception, wire.Work(), {}, 1))
    return reception


@pytest.mark.parametrize("num_bytes", [0, 1, len(DATA) - 1, len(DATA) + 1, 1 << 50])
def test_another_size_than_the_codec_makes_is_refused_before_anything_is_allocated(
    num_bytes: int, tmp_path: Path
) -> None:
    intake = make(tmp_path)
    with pytest.raises(PayloadError, match=f"{num_bytes} bytes announced .* fp32 .*{len(DATA)}"):
        intake.open(key(), header(num_bytes))
    assert intake.find(key()) is None


def test_a_fragment_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="fragment 7 does not exist, there are 1"):
        make(tmp_path).open(Key(CONTRIBUTION, 7, 0, "s1"), header())


def test_a_contribution_without_samples_is_refused(tmp_path: Path) -> None:
    intake = make(tmp_path)
    with pytest.raises(PayloadError, match="0 samples"):
        intake.open(key(), header(samples=0))
    intake.open(key(kind=INITIAL), header(samples=0))


def test_the_same_bytes_go_on_where_they_stopped(tmp_path: Path) -> None:
    intake = make(tmp_path)
    assert intake.open(key(), header()) is intake.open(key(), header())


@pytest.mark.parametrize("again", [header(checksum=2), header(chunk_bytes=4096)])
def test_other_bytes_or_chunks_begin_anew(again: wire.UploadHeader, tmp_path: Path) -> None:
    intake = make(tmp_path)
    first = intake.open(key(), header())
    second = intake.open(key(), again)
    assert second is not first and intake.find(key()) is second


def test_sites_and_versions_do_not_share_a_reception(tmp_path: Path) -> None:
    intake = make(tmp_path)
    keys = [key(), key(site="s2"), key(version=1), key(kind=INITIAL)]
    assert len({id(intake.open(k, header())) for k in keys}) == len(keys)


def test_an_accepted_contribution_is_ready_under_its_key_alone(tmp_path: Path) -> None:
    intake = make(tmp_path)
    accept(intake, key())
    ready = intake.ready(key())
    assert ready is not None and ready.site == "s1"
    assert intake.find(key()) is None
    assert intake.ready(key(version=1)) is None and intake.ready(key(site="s2")) is None


def test_a_rejected_contribution_leaves_nothing(tmp_path: Path) -> None:
    intake = make(tmp_path)
    first = intake.open(key(), header())
    intake.reject(key())
    intake.reject(key())
    assert intake.ready(key()) is None
    assert intake.open(key(), header()) is not first


def test_past_versions_are_forgotten_and_later_ones_kept(tmp_path: Path) -> None:
    intake = make(tmp_path)
    accept(intake, key(version=1))
    accept(intake, key(version=3))
    late = intake.open(key(version=2, site="s2"), header())
    early = intake.open(key(version=4, site="s2"), header())
    intake.forget(0, 2)
    assert intake.ready(key(version=1)) is None and intake.ready(key(version=3)) is not None
    assert intake.find(key(version=2, site="s2")) is None
    assert intake.find(key(version=4, site="s2")) is early is not late


def test_forgetting_one_fragment_leaves_the_others(tmp_path: Path) -> None:
    intake = make(tmp_path)
    accept(intake, key(version=1))
    intake.forget(1, 5)
    assert intake.ready(key(version=1)) is not None


def test_many_payloads_at_once_are_checked_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, active, seen = threading.Lock(), 0, []

    def check(*args: object) -> dict[str, float]:
        nonlocal active
        with lock:
            active += 1
            seen.append(active)
        time.sleep(0.01)
        with lock:
            active -= 1
        return {"net": 1.0}

    monkeypatch.setattr(intake_module, "inspect", check)
    intake = make(tmp_path)
    with ThreadPoolExecutor(32) as sites:
        norms = list(sites.map(lambda _: intake.inspect(key(), source()), range(32)))
    assert norms == [{"net": 1.0}] * 32
    assert len(seen) == 32 and max(seen) <= min(MAX_CHECKS, os.cpu_count() or 1)
