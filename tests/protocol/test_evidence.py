"""What sites sign of their contributions, over real connections."""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from fedwan.codecs import fp32
from fedwan.link import client, pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Chunk, ChunkHashes, Part
from fedwan.link.tls import Identity, has_signed
from fedwan.protocol.evidence import fields_of, statement, statement_of
from fedwan.protocol.round import Key
from fedwan.simulation import RUN_ID
from tests.planes import (
    Bench,
    Wires,
    dialling,
    header_of,
    in_thread,
    joined,
    payload_of,
    random_payload,
    read_all,
    serving,
    stub_of,
)
from tests.support import run_tiny, tiny_config

MASKED = {"codec": {"up": "masked4"}}


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("diloco", {}),
        ("diloco", {"round": {"quorum": 2}}),
        ("diloco", MASKED),
        ("streaming_diloco", {"h": 4, "stream": {"fragments": 2, "tau": 1}}),
        ("async_diloco", {}),
        ("sync", {"h": 1}),
        ("parameter_server", {"h": 1}),
    ],
)
def test_whatever_the_strategy_each_contribution_in_the_journal_is_signed_by_its_site(
    strategy: str, sections: dict[str, Any], tmp_path: Path, identities: Path
) -> None:
    config = tiny_config(strategy, sites=3, **sections)
    with Wires(identities) as wires:
        records = run_tiny(tmp_path, config, wrap=wires.wrap).result.records
    shown = {
        row["site"]: x509.load_pem_x509_certificate(row["certificate"].encode())
        for row in records
        if row.get("event") == "join"
    }
    rows = [row for row in records if row.get("event") == "contribution"]
    assert {row["site"] for row in rows} == {*shown} == {"s1", "s2", "s3"}
    for row in rows:
        signature = b64decode(row["signature"])
        assert has_signed(shown[row["site"]], signature, statement(RUN_ID, row))
        assert row["steps"] and row["samples"] and ("attempt" in row) == (sections == MASKED)
        for other in (row | {"samples": row["samples"] + 1}, row | {"payload": "0" * 64}):
            assert not has_signed(shown[row["site"]], signature, statement(RUN_ID, other))
    assert not [row for row in records if row.get("event") in ("rejected", "renewed")]


