"""What `fedwan doctor link` sends and fetches: bounded, of no run, beside contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedwan.errors import IdentityError, PayloadError
from fedwan.link import pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from fedwan.link.measured_payload import MAX_BYTES, Noise
from fedwan.link.server import DataPlane
from tests.planes import (
    Bench,
    dialling,
    header_of,
    in_thread,
    random_payload,
    read_all,
    serving,
)

NUM_BYTES = 5_000_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, num_values=1_000_000)
    bench.set_model()
    return bench


@pytest.fixture
def plane(bench: Bench, identities: Path) -> Iterator[DataPlane]:
    with serving(bench.hub, identities) as plane:
        yield plane


def upload(link: GrpcLink) -> wire.Receipt:
    header = wire.UploadHeader(kind=wire.UploadHeader.MEASUREMENT)
    return link.upload(header, Noise(NUM_BYTES))


def download(link: GrpcLink, num_bytes: int = NUM_BYTES) -> bytes:
    request = wire.DownloadRequest(kind=wire.DownloadRequest.MEASUREMENT, version=num_bytes)
    return read_all(link.download(request).payload)


def test_noise_goes_both_ways_without_a_session_and_leaves_nothing_at_the_run(
    bench: Bench, plane: DataPlane, identities: Path
) -> None:
    with dialling(plane.port, identities / "s1", channels=3) as link:
        assert upload(link).status == wire.Receipt.ACCEPTED
        assert len(download(link)) == NUM_BYTES
        assert NUM_BYTES < link.bytes_up < 1.01 * NUM_BYTES
        assert NUM_BYTES < link.bytes_down < 1.01 * NUM_BYTES
    assert not bench.events and not bench.registry.sites["s1"].session


@pytest.mark.parametrize("num_bytes", [0, MAX_BYTES + 1, 2**63])
def test_an_absurd_size_is_refused(plane: DataPlane, identities: Path, num_bytes: int) -> None:
    with dialling(plane.port, identities / "s1") as link:
        with pytest.raises(PayloadError, match="ask for 1 to"):
            download(link, num_bytes)


def test_a_revoked_site_may_not_measure(tmp_path: Path, bench: Bench) -> None:
    folder = tmp_path / "pki"
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    calls: list[Callable[[GrpcLink], object]] = [upload, download]
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        assert download(link)
        pki.revoke(folder, "s1")
        for call in calls:
            with pytest.raises(IdentityError, match="s1 is revoked"):
                call(link)


def test_a_contribution_arrives_whole_beside_a_measurement(
    bench: Bench, plane: DataPlane, identities: Path
) -> None:
    payload = random_payload(1, bench.layout)
    with (
        dialling(plane.port, identities / "s1") as other,
        dialling(plane.port, identities / "s1") as link,
    ):
        measuring = in_thread(lambda: (upload(other), download(other)))
        link.join(bench.hello("s1"))
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        measuring()
    contribution = bench.contribution("s1")
    assert contribution is not None and read_all(contribution.payload) == read_all(payload)
