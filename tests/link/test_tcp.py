"""The data plane's own sockets get the congestion control that was asked for; no others do."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedwan.config import LinkConfig
from fedwan.link import tcp
from fedwan.link import wire_pb2 as wire
from fedwan.link.tcp import Congestion, read_state
from tests.planes import Bench, eventually, header_of, joined, random_payload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def control_of(sock: socket.socket) -> str:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return raw.split(b"\0")[0].decode()


@pytest.fixture
def other() -> str:
    """A control that is not the system's, so that a change shows; `reno` is in every kernel."""
    with socket.socket() as probe:
        return "reno" if control_of(probe) != "reno" else "cubic"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def pace_of(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.SOL_SOCKET, tcp.SO_MAX_PACING_RATE, 8)
    return int.from_bytes(raw, sys.byteorder)


def test_connections_to_the_coordinator_are_set_up_and_no_others(
    other: str, listener: socket.socket
) -> None:
    port, wish = listener.getsockname()[1], LinkConfig(congestion=other, pace_mbit=98.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as elsewhere,
        socket.create_connection(("127.0.0.1", port)) as ours,
        socket.create_connection(elsewhere.getsockname()) as foreign,
        listener.accept()[0] as far_end,
    ):
        before = control_of(foreign)
        assert Congestion(wish).apply_to_peer(f"localhost:{port}") == 1
        assert Congestion(wish).apply_to_peer(f"localhost:{port}") == 0  # it is set up
        assert control_of(ours) == other and pace_of(ours) == 98.5e6 / 8
        assert [control_of(s) for s in (foreign, far_end, listener)] == [before] * 3
        assert pace_of(far_end) == 2**64 - 1
        state = read_state(f"127.0.0.1:{port}")
        ours.sendall(bytes(1000))
        far_end.sendall(bytes(5000))
        assert len(far_end.recv(1000)) == 1000
        after = read_state(f"127.0.0.1:{port}")
        assert after.sent - state.sent == 1000
        assert after.congestion == other and after.rtt_us > 0


def test_a_name_that_cannot_be_found_any_more_hides_no_connection(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as ours:
        before = read_state(f"coordinator.invalid:{port}")
        ours.sendall(bytes(1000))
        assert read_state(f"coordinator.invalid:{port}").sent - before.sent == 1000
        assert read_state(f"127.0.0.2:{port}").sent == 0
        assert read_state(f"[0:0::ffff:127.0.0.1]:{port}").sent == 1000 + before.sent


class Refusing(socket.socket):
    """A socket of a user who may not."""

    def setsockopt(self, *args: object) -> None:
        raise PermissionError(1, "Operation not permitted")


def test_a_wish_that_is_refused_is_one_warning_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp.socket, "socket", Refusing)
    choice = Congestion(LinkConfig(congestion="bbr"))
    assert choice.apply_to_peer("127.0.0.1:1") == 0 and choice.name == ""
    (record,) = caplog.records
    assert "link.congestion = 'bbr'" in record.message and "\n" not in record.message
    assert "modprobe tcp_bbr; sudo sysctl -w net.ipv4.tcp_allowed" in record.message


def test_an_upload_and_its_server_run_with_the_wish(
    tmp_path: Path, identities: Path, other: str
) -> None:
    """Both ends are in this process, so its sockets tell."""
    bench = Bench(tmp_path, num_values=1_000_000)
    payload = random_payload(1, bench.layout)
    with joined(bench, identities, LinkConfig(congestion=other), channels=3) as link:
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        port = int(link._address.rpartition(":")[2])
        peers = [sock.getpeername()[1] for sock in tcp._connected_to(link._address)]
        assert peers == [port] * 4
        eventually(lambda: read_state(link._address).congestion == other)
        served = [control_of(s) for s in tcp._open_sockets() if s.getsockname()[1] == port]
    assert served == [other] * 5  # 3, Control, and what listens
