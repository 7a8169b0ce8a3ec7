"""Payloads on their way in: chunks in any order, sized, checked, idempotent."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fedwan.codecs import Payload, fp32
from fedwan.coordinator.intake import Intake, Upload, inspect
from fedwan.coordinator.merge import Merger
from fedwan.errors import PayloadError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import MIN_CHUNK_BYTES, SPOOL_BYTES, Buffer, UploadReception
from fedwan.protocol.round import Key
from fedwan.state import Layout, Role, State
from tests.support import StrictSource, encoded, read_all, spec

CHUNK = MIN_CHUNK_BYTES
SMALL = {"g/w": spec((3,))}
DATA = read_all(encoded({"g/w": torch.tensor([3.0, 0.0, 4.0])}, SMALL))

# Chunks ------------------------------------------------------------------------------------------


def reception_of(folder: Path, num_bytes: int, chunk_bytes: int = CHUNK) -> UploadReception:
    header = wire.UploadHeader(num_bytes=num_bytes, chunk_bytes=chunk_bytes)
    return UploadReception(header, folder)


def test_a_chunk_that_came_again_changes_nothing(tmp_path: Path) -> None:
    reception = reception_of(tmp_path, 2 * CHUNK)
    for offset in (0, CHUNK):
        reception.write(offset, b"a" * CHUNK)
    payload = reception.claim()
    reception.write(0, b"b" * CHUNK)  # after the bytes were checked
    assert payload is not None and bytes(payload.read(0, CHUNK)) == b"a" * CHUNK


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 0), (0, CHUNK - 1), (0, CHUNK + 1), (1, CHUNK), (2 * CHUNK, CHUNK), (9 * CHUNK, 1)],
)
def test_a_chunk_that_does_not_fit_is_refused(offset: int, size: int, tmp_path: Path) -> None:
    reception = reception_of(tmp_path, 2 * CHUNK + 1)
    with pytest.raises(PayloadError, match=f"chunk of {size} bytes at {offset}"):
        reception.write(offset, bytes(size))
    assert reception.missing() == [0, 1, 2]


def test_a_failed_write_leaves_its_chunk_missing(tmp_path: Path) -> None:
    reception = reception_of(tmp_path, 2 * CHUNK)
    reception.write(0, bytes(CHUNK))
    full = OSError("No space left on device")
    with patch.object(Buffer, "write", side_effect=full), pytest.raises(OSError, match="No space"):
        reception.write(CHUNK, bytes(CHUNK))
    assert reception.missing() == [1]
    reception.write(CHUNK, bytes(CHUNK))
    assert reception.claim() is not None


@pytest.mark.parametrize(
    ("num_bytes", "chunk"), [(1, CHUNK), (200 * CHUNK + 7, CHUNK), (SPOOL_BYTES + 5, 1 << 20)]
)
def test_chunks_in_any_order_from_several_stripes_make_the_payload_once(
    num_bytes: int, chunk: int, tmp_path: Path
) -> None:
    data = random.Random(2).randbytes(num_bytes)
    reception = reception_of(tmp_path, len(data), chunk)
    claims: list[object] = []

    def stripe(seed: int) -> None:
        offsets = list(range(0, len(data), chunk))
        random.Random(seed).shuffle(offsets)
        for at in offsets:
            reception.write(at, data[at : at + chunk])
            if (payload := reception.claim()) is not None:
                claims.append(bytes(payload.read(0, len(data))) == data)

    with ThreadPoolExecutor(4) as stripes:
        list(stripes.map(stripe, range(4)))
    assert claims == [True] and list(tmp_path.iterdir()) == []
    reception.close()


# Uploads -----------------------------------------------------------------------------------------


def make(folder: Path) -> Intake:
    return Intake(SMALL, whole(SMALL), fp32(), folder)


def upload(version: int = 0) -> Upload:
    return Upload(wire.UploadHeader.CONTRIBUTION, Key(0, version, "s1"))


def header(
    num_bytes: int = len(DATA), checksum: int = 1, chunk_bytes: int = 1 << 20
) -> wire.UploadHeader:
    return wire.UploadHeader(num_bytes=num_bytes, checksum=checksum, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("num_bytes", [0, len(DATA) - 1, len(DATA) + 1, 1 << 50])
def test_another_size_than_the_codec_makes_is_refused_before_anything_is_allocated(
    num_bytes: int, tmp_path: Path
) -> None:
    intake = make(tmp_path)
    with pytest.raises(PayloadError, match=f"{num_bytes} bytes announced .* fp32 .*{len(DATA)}"):
        intake.open(upload(), header(num_bytes))
    assert intake.find(upload()) is None


def test_the_same_bytes_go_on_where_they_stopped_and_others_begin_anew(tmp_path: Path) -> None:
    intake = make(tmp_path)
    first = intake.open(upload(), header())
    assert intake.open(upload(), header()) is first
    for again in (header(checksum=2), header(checksum=2, chunk_bytes=4096)):
        second = intake.open(upload(), again)
        assert second is not first and intake.find(upload()) is second
        first = second


def test_past_versions_of_a_fragment_are_forgotten_and_later_ones_kept(tmp_path: Path) -> None:
    intake = make(tmp_path)
    for version in (2, 4):
        intake.open(upload(version), header())
    intake.forget(1, 9)
    intake.forget(0, 3)
    assert intake.find(upload(2)) is None and intake.find(upload(4)) is not None


# The check ---------------------------------------------------------------------------------------

LAYOUT: Layout = {
    "d/weight": spec((3,)),
    "g/bias": spec(()),
    "g/bn.num_batches_tracked": spec((), Role.COUNTER, torch.int64),
    "g/bn.running_mean": spec((2,), Role.MEAN),
    "g/bn.running_var": spec((2,), Role.VARIANCE),
    "g/empty": spec((0,)),
    "g/weight": spec((2, 2)),
}


def good() -> State:
    return {
        "d/weight": torch.tensor([1.0, 2.0, 2.0]),
        "g/bias": torch.tensor(3.0),
        "g/bn.num_batches_tracked": torch.tensor(4),
        "g/bn.running_mean": torch.tensor([100.0, -100.0]),
        "g/bn.running_var": torch.tensor([0.0, 1.0]),
        "g/empty": torch.zeros(0),
        "g/weight": torch.tensor([[2.0, 0.0], [0.0, 6.0]]),
    }


def test_buffers_and_averages_are_measured_by_kind_and_moments_are_not() -> None:
    moments = {"g/weight|exp_avg": spec((2, 2), Role.MEAN), "g/weight|step": spec((), Role.COUNTER)}
    layout = dict(sorted((LAYOUT | moments | {"g/weight|ema": spec((2, 2))}).items()))
    state = good() | {"g/weight|exp_avg": torch.ones(2, 2), "g/weight|step": torch.tensor(9.0)}
    state["g/weight|ema"] = torch.full((2, 2), 3.0)
    measures = inspect(encoded(state, layout), layout, fp32())
    assert measures.buffers == pytest.approx(
        {
            "g's largest counter": 4.0,
            "g's norm of averages' deltas": 6.0,
            "g's norm of running means": 20000**0.5,
            "g's norm of running variances": 1.0,
        }
    )
    assert measures.norms == pytest.approx({"d": 3.0, "g": 7.0})
    assert measures.figures() == measures.buffers | {"d's norm": 3.0, "g's norm": 7.0}


def test_a_damaged_payload_is_refused() -> None:
    data = bytearray(read_all(encoded(good(), LAYOUT)))
    data[-20] ^= 1
    with pytest.raises(PayloadError, match="checksum"):
        inspect(StrictSource(bytes(data)), LAYOUT, fp32())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("d/weight", math.nan, "not finite"),
        ("g/bias", math.inf, "not finite"),
        ("g/bn.running_mean", -math.inf, "not finite"),
        ("g/bn.running_var", math.nan, "not finite"),
        ("g/weight", 1e30, "too large"),
        ("g/bn.running_var", -1e-9, "_var' is below zero"),
    ],
)
def test_values_that_no_honest_site_sends_are_refused_by_their_tensor_s_name(
    name: str, value: float, says: str
) -> None:
    state = good()
    state[name].view(-1)[-1] = value
    with pytest.raises(PayloadError) as raised:
        inspect(encoded(state, LAYOUT), LAYOUT, fp32())
    text = str(raised.value)
    assert repr(name) in text and says in text and "\n" not in text
    if says == "not finite":
        assert "clip" in text
        assert ("such as a mask, with persistent=False" in text) is ("bn" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_as_large_as_are_taken_have_a_finite_mean_and_variance(
    dtype: torch.dtype,
) -> None:
    layout = {
        "g/bn.running_mean": spec((2,), Role.MEAN, dtype),
        "g/bn.running_var": spec((2,), Role.VARIANCE, dtype),
    }

    def payload(mean: float, var: float) -> Payload:
        state = {"g/bn.running_mean": mean, "g/bn.running_var": var}
        values = {n: torch.tensor([v, 0.0], dtype=dtype) for n, v in state.items()}
        return fp32().encode(values, {}, layout)[0]

    merger = Merger(layout)
    for mean in (6e18, -6e18):
        inspect(payload(mean, 6e18), layout, fp32())
        merger.add(fp32().read_each(payload(mean, 6e18), layout), 1.0)
    assert all(bool(value.isfinite().all()) for value in merger.take().values())
    for mean, var in ((1e19, 0.0), (-3e38, 0.0), (0.0, 1e19)):
        with pytest.raises(PayloadError, match="holds values that are not finite, or too large"):
            inspect(payload(mean, var), layout, fp32())
