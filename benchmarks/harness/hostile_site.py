"""A site that belongs to a run and lies, for `hostile.py`: well-formed messages, hostile content.

    python -m benchmarks.harness.hostile_site FOLDER NAME MESSAGES STREAMS CONNECTIONS

It joins as an honest site would, keeps its session, and contributes nothing but NaN. Each of its
threads then takes an honest message of a random call and changes one to three fields of it, each by
what its type makes worst: numbers at the ends of their range, NaN, control characters, texts
without end, JSON that is deep, long, or of another shape, tensors whose header lies. Payloads are
framed and checksummed as they should be, and hold at least one value that is not finite. Beside
that it keeps so many Control streams, and so many connections that say nothing.

`FOLDER/NAME.json` has how many messages were sent, by call, and how they were answered, by status.
UNKNOWN is what gRPC answers for an exception that nobody foresaw.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import torch
import xxhash
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from benchmarks.harness.fleet import save_json
from benchmarks.harness.party import await_ticket
from fedwan.app import load_workload, sources
from fedwan.codecs import Payload, fp32
from fedwan.config import Config, from_json
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.link.framing import Chunk, Part
from fedwan.link.rpc import ByteCounter, Stub
from fedwan.link.tls import Identity
from fedwan.protocol.rounds import HOPELESS_ROUNDS
from fedwan.site.replica import Replica
from fedwan.state import layout_to_json
from fedwan.workloads.settings import networks_of

THREADS = 4
REJOIN_S = 1.0
TIMEOUT_S = 30.0
INTEGERS = (0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64 - 1)
DOUBLES = (0.0, -0.0, -1.0, 1e-300, 1e17, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", "s1", "s2", "../../etc", "\x00", "\x1b]0;owned\x07", "\u202etxt.exe", "nan", "{}", "[]"),
    *("x" * 65, "y" * 100_000, "\n" * 1000, "💥" * 300, "null", "%s%n", "'; drop table"),
)
FIGURES = ("fd", "fd_floor", "t", "kind", "site", "loss", "\x1b[2J", "x" * 300, "")
TENSORS = ("generated", "real", "moments:means", "moments:counts", "x")
DTYPES = ("F32", "F64", "I64", "BF16", "F4", "U8", "", "F32\x00")
SIDES = (0, 1, 2, 8, 64, 10_000, 2**31, 2**63, -1)


class Grammar:
    """Draws hostile messages."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def spoil(self, message: Message) -> Message:
        """Change one to three fields in place."""
        for _ in range(self.rng.randint(1, 3)):
            self._change(message, self.rng.choice(message.DESCRIPTOR.fields))
        return message

    def _change(self, message: Message, field: FieldDescriptor) -> None:
        name, kind = field.name, field.type
        value = getattr(message, name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(self.rng.choice((1, 3, 70))):
                value[self.rng.choice(FIGURES) + str(self.rng.randint(0, 99))] = self._double()
        elif kind == FieldDescriptor.TYPE_MESSAGE:
            self.spoil(value)
        elif field.is_repeated:
            count = self.rng.choice((1, 100, 100_000))
            value.extend(self.rng.choice(INTEGERS) & 0xFFFFFFFF for _ in range(count))
        else:
            setattr(message, name, self._scalar(name, field))

    def _scalar(self, name: str, field: FieldDescriptor) -> Any:
        kind = field.type
        if kind == FieldDescriptor.TYPE_STRING:
            is_json = name.endswith("_json") and self.rng.random() < 0.8
            return self.json_text() if is_json else self.rng.choice(TEXTS)
        if kind == FieldDescriptor.TYPE_BYTES:
            return self.samples()
        if kind == FieldDescriptor.TYPE_DOUBLE:
            return self._double()
        if kind == FieldDescriptor.TYPE_BOOL:
            return self.rng.random() < 0.5
        number = self.rng.choice(INTEGERS)
        if kind == FieldDescriptor.TYPE_ENUM:
            return number & 0x7FFFFFFF
        return number & (0xFFFFFFFF if kind == FieldDescriptor.TYPE_UINT32 else 2**64 - 1)

    def _double(self) -> float:
        return self.rng.choice((*DOUBLES, self.rng.gauss(0, 1)))

    def json_text(self) -> str:
        """JSON, or nearly."""
        shape = self.rng.randint(0, 7)
        if shape == 0:
            return "[" * self.rng.choice((10, 700, 50_000))
        if shape == 1:
            depth = self.rng.choice((3, 700))
            return '{"fd":' + "[" * depth + "]" * depth + "}"
        if shape == 2:
            return '{"fd": ' + "9" * self.rng.choice((20, 400, 5000)) + "}"
        if shape == 3:
            return '{"fd": 0.0001, "fd": 1e999, "fd_floor": -1}'
        if shape == 4:
            return json.dumps({str(i): i for i in range(self.rng.choice((70, 3000)))})
        if shape == 5:
            row = [[self.rng.choice(SIDES)], self.rng.choice(DTYPES), "parameter"]
            return json.dumps({f"generator/{self.rng.choice(TEXTS)[:80]}": row})
        values = [self.rng.choice((*DOUBLES, "low", None, True, [], {}, [1.0])) for _ in range(3)]
        return json.dumps({self.rng.choice(FIGURES): value for value in values})

    def samples(self) -> bytes:
        """Safetensors whose header need not be true."""
        rows = {
            self.rng.choice(TENSORS): {
                "dtype": self.rng.choice(DTYPES),
                "shape": [self.rng.choice(SIDES) for _ in range(self.rng.randint(0, 5))],
                "data_offsets": [self.rng.choice(SIDES), self.rng.choice(SIDES)],
            }
            for _ in range(self.rng.randint(0, 4))
        }
        header = json.dumps(rows).encode()
        size = self.rng.choice((len(header), 0, 2**32, 2**63, 2**64 - 1))
        return size.to_bytes(8, "little") + header + self.rng.randbytes(self.rng.choice((0, 256)))


class HostileSite:
    """One process; its threads share a session, which they take anew when it is lost."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._ticket = await_ticket(folder)
        self._identity = Identity.load(folder / "pki" / name)
        self._claim, payload = _claim_of(from_json(self._ticket["config"]))
        self._payload = bytes(payload.read(0, payload.num_bytes))
        self._checksum = payload.checksum
        self._session = ""
        self._version = 0
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    def stub(self) -> Stub:
        options = [("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        credentials = self._identity.grpc_channel_credentials()
        channel = grpc.secure_channel(self._ticket["address"], credentials, options=options)
        return Stub(channel, ByteCounter(), self._ticket["address"])

    def hello(self) -> wire.Hello:
        return wire.Hello(
            run_id=self._ticket["run_id"],
            site=self._name,
            session=self._session,
            **self._claim,
        )

    def belong(self) -> None:
        """Join and send heartbeats, as an honest site does, for ever."""
        stub = self.stub()
        while True:
            with suppress(grpc.RpcError):
                self._session = uuid.uuid4().hex
                while stub.Join(self.hello(), timeout=TIMEOUT_S).is_waiting:
                    time.sleep(0.2)
                control = stub.Control(self._heartbeats(self._session))
                for signal in control:
                    if signal.kind == wire.CoordinatorSignal.GONE:  # by a Join of our own
                        break
                control.cancel()
            time.sleep(REJOIN_S / 10)

    def _heartbeats(self, session: str) -> Iterator[wire.SiteSignal]:
        while session == self._session:
            yield wire.SiteSignal(session=session, step=self._version)
            time.sleep(REJOIN_S)

    def decline(self) -> None:
        """Contribute to every version, as often as it is tried with a site, nothing but NaN."""
        stub, data = self.stub(), self._payload
        chunk = Chunk(0, xxhash.xxh3_64_intdigest(data), data)
        while True:
            try:
                for attempt in range(HOPELESS_ROUNDS):
                    header = self._header(len(data), self._checksum + attempt, len(data))
                    stub.Upload(iter([Part(header, chunk)]), timeout=TIMEOUT_S)
                ask = wire.DownloadRequest(
                    run_id=self._ticket["run_id"], version=self._version + 1, wait_s=1.0
                )
                call = stub.Download(ask, timeout=TIMEOUT_S)
                found = next(call).header
                call.cancel()
                if found.status != wire.DownloadHeader.NOT_YET:
                    self._version = found.version
            except (grpc.RpcError, StopIteration):
                time.sleep(0.1)

    def _header(self, num_bytes: int, checksum: int, chunk_bytes: int) -> wire.UploadHeader:
        return wire.UploadHeader(
            run_id=self._ticket["run_id"],
            session=self._session,
            version=self._version,
            num_bytes=num_bytes,
            checksum=checksum,
            chunk_bytes=max(1024, chunk_bytes),
            work=wire.Work(step=self._version, steps=1, samples=1),
        )

    def attack(self, messages: int, seed: int) -> None:
        """Send so many."""
        rng = random.Random(f"hostile {seed}")
        grammar, stub = Grammar(rng), self.stub()
        calls: dict[str, Callable[[], Any]] = {
            "Join": lambda: stub.Join(grammar.spoil(self.hello()), timeout=TIMEOUT_S),
            "Report": lambda: stub.Report(
                grammar.spoil(
                    wire.QualityReport(
                        run_id=self._ticket["run_id"],
                        version=self._version,
                        figures_json='{"fd": 0.0001, "fd_floor": 0.0}',
                    )
                ),
                timeout=TIMEOUT_S,
            ),
            "Leave": lambda: stub.Leave(
                grammar.spoil(wire.Farewell(session=uuid.uuid4().hex)), timeout=TIMEOUT_S
            ),
            "Download": lambda: self._take(stub, grammar),
            "Upload": lambda: stub.Upload(self._parts(grammar), timeout=TIMEOUT_S),
            "Control": lambda: next(
                stub.Control(
                    iter([grammar.spoil(wire.SiteSignal(session=self._session))]),
                    timeout=TIMEOUT_S,
                )
            ),
        }
        for _ in range(messages):
            name = rng.choice(sorted(calls))
            try:
                calls[name]()
                answer = "OK"
            except grpc.RpcError as error:
                answer = error.code().name
            except StopIteration:
                answer = "ended"
            with self._lock:
                self.sent[name] += 1
                self.answers[answer] += 1
                if sum(self.sent.values()) % 1000 == 0:
                    self.save()

    def _take(self, stub: Stub, grammar: Grammar) -> None:
        kind = grammar.rng.randint(0, 4)
        request = wire.DownloadRequest(
            run_id=self._ticket["run_id"], kind=kind, version=self._version
        )
        call = stub.Download(grammar.spoil(request), timeout=TIMEOUT_S)
        next(call, None)  # and leave the rest unread
        call.cancel()

    def _parts(self, grammar: Grammar) -> Iterator[Part[wire.UploadHeader]]:
        rng = grammar.rng
        num_bytes = rng.choice((len(self._payload), len(self._payload), 1, 2**40))
        chunk = bytearray(self._payload)
        if rng.random() < 0.7:
            for _ in range(rng.randint(1, 8)):
                chunk[rng.randrange(len(chunk))] = rng.randrange(256)
        if rng.random() < 0.3:
            chunk = chunk[: rng.randrange(1, len(chunk))]
        checksum = xxhash.xxh3_64_intdigest(chunk)
        header = self._header(num_bytes, rng.choice((checksum, self._checksum)), len(chunk))
        if rng.random() < 0.7:
            grammar.spoil(header)
        yield Part(header, None)
        for _ in range(rng.choice((0, 1, 1, 3))):
            offset = rng.choice((0, 0, 1, len(chunk), 2**40, 2**63))
            told = checksum ^ (rng.random() < 0.2)
            yield Part(None, Chunk(offset, told, bytes(chunk), rng.choice((0, 0, 0, 2**40))))

    def keep_open(self, streams: int, connections: int) -> list[Any]:
        """Control streams of strangers' sessions, and connections that say nothing."""
        stub = self.stub()
        never = threading.Event()

        def silent() -> Iterator[wire.SiteSignal]:
            never.wait()
            yield wire.SiteSignal()

        kept: list[Any] = [stub.Control(silent()) for _ in range(streams)]
        host, _, port = self._ticket["address"].rpartition(":")
        while True:
            while len(kept) < streams + connections:
                with suppress(OSError):
                    kept.append(socket.create_connection((host, int(port)), timeout=5.0))
            time.sleep(5.0)
            kept = kept[:streams] + [one for one in kept[streams:] if _is_open(one)]

    def save(self) -> None:
        save_json(
            self._folder / f"{self._name}.json",
            {"sent": dict(self.sent), "answers": dict(self.answers)},
        )


def _claim_of(config: Config) -> tuple[dict[str, Any], Payload]:
    """What an honest site says of itself in its Join, and a contribution, of NaN."""
    recipe = load_workload(config.workload)
    workload = recipe.build(config, "cpu")
    replica = Replica(workload.networks, workload.optimizers, config.inner, config.excluded)
    claim = {
        "protocol": PROTOCOL,
        "layout_json": layout_to_json(replica.layout),
        "initial_sha256": replica.initial_sha256,
        "frozen_sha256": replica.frozen_sha256,
        "kinds_json": json.dumps(dict(networks_of(recipe, config)), sort_keys=True),
        "sources_json": json.dumps(sources(config), sort_keys=True),
    }
    values = {
        name: torch.full(spec.shape, float("nan") if spec.dtype.is_floating_point else 0)
        for name, spec in replica.layout.items()
    }
    return claim, fp32().encode(values, {}, replica.layout)[0]


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        is_open = connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        is_open = False
    if not is_open:
        connection.close()
    return is_open


def main(words: Sequence[str]) -> None:
    folder, name, (messages, streams, connections) = Path(words[0]), words[1], map(int, words[2:])
    os.chdir(folder / "app")
    site = HostileSite(folder, name)
    site.save()
    work: list[Callable[[], object]] = [site.belong, site.decline]
    work += [lambda seed=n: site.attack(messages // THREADS, seed) for n in range(THREADS)]
    work += [lambda: site.keep_open(streams, connections)]
    for each in work:
        threading.Thread(target=each, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
