"""A site that belongs to a run and lies, for `hostile.py`: well-formed messages, hostile content.

    python -m benchmarks.harness.hostile_site FOLDER NAME \
        MESSAGES STREAMS CONNECTIONS HALVES REPORTS

It joins as an honest site would, keeps its session, and contributes nothing but NaN. Each of its
threads then takes an honest message of a random call and changes one to three fields of it, each by
what its type makes worst: numbers at the ends of their range, NaN, control characters, texts
without end, JSON that is deep, long, or of another shape, tensors whose header lies. Payloads are
framed and checksummed as they should be, and hold at least one value that is not finite. Beside
that it keeps so many Control streams, so many connections that say nothing, and so many that begin
the headers of a call and do not end them; and it sends so many reports alone.

`FOLDER/NAME.json` has how many messages were sent, by call, and how they were answered, by status.
UNKNOWN is what gRPC answers for an exception that nobody foresaw.
"""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
import xxhash
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from benchmarks.harness.fleet import save_json
from benchmarks.harness.party import await_ticket, greeting
from fedwan.codecs import fp32
from fedwan.config import LinkConfig
from fedwan.errors import FedwanError
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink, dial
from fedwan.link.framing import Chunk, ChunkHashes, Part
from fedwan.link.rpc import ByteCounter, Stub
from fedwan.link.tls import Identity
from fedwan.protocol.evidence import statement_of
from fedwan.protocol.rounds import HOPELESS_ROUNDS

CALLS = ("Control", "Download", "Join", "Leave", "Report", "Unmask", "Upload")
HALF = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\0\x40\1\4\0\0\0\1\x83"
"""Of HTTP/2 (RFC 9113): preface, empty settings, and headers of 64 bytes of which one comes."""
THREADS = 16
TIMEOUT_S = 30.0
INTEGERS = (0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64 - 1)
MASKS = {Field.TYPE_ENUM: 2**31 - 1, Field.TYPE_UINT32: 2**32 - 1}
DOUBLES = (0.0, -0.0, -1.0, 1e-300, 1e17, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", "s1", "s2", "../../etc", "\x00", "\x1b]0;owned\x07", "\u202etxt.exe", "nan", "{}", "[]"),
    *("x" * 65, "y" * 100_000, "\n" * 1000, "💥" * 300, "null", "%s%n", "'; drop table"),
)
FIGURES = ("fd", "fd_floor", "t", "kind", "site", "loss", "\x1b[2J", "x" * 300, "")
DTYPES = ("F32", "F64", "I64", "BF16", "F4", "U8", "", "F32\x00")
SIDES = (0, 1, 2, 8, 64, 10_000, 2**31, 2**63, -1)
JSON = (
    *("[" * 10, "[" * 50_000, '{"fd":' + "[" * 700 + "]" * 700 + "}", '{"fd": []}'),
    *('{"fd": ' + "9" * num + "}" for num in (20, 400, 5000)),
    '{"fd": 0.0001, "fd": 1e999, "fd_floor": -1}',
    *(json.dumps({str(i): i for i in range(num)}) for num in (70, 3000)),
    *(json.dumps({f"generator/{t[:80]}": [[2**63], "F32", "parameter"]}) for t in TEXTS),
    *(json.dumps({"fd": v, "\x1b[2J": v}) for v in (*DOUBLES, "low", None, True, {}, [1.0])),
)
"""JSON, or nearly."""


def spoil(rng: random.Random, message: Any) -> Any:
    """Change one to three fields of a message in place."""
    for _ in range(rng.randint(1, 3)):
        field = rng.choice(message.DESCRIPTOR.fields)
        value = getattr(message, field.name)
        if isinstance(value, Message):
            spoil(rng, value)
        elif field.message_type is not None:  # a map of figures
            for _ in range(rng.choice((1, 3, 70))):
                value[rng.choice(FIGURES) + str(rng.randint(0, 99))] = _double(rng)
        elif field.is_repeated:
            count = rng.choice((1, 100, 100_000) if field.type in MASKS else (1, 3, 100))
            value.extend(_scalar(rng, field) for _ in range(count))
        else:
            setattr(message, field.name, _scalar(rng, field))
    return message