@pytest.mark.parametrize("channels", [1, 4])
def test_what_is_signed_is_the_payload_that_arrived_though_it_left_while_it_was_encoded(
    channels: int, tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, num_values=200_000)
    payload = random_payload(1, bench.layout)
    growing = fp32().grow(bench.layout)
    with joined(bench, identities, channels=channels) as link:
        sending = in_thread(lambda: link.upload(header_of(growing), growing))
        time.sleep(0.1)  # its header has left
        fp32().encode_into(growing, fp32().decode(payload, bench.layout), {}, bench.layout)
        growing.finish()
        assert sending().status == wire.Receipt.ACCEPTED
    arrived, data = bench.contribution("s1"), read_all(payload)
    hashes = ChunkHashes(-(-len(data) // (1 << 16)))
    for index in reversed(hashes.missing()):
        hashes.add(index, data[index << 16 : (index + 1) << 16])
    assert arrived is not None and arrived.payload_hash == hashes.payload()
    assert not hashes.missing()


@pytest.mark.slow
def test_a_stripe_that_ends_while_another_reads_the_last_chunk_signs_that_too(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    payload, signing = random_payload(1, bench.layout), threading.Event()
    sign, read, pauses = Identity.sign, payload.read, [0.3, 0.9]

    def sign_late(identity: Identity, said: bytes) -> bytes:
        signature = sign(identity, said)
        signing.set()
        time.sleep(pauses.pop(0) if pauses else 0.0)
        return signature

    def read_late(offset: int, size: int) -> Any:
        if offset + size == payload.num_bytes:
            signing.wait(0.5)
        return read(offset, size)

    monkeypatch.setattr(Identity, "sign", sign_late)
    monkeypatch.setattr(payload, "read", read_late)
    monkeypatch.setattr(client, "CHUNK_BYTES", 1 << 11)
    with joined(bench, identities, channels=2) as link:
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
    assert bench.hub.rejected == 0


def test_a_contribution_that_its_site_has_not_signed_is_refused_and_ends_nothing(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path)
    payload = payload_of(1.0, bench.layout)
    chunk = Chunk(0, data := read_all(payload))
    header = header_of(payload)
    header.session, header.chunk_bytes = "s1-first", 1 << 16
    hashes = ChunkHashes(1)
    hashes.add(0, data)
    other = wire.UploadHeader()
    other.CopyFrom(header)
    other.work.samples += 1
    mine, theirs = (Identity.load(identities / name) for name in ("s1", "s2"))
    good = statement_of(header, "s1", hashes.payload())
    bad = [
        theirs.sign(good),
        mine.sign(statement_of(other, "s1", hashes.payload())),
        mine.sign(statement_of(header, "s1", "0" * 64)),
        mine.sign(statement_of(header, "s2", hashes.payload())),
        b"x" * (1 << 16),
    ]
    with (
        serving(bench.hub, identities) as plane,
        stub_of(plane.port, identities / "s1") as stub,
    ):
        stub.Join(bench.hello("s1"))

        def send(*behind: Part[wire.UploadHeader]) -> wire.Receipt:
            receipt: wire.Receipt = stub.Upload(iter([Part(header, chunk), *behind]), timeout=10)
            return receipt

        for early in (b"", mine.sign(good)):  # before the chunks it is not looked at
            header.signature = early
            assert "its signature is missing" in send().text
        for signature in bad:
            receipt = send(Part(wire.UploadHeader(signature=signature), None))
            assert receipt.status == wire.Receipt.REJECTED
            assert "its signature is not by the key of its certificate" in receipt.text
        # What is sent again and refused for the same reason counts once.
        assert bench.hub.rejected == bench.rounds.refused["s1"] == 2
        assert bench.contribution("s1") is None
        told = [text for event, _, text in bench.events if event == "rejected"]
        assert told[0].startswith("contribution of s1 refused: its signature is missing; install")
        receipt = send(Part(wire.UploadHeader(signature=mine.sign(good)), None))
        assert receipt.status == wire.Receipt.ACCEPTED


def test_a_header_alone_that_asks_what_has_arrived_brings_the_signature(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks are there, and the calls that brought them have failed."""
    bench, calls = Bench(tmp_path, num_values=200_000), []
    with joined(bench, identities) as link:
        close = bench.hub.close_stripe

        def fail_twice(*args: Any) -> wire.Receipt:
            calls.append(args)
            if len(calls) <= 2:
                raise OSError("as a disk that is full")
            return close(*args)

        monkeypatch.setattr(bench.hub, "close_stripe", fail_twice)
        payload = random_payload(1, bench.layout)
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
    assert bench.hub.rejected == 0 and len(calls) == 3


def test_who_sends_again_what_its_predecessor_has_brought_may_be_cut_off_before_it_has_read_all(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predecessor ended before it had signed; a header alone asks what is missing: nothing."""
    bench, has_failed = Bench(tmp_path, num_values=2_000_000), threading.Event()
    payload = random_payload(1, bench.layout)
    read, open_upload = payload.read, bench.hub.open_upload
    header = header_of(payload)
    header.session, header.chunk_bytes = "s1-first", client.CHUNK_BYTES

    def fail_once(*args: Any) -> Any:
        if has_failed.is_set():
            return open_upload(*args)
        has_failed.set()
        raise OSError("as a disk that is full")

    def read_late(offset: int, size: int) -> Any:
        assert not offset or has_failed.wait(10.0)
        return read(offset, size)

    with joined(bench, identities, channels=1) as link:
        reception: Any = open_upload("s1", header)
        for offset in range(0, payload.num_bytes, header.chunk_bytes):
            size = min(header.chunk_bytes, payload.num_bytes - offset)
            reception.write(offset, read(offset, size))
        monkeypatch.setattr(bench.hub, "open_upload", fail_once)
        monkeypatch.setattr(payload, "read", read_late)
        receipt = link.upload(header_of(payload), payload)
    assert (receipt.status, receipt.text, bench.hub.rejected) == (wire.Receipt.ACCEPTED, "", 0)


def test_the_journal_has_the_certificate_of_a_site_that_was_renewed_meanwhile(
    tmp_path: Path,
) -> None:
    authority = pki.federation(tmp_path / "pki", ["127.0.0.1"], ["s1"])
    folder, bench = authority.directory, Bench(tmp_path)
    payload = payload_of(1.0, bench.layout)
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        link.join(bench.hello("s1"))
        authority.renew("s1", days=1)
        link._renew()  # unless its control stream has done so by then
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
    pem = (folder / "s1" / "identity.crt").read_text()
    assert bench.events[-1] == ("renewed", "s1", "s1 shows another certificate")
    assert bench.details[-1] == {"certificate": pem} != bench.details[0]


@pytest.mark.parametrize("name", "site fragment version payload steps samples attempt".split())
def test_a_site_signs_all_that_the_journal_tells_of_its_contribution(name: str) -> None:
    bundle = wire.MaskBundle(epoch=1, basis=bytes(32), hashes=[bytes(16)] * 3)
    row = fields_of(Key(1, 2, "s1"), "00", wire.Work(steps=3, samples=4), bundle)
    assert statement(RUN_ID, row | {name: "other"}) != statement(RUN_ID, row)
    assert statement("another", row) != statement(RUN_ID, row)
