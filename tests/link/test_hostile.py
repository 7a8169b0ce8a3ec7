"""Messages that are well-formed and lie: refused with a reason, and nothing else comes of them."""

from __future__ import annotations

import io
import json
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from rich.console import Console
from safetensors.torch import save

from fedwan.codecs import fp32
from fedwan.errors import JoinRefused, PayloadError
from fedwan.link import rpc, server
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL, Link
from fedwan.link.framing import Part
from fedwan.link.tls import Identity
from fedwan.output.board import read_run
from fedwan.output.live import render_board
from fedwan.output.report import write_report
from fedwan.protocol.limits import Refusals, bound, shown
from fedwan.site.site import Membership
from fedwan.state import layout_from_json
from tests.planes import (
    Bench,
    Wires,
    eventually,
    header_of,
    payload_of,
    serving,
    stub_of,
    update_request,
)
from tests.support import (
    NET,
    TinyWorkload,
    WrappedLink,
    hub_of,
    killed_after,
    run_tiny,
    take_part,
    tiny_config,
)

INF, NAN, ESC = float("inf"), float("nan"), "\x1b]0;owned\x07"
Make = Callable[[wire.UploadHeader], Any]


def work(**changes: Any) -> Make:
    def make(header: wire.UploadHeader) -> wire.UploadHeader:
        values = {"step": 1, "steps": 1, "samples": 4} | changes
        header.work.CopyFrom(wire.Work(**values))
        return header

    return make


def report(figures: str = '{"fd": 1.0}', samples: bytes = b"", version: int = 0) -> Make:
    return lambda header: wire.QualityReport(
        run_id=header.run_id, version=version, figures_json=figures, samples=samples
    )


def hello(**changes: Any) -> Make:
    def make(header: wire.UploadHeader) -> wire.Hello:
        values = {"run_id": header.run_id, "protocol": PROTOCOL, "site": "s1", "session": "x"}
        return wire.Hello(**values | changes)

    return make


def ask(**changes: Any) -> Make:
    return lambda header: wire.DownloadRequest(run_id=header.run_id, version=9, **changes)