def _double(rng: random.Random) -> float:
    return rng.choice((*DOUBLES, rng.gauss(0, 1)))


def _scalar(rng: random.Random, field: Any) -> Any:
    if field.type == Field.TYPE_STRING:
        is_json = field.name.endswith("_json") and rng.random() < 0.8
        return rng.choice(JSON if is_json else TEXTS)
    if field.type == Field.TYPE_BYTES:
        return _samples(rng)
    if field.type == Field.TYPE_DOUBLE:
        return _double(rng)
    if field.type == Field.TYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice(INTEGERS) & MASKS.get(field.type, 2**64 - 1)


def _samples(rng: random.Random) -> bytes:
    """Safetensors whose header need not be true."""
    rows = {
        rng.choice(("generated", "real", "moments:means", "x")): {
            "dtype": rng.choice(DTYPES),
            "shape": rng.choices(SIDES, k=rng.randint(0, 5)),
            "data_offsets": rng.choices(SIDES, k=2),
        }
        for _ in range(rng.randint(0, 4))
    }
    header = json.dumps(rows).encode()
    size = rng.choice((len(header), 0, 2**32, 2**63, 2**64 - 1))
    return size.to_bytes(8, "little") + header + rng.randbytes(rng.choice((0, 256)))


class HostileSite:
    """One process; its threads share a session, which they take anew when it is lost."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.json"
        ticket = await_ticket(folder)
        self._address, self._run_id = ticket["address"], ticket["run_id"]
        self._identity = Identity.load(folder / "pki" / name)
        self._hello, replica = greeting(ticket)
        self._hello.site = name
        values = {
            name: torch.full(spec.shape, float("nan") if spec.dtype.is_floating_point else 0)
            for name, spec in replica.layout.items()
        }
        self._nan, _ = fp32().encode(values, {}, replica.layout)
        self._payload = bytes(self._nan.read(0, self._nan.num_bytes))
        self._version = 0
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()

    def save(self) -> None:
        save_json(self._path, {"sent": dict(self._sent), "answers": dict(self._answers)})

    def _stub(self) -> Stub:
        identity = self._identity
        return Stub(dial(self._address, identity), ByteCounter(), self._address, identity)

    def belong(self) -> None:
        """Join as an honest site does; contribute NaN to every version, for ever.

        As often as it is tried with a site.
        """
        link = GrpcLink(self._address, self._identity, LinkConfig())
        while True:
            with suppress(FedwanError):
                self._hello.session = uuid.uuid4().hex
                while link.join(self._hello).is_waiting:
                    time.sleep(0.2)
                while True:  # until a Join of our own has taken the session
                    for attempt in range(HOPELESS_ROUNDS):
                        header = self._header(len(self._payload), self._nan.checksum + attempt)
                        link.upload(header, self._nan)
                    asked = self._request(version=self._version + 1, wait_s=1.0)
                    found = link.download(asked).header
                    if found.status != wire.DownloadHeader.NOT_YET:
                        self._version = found.version
            time.sleep(0.1)

    def _request(self, **fields: Any) -> wire.DownloadRequest:
        return wire.DownloadRequest(run_id=self._run_id, **fields)

    def _header(self, num_bytes: int, checksum: int, chunk_bytes: int = 0) -> wire.UploadHeader:
        return wire.UploadHeader(
            run_id=self._run_id,
            session=self._hello.session,
            version=self._version,
            num_bytes=num_bytes,
            checksum=checksum,
            chunk_bytes=max(1024, chunk_bytes),
            work=wire.Work(step=self._version, steps=1, samples=1),
        )

    def _honest(self, name: str, rng: random.Random) -> Message:
        """What an honest site would say in a call."""
        version = self._version
        if name == "Join":
            hello = wire.Hello()
            hello.CopyFrom(self._hello)
            return hello
        if name == "Report":
            figures = '{"fd": 0.0001, "fd_floor": 0.0}'
            return wire.QualityReport(run_id=self._run_id, version=version, figures_json=figures)
        if name == "Unmask":
            shares = [bytes(16)] * 2
            return wire.Unmasked(version=version, signature=bytes(64), shares=shares)
        if name == "Leave":
            return wire.Farewell(session=uuid.uuid4().hex)
        if name == "Download":
            return self._request(kind=rng.randint(0, 4), version=version)
        return wire.SiteSignal(session=self._hello.session)

    def attack(self, messages: int, calls: Sequence[str], seed: int) -> None:
        """Send so many, less those that found no connection."""
        rng, stub = random.Random(f"hostile {seed}"), self._stub()
        for _ in range(messages):
            name = rng.choice(calls)
            try:
                if name == "Upload":
                    stub.Upload(self._parts(rng), timeout=TIMEOUT_S)
                else:
                    message = spoil(rng, self._honest(name, rng))
                    told = iter([message]) if name == "Control" else message
                    found = getattr(stub, name)(told, timeout=TIMEOUT_S)
                    if name in ("Control", "Download"):  # the rest is left unread
                        next(found)
                        found.cancel()
                answer = "OK"
            except grpc.RpcError as error:
                answer = error.code().name
                if error.code() is grpc.StatusCode.UNAVAILABLE:  # it has not left
                    time.sleep(0.1)
                    continue
            except StopIteration:
                answer = "ended"
            with self._lock:
                self._sent[name] += 1
                self._answers[answer] += 1
                if self._sent.total() % 1000 == 0:
                    self.save()

    def _parts(self, rng: random.Random) -> Iterator[Part[wire.UploadHeader]]:
        num_bytes = rng.choice((len(self._payload), len(self._payload), 1, 2**40))
        chunk = bytearray(self._payload)
        for _ in range(rng.randint(1, 8) if rng.random() < 0.7 else 0):
            chunk[rng.randrange(len(chunk))] = rng.randrange(256)
        if rng.random() < 0.3:
            chunk = chunk[: rng.randrange(1, len(chunk))]
        checksum = xxhash.xxh3_64_intdigest(chunk)
        header = self._header(num_bytes, rng.choice((checksum, self._nan.checksum)), len(chunk))
        header = spoil(rng, header) if rng.random() < 0.7 else header
        yield Part(header, None)
        for _ in range(rng.choice((0, 1, 1, 3))):
            offset = rng.choice((0, 0, 1, len(chunk), 2**40, 2**63))
            yield Part(None, Chunk(offset, bytes(chunk), rng.choice((0, 0, 0, 2**40))))
        hashes = ChunkHashes(1)
        hashes.add(0, chunk)
        said = statement_of(header, self._hello.site, hashes.payload())
        if rng.random() < 0.8:  # else it is refused for that
            yield Part(wire.UploadHeader(signature=self._identity.sign(said)), None)

    def keep_streams(self, number: int) -> None:
        """Control streams of strangers' sessions, for ever."""
        stub, never = self._stub(), threading.Event()
        _kept = [stub.Control(never.wait() for _ in range(1)) for _ in range(number)]
        never.wait()

    def keep_connections(self, number: int, is_half: bool) -> None:
        """So many, for ever: that say nothing, or that have begun a call."""
        tls = self._identity.ssl_context(server=False)
        tls.set_alpn_protocols(["h2"])
        host, _, port = self._address.rpartition(":")
        kept: list[socket.socket] = []
        while True:
            while len(kept) < number:
                with suppress(OSError):
                    made = socket.create_connection((host, int(port)), timeout=5.0)
                    if is_half:
                        made = tls.wrap_socket(made, server_hostname=host)
                        made.sendall(HALF)
                    made.setblocking(False)
                    kept.append(made)
            time.sleep(5.0)
            kept = list(filter(_is_open, kept))


def _is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except OSError as error:
        return isinstance(error, BlockingIOError | ssl.SSLWantReadError)
    return False


if __name__ == "__main__":
    folder, name, given = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])
    messages, streams, connections, halves, reports = given
    os.chdir(folder / "app")
    site = HostileSite(folder, name)
    site.save()
    work: list[Callable[[], None]] = [site.belong, partial(site.keep_streams, streams)]
    work += [partial(site.keep_connections, connections, False)]
    work += [partial(site.keep_connections, halves, True)]
    for number, calls in ((messages, CALLS), (reports, ("Report",))):
        work += [partial(site.attack, number // THREADS, calls, seed) for seed in range(THREADS)]
    for target in work:
        threading.Thread(target=target, daemon=True).start()
    threading.Event().wait()