def tensors(dtype: str, shape: list[int], num_bytes: int = 256, name: str = "generated") -> bytes:
    row = {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({name: row}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


LAYOUT = json.dumps({f"net/{ESC}": [[1], "float32", "parameter"]})
HOSTILE: dict[str, tuple[Make, str]] = {
    "samples beyond any": (work(samples=2**63), "samples of 9223372036854775808"),
    "samples of all others": (work(samples=2**52), "are the most"),
    "no samples": (work(samples=0), "no weight"),
    "compute_s nan": (work(compute_s=NAN), "compute_s of nan"),
    "wait_s below 0": (work(wait_s=-1.0), "wait_s of -1.0"),
    "400 digits": (report('{"fd": ' + "9" * 400 + "}"), "'fd' is no number"),
    "named t": (report('{"fd": 1.0, "t": 0}'), "a figure named 't'"),
    "700 deep": (report('{"a": ' + "[" * 700 + "]" * 700 + "}"), "'a' is no number"),
    "100,000 deep": (report("[" * 100_000), "no JSON object"),
    "no JSON": (report("{"), "no JSON object"),
    "a control character": (report("\x00"), "cannot be shown"),
    "a text": (report('{"fd": "low"}'), "'fd' is no number"),
    "many figures": (report(json.dumps(dict.fromkeys(map(str, range(999)), 0))), "at most 64"),
    "bf16": (report(samples=save({"generated": torch.zeros(4, 2).bfloat16()})), "'BF16'"),
    "bytes": (report(samples=tensors("I8", [4, 1, 2, 2], 16)), "'I8'"),
    "no pictures": (report(samples=tensors("F32", [0, 1, 8, 8], 0)), "of shape [0, 1, 8, 8]"),
    "19.7 GiB": (report(samples=tensors("F32", [5000, 1, 1000, 1000])), "invalid shape"),
    "other tensors": (report(samples=tensors("F32", [64], name="x")), "'x' of dtype"),
    "a header of 2^62": (report(samples=b"\xff" * 7 + b"\x3f"), "header too large"),
    "from the future": (report(version=10**6), "at version"),
    "a name in a layout": (hello(layout_json=LAYOUT), "cannot be shown"),
    "kinds without end": (hello(layout_json="{}", kinds_json="[" * 60_000), "cannot be read"),
    "a site's name": (hello(site=ESC), "cannot be shown"),
    "a session's name": (hello(session="x" * 999), "session of 999 characters, 128 are"),
    "wait_s nan": (ask(wait_s=NAN), "wait_s of nan"),
    "a fragment that is none": (ask(fragment=7), "download of fragment 7"),
    "a farewell": (
        lambda header: wire.Farewell(session=header.session, work=wire.Work(wait_s=NAN)),
        "wait_s of nan",
    ),
}
METHODS = {
    wire.UploadHeader: "Upload",
    wire.QualityReport: "Report",
    wire.Hello: "Join",
    wire.DownloadRequest: "Download",
    wire.Farewell: "Leave",
}


def send(stub: Any, message: Any) -> str:
    """What the coordinator answers to it."""
    call = getattr(stub, METHODS[type(message)])
    try:
        if isinstance(message, wire.UploadHeader):
            return str(call(iter([Part(message, None)]), timeout=10).text)
        answer = call(message, timeout=10)
        if isinstance(message, wire.DownloadRequest):
            answer = list(answer)
        return str(getattr(answer, "refusal", ""))
    except grpc.RpcError as error:
        return str(error.details())  # type: ignore[attr-defined]


def have_asked(hub: Any) -> None:
    """As if s1 had been asked for quality, which it never hears of itself."""
    with hub.changed:
        kind = wire.CoordinatorSignal.EVALUATE
        hub.registry.sites["s1"].owed[kind] = wire.CoordinatorSignal(kind=kind)


class Lies(ExitStack):
    """S1 says some of it over a socket, before its contribution to version 1; `answers` by name."""

    def __init__(self, identities: Path, names: Iterable[str]) -> None:
        super().__init__()
        self.answers: dict[str, str] = {}
        self._identities, self._names = identities, list(names)

    def wrap(self, name: str, link: Link) -> Link:
        if name != "s1":
            return link
        plane = self.enter_context(serving(hub_of(link), self._identities))
        stub, lies = self.enter_context(stub_of(plane.port, self._identities / "s1")), self

        class Lying(WrappedLink):
            def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
                if header.version == 1 and header.kind == wire.UploadHeader.CONTRIBUTION:
                    lies.tell(hub_of(link), stub, header)
                return self._inner.upload(header, payload)

        return Lying(link)  # type: ignore[return-value]

    def tell(self, hub: Any, stub: Any, header: wire.UploadHeader) -> None:
        for name in self._names:
            make = HOSTILE[name][0]
            if "report" in make.__qualname__:
                have_asked(hub)
            copy = wire.UploadHeader()
            copy.CopyFrom(header)
            copy.session, copy.chunk_bytes = hub.registry.sites["s1"].session, 1 << 16
            message = make(copy)
            if isinstance(message, wire.Hello):
                message.config_sha256 = hub._config_sha256
            self.answers[name] = send(stub, message)
        self.answers["unasked"] = send(stub, report(version=1)(header))


@pytest.mark.slow
def test_a_run_ends_on_the_same_bits_though_a_site_lies_also_where_it_is_killed_and_resumed(
    tmp_path: Path, identities: Path
) -> None:
    config = tiny_config(h=3, steps=9, sites=2, checkpoint={"every": 1})
    (expected,) = run_tiny(tmp_path / "a", config).hashes
    with Lies(identities, HOSTILE) as lies:
        ran = run_tiny(tmp_path / "b", config, wrap=lies.wrap)
    assert ran.hashes == {expected}
    answers = lies.answers
    for name, (_, text) in HOSTILE.items():
        assert text in answers[name], name
    assert "nobody asked s1" in answers["unasked"]
    assert ran.result.totals.rejected == len(answers)
    told = ran.events("rejected")
    assert 8 <= len(told) <= 10 and all(text.isprintable() for text in told)
    assert ran.result.totals.quality["fd"] > 0  # of s2, who was asked in place of s1
    with Lies(identities, ("compute_s nan", "a farewell")) as lies, killed_after(2):
        run_tiny(tmp_path / "c", config, wrap=lies.wrap)
    ran = run_tiny(tmp_path / "c", config, resume=True)
    assert lies.answers and ran.hashes == {expected}
    assert 0 < ran.result.totals.compute_s < 1e3 and ran.result.totals.rejected == 3
    assert json.loads(json.dumps(asdict(ran.result.totals), allow_nan=False))
    for folder in (tmp_path / "b", tmp_path / "c"):
        board = read_run(folder)
        Console(file=io.StringIO()).print(render_board(board, 1.0))
        write_report(folder)


def test_samples_that_nobody_took_do_not_end_a_run_that_counts_them(
    tmp_path: Path, identities: Path
) -> None:
    config = tiny_config("async_diloco", h=2, steps=24, sites=2)
    with Lies(identities, ("samples beyond any", "samples of all others")) as lies:
        ran = run_tiny(tmp_path, config, wrap=lies.wrap)
    assert ran.result.totals.rejected == len(lies.answers) == 3
    assert 2 * 24 * 4 <= ran.result.totals.samples < 2 * 24 * 4 + 2 * 2 * 4
    assert ran.result.model.versions[0] > 12 and len(ran.hashes) == 1


@pytest.mark.slow
def test_the_first_to_join_locks_nobody_out_with_weights_that_it_made_up(
    tmp_path: Path, identities: Path
) -> None:
    is_heard = threading.Event()

    class Inventing(WrappedLink):
        def join(self, hello: wire.Hello) -> wire.Welcome:
            hello.initial_sha256 = "0" * 64
            welcome: wire.Welcome = self._inner.join(hello)
            is_heard.set()
            return welcome

    def part(member: Membership, workload: TinyWorkload) -> None:
        if member.name == "s1":
            says = "its initial weights hash to 000000000000, the run's .* seed"
            with pytest.raises(JoinRefused, match=says):
                take_part(member, workload)
        elif is_heard.wait(20.0):
            take_part(member, workload)

    config = tiny_config(h=3, steps=9, sites=3, round={"quorum": 2, "patience_s": 1.0})
    with Wires(identities) as wires:

        def wrap(name: str, link: Link) -> Link:
            wired = wires.wrap(name, link)
            return Inventing(wired) if name == "s1" else wired  # type: ignore[return-value]

        ran = run_tiny(tmp_path, config, part=part, wrap=wrap)
    assert {row["site"] for row in ran.rounds()} == {"s2", "s3"} and len(ran.hashes - {""}) == 1


def test_a_site_that_makes_its_quality_up_is_told_by_the_second_that_is_asked(
    tmp_path: Path, identities: Path
) -> None:
    config = tiny_config(h=3, steps=9, sites=3)

    class Flattering(WrappedLink):
        def report(self, report: wire.QualityReport) -> None:
            if report.version:
                report.figures_json = '{"fd": 0.0001}'
            self._inner.report(report)

    found = []
    for liar in ("", "s1"):
        with Wires(identities) as wires:

            def wrap(name: str, link: Link) -> Link:
                wired = wires.wrap(name, link)
                return Flattering(wired) if name == liar else wired  # type: ignore[return-value]  # noqa: B023

            found.append(run_tiny(tmp_path / f"-{liar}", config, wrap=wrap))
    honest, ran = found
    assert ran.hashes == honest.hashes
    true = honest.result.totals.quality["fd"]
    assert ran.result.totals.quality["fd"] == true
    assert not [text for text in honest.events("warning") if "fd of" in text]
    (told,) = {text for text in ran.events("warning") if "fd of" in text}
    assert "s1 an fd of 0.0001" in told and f"s2 an fd of {true:.4g}" in told


def test_names_of_a_site_that_has_new_ones_each_time_come_to_an_end(tmp_path: Path) -> None:
    class Inventive(WrappedLink):
        def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
            for values in (header.work.losses, header.work.figures):
                values.update({f"{header.version}/{n}": 1.0 for n in range(30)})
            return self._inner.upload(header, payload)

    def wrap(name: str, link: Link) -> Link:
        return Inventive(link) if name == "s1" else link  # type: ignore[return-value]

    ran = run_tiny(tmp_path, tiny_config(h=3, steps=15, sites=2), wrap=wrap)
    rows = [row for row in ran.result.records if row["kind"] == "round"]
    assert len(rows) == 10 and all(set(NET) <= row["losses"].keys() for row in rows)
    for what in ("losses", "figures"):
        names = {name for row in rows if row["site"] == "s1" for name in row[what]}
        assert len(names) == 64 and {"0/0", "1/0"} < names and "4/0" not in names


@pytest.mark.parametrize("does", ["sends others", "sends none"])
def test_initial_weights_come_from_another_site_where_the_first_fails(
    tmp_path: Path, does: str
) -> None:
    config = tiny_config(sites=2, round={"patience_s": 3.0})
    expected = run_tiny(tmp_path / "a", config).hashes
    lying: list[str] = []

    class Lying(WrappedLink):
        def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
            if header.kind == wire.UploadHeader.INITIAL and not lying:
                lying.append(does)
                if does == "sends none":
                    return wire.Receipt(status=wire.Receipt.ACCEPTED)
                layout = layout_from_json(hub_of(self._inner).agreement.agreed.layout_json)
                zeros = {name: torch.zeros(s.shape, dtype=s.dtype) for name, s in layout.items()}
                payload, _ = fp32().encode(zeros, {}, layout)
                header.num_bytes, header.checksum = payload.num_bytes, payload.checksum
            return self._inner.upload(header, payload)

    ran = run_tiny(tmp_path / "b", config, wrap=lambda name, link: Lying(link))  # type: ignore[arg-type, return-value]
    assert lying and ran.hashes == expected
    refused = [text for text in ran.events("rejected") if "the initial weights that" in text]
    assert len(refused) == (does == "sends others")


def test_texts_and_seconds_are_cut_and_names_that_do_not_fit_are_left_out() -> None:
    farewell = wire.Farewell(error=f"{ESC}\n\u202etxt.exe" + "x" * 10**6)
    bound(farewell, 0.0)
    assert farewell.error.startswith("?]0;owned? ?txt.exe") and len(farewell.error) == 400
    losses = {str(n): 1.0 for n in range(99)} | {ESC: 1.0, "0": INF}
    header = wire.UploadHeader(work=wire.Work(losses=losses))
    bound(header, 0.0)
    assert len(header.work.losses) == 64 and ESC not in header.work.losses
    assert str(header.work.losses["0"]) == "nan"
    assert shown("a\n\tb  c", 4) == "a b "
    with pytest.raises(PayloadError, match="layout_json of 4194305 characters"):
        bound(wire.Hello(layout_json=" " * ((4 << 20) + 1)), 0.0)
    farewell = wire.Farewell(work=wire.Work(compute_s=3600.0, wait_s=7.0))
    bound(farewell, passed_s=60.0)  # no more than the run is old
    assert (farewell.work.compute_s, farewell.work.wait_s) == (60.0, 7.0)


def test_equal_refusals_are_told_at_powers_of_ten_and_many_others_now_and_then() -> None:
    refusals = Refusals()
    told = [text for _ in range(1000) if (text := refusals.tell("no", 0.0))]
    assert told == ["no"] + [f"no ({n} times in a row)" for n in (10, 100, 1000)]
    assert sum(bool(refusals.tell(f"no {n}", 1.0)) for n in range(1000)) == 7
    assert refusals.tell("again", 12.0) == "again (and 993 others since the last one)"


@pytest.mark.slow
def test_calls_that_were_cancelled_count_until_they_give_their_threads_back(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, sites=("s1", "s2"))
    with ExitStack() as stack:
        plane = stack.enter_context(serving(bench.hub, identities, num_sites=2))
        honest = stack.enter_context(stub_of(plane.port, identities / "s2"))
        greedy = stack.enter_context(stub_of(plane.port, identities / "s1"))
        for site, stub in (("s1", greedy), ("s2", honest)):
            assert not stub.Join(bench.hello(site), timeout=5).refusal
        for _ in range(5):
            other = stack.enter_context(stub_of(plane.port, identities / "s1"))
            calls = [other.Download(update_request(wait_s=10.0)) for _ in range(30)]
            eventually(lambda: len(plane._calls) >= 30)
            for call in calls:
                call.cancel()
        assert len(plane._calls) <= 34
        assert list(honest.Download(update_request(wait_s=0.0), timeout=5))


@pytest.mark.slow
def test_calls_whose_message_never_comes_are_a_site_s_own_and_are_ended(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, sites=("s1", "s2"))
    with ExitStack() as stack:
        plane = stack.enter_context(serving(bench.hub, identities, num_sites=2))
        credentials = Identity.load(identities / "s1").grpc_channel_credentials()
        address = f"127.0.0.1:{plane.port}"
        channel = stack.enter_context(grpc.secure_channel(address, credentials))
        honest = stack.enter_context(stub_of(plane.port, identities / "s2"))
        never = threading.Event()
        stack.callback(never.set)

        def silence(*first: bytes) -> Iterator[bytes]:
            yield from first
            never.wait(30.0)

        def call(name: str, *first: bytes) -> Any:
            return channel.stream_stream(f"/{rpc.SERVICE}/{name}")(silence(*first))

        payload = payload_of(1.0, bench.layout)
        header = header_of(payload)
        header.session, header.chunk_bytes = "s1-first", 1 << 16
        assert not honest.Join(bench.hello("s2"), timeout=5).refusal
        greedy = stack.enter_context(stub_of(plane.port, identities / "s1"))
        assert not greedy.Join(bench.hello("s1"), timeout=5).refusal
        calls = [call("Control", wire.SiteSignal(session="s1-first").SerializeToString())]
        calls += [call("Upload", rpc.METHODS["Upload"].write_request(Part(header, None)))]
        eventually(lambda: len(bench.intake.open_of("s1")) == 1)
        calls += [call(name) for name in (5 * sorted(rpc.METHODS))[:32]]
        eventually(lambda: len(plane._calls) == 34)
        with pytest.raises(grpc.RpcError):  # one more of this connection does not even come
            channel.unary_unary(f"/{rpc.SERVICE}/Join")(b"", timeout=1.0)
        assert not any(event == "rejected" for event, *_ in bench.events)
        with pytest.raises(grpc.RpcError) as caught:
            greedy.Join(bench.hello("s1"), timeout=5)
        assert "s1 has 34 calls under way, and no more are its share" in caught.value.details()
        assert not honest.Join(bench.hello("s2"), timeout=5).refusal

        def are_over() -> bool:
            rpc.look()  # as the watch does every ten seconds
            return not plane._calls

        eventually(are_over)
        for one in calls:
            with pytest.raises(grpc.RpcError):
                list(one)
            assert one.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    ("most", "says"),
    [
        ({"SILENT_CONNECTIONS": 0}, "42 connections to the data plane stand, and no more are"),
        ({"getrlimit": lambda _: (160, 160)}, "120 connections to the data plane stand, and no"),
    ],
)
def test_of_ever_more_connections_that_say_nothing_a_number_is_kept_and_a_site_goes_on(
    tmp_path: Path,
    identities: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: dict[str, Any],
    says: str,
) -> None:
    """However many files the system grants; and the journal has it."""
    for name, value in {"PEERS_S": 0.01, **most}.items():
        monkeypatch.setattr(server, name, value)
    bench = Bench(tmp_path)
    with ExitStack() as stack:
        plane = stack.enter_context(serving(bench.hub, identities))
        honest = stack.enter_context(stub_of(plane.port, identities / "s2"))
        assert not honest.Join(bench.hello("s2"), timeout=5).refusal
        address = ("127.0.0.1", plane.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
        closed = set[int]()

        def are_closed() -> bool:
            closed.update(c.fileno() for c in select.select(silent, [], [], 0)[0])
            return len(closed) > 150

        eventually(are_closed)
        assert not honest.Join(bench.hello("s2"), timeout=5).refusal
        eventually(lambda: [text for event, _, text in bench.events if says in text])
        assert not any(site for event, site, _ in bench.events if event == "rejected")


def test_a_crowd_of_connections_and_calls_that_wait_are_told(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PEERS_S", 0.01)
    monkeypatch.setattr(server, "WAITING_CALLS", 3)
    bench, release = Bench(tmp_path), threading.Event()
    with ExitStack() as stack:
        plane = stack.enter_context(serving(bench.hub, identities))
        stack.callback(release.set)
        for _ in range(plane._pool._max_workers + 3):
            plane._pool.submit(release.wait)
            stack.enter_context(socket.create_connection(("127.0.0.1", plane.port)))
        for says in ("3 calls wait for the data plane", "more than 42 connections"):
            eventually(lambda says=says: [e for e in bench.events if e[2].startswith(says)])
