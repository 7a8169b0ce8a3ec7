from __future__ import annotations

import contextlib
import hashlib
import logging
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.proto.fab_pb2 import Fab, GetFabResponse

from fedwan.app import installed_app
from fedwan.config import Config, LinkConfig
from fedwan.errors import IdentityError
from fedwan.flower import front_door, relay
from fedwan.flower.bundle import build_fab
from fedwan.flower.forwarder import Forwarder
from fedwan.flower.front_door import FrontDoor
from fedwan.flower.site_file import SiteFile
from fedwan.link import pki
from fedwan.link.tls import Identity
from tests.flower.fleet import free_port
from tests.planes import Bench, eventually, in_thread, let_lapse, serving

PULL = "/v1/fleet/pull-messages"


@pytest.fixture
def told() -> list[tuple[str, str]]:
    """What the door has for the journal: site and text."""
    return []


@contextmanager
def open_door(
    identities: Path, superlink: int = 9, port: int = 0, told: list[tuple[str, str]] | None = None
) -> Iterator[FrontDoor]:
    tell = lambda *words: None if told is None else told.append(words)  # noqa: E731
    config = Config(sites=1, link=LinkConfig(door=f"127.0.0.1:{port}"))
    with closing(FrontDoor(identities / "coordinator", config, tell)) as opened:
        opened.start(f"http://127.0.0.1:{superlink}")
        yield opened


@contextmanager
def forwarding(identity: Path, door_port: int, bundles: Sequence[str] = ()) -> Iterator[Forwarder]:
    site = SiteFile(door=f"127.0.0.1:{door_port}", bundles=list(bundles))
    with closing(Forwarder(site, Identity.load(identity))) as forwarder:
        forwarder.start(f"https://127.0.0.1:{door_port}")
        yield forwarder


@pytest.fixture
def door(identities: Path, superlink: Any, told: list[tuple[str, str]]) -> Iterator[FrontDoor]:
    with open_door(identities, superlink.server_port, told=told) as opened:
        yield opened


def client_of(identity: Path) -> httpx.Client:
    tls = Identity.load(identity).ssl_context(server=False)
    return httpx.Client(verify=tls, trust_env=False)


def url(door: FrontDoor, path: str = PULL) -> str:
    return f"https://127.0.0.1:{door.port}{path}"


def post(
    forwarder: Forwarder, path: str = PULL, content: bytes = b"x", timeout: float = 30.0
) -> httpx.Response:
    """A SuperNode's call."""
    to = f"http://127.0.0.1:{forwarder.port}{path}"
    with httpx.Client(trust_env=False) as client:
        return client.post(to, content=content, timeout=timeout)


def test_a_sites_fleet_call_reaches_superlink_and_back(
    door: FrontDoor, superlink: Any, identities: Path
) -> None:
    body = bytes(range(256)) * 4
    with client_of(identities / "s1") as client:
        headers = {"flwr-signature": "abc", "content-type": "application/x-protobuf"}
        answer = client.post(url(door), content=body, headers=headers)
    assert (answer.status_code, answer.content) == (200, body)
    assert answer.headers["content-type"] == "application/x-protobuf"
    path, got, sent_headers = superlink.requests[0]
    assert (path, got) == (PULL, body)
    assert {k.lower(): v for k, v in sent_headers.items()}["flwr-signature"] == "abc"


@pytest.mark.slow
def test_connections_that_say_nothing_are_few_and_soon_ended_and_a_site_goes_on(
    identities: Path,
    superlink: Any,
    told: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "_HANDSHAKE_S", 2.0)
    monkeypatch.setattr(front_door, "_SILENT_CONNECTIONS", 20)
    with (
        open_door(identities, superlink.server_port, told=told) as door,
        client_of(identities / "s1") as before,
        client_of(identities / "s1") as after,
        contextlib.ExitStack() as stack,
    ):
        assert before.post(url(door)).status_code == 200
        address = ("127.0.0.1", door.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(100)]
        closed = set[int]()

        def closes(num: int) -> Callable[[], bool]:
            def are_closed() -> bool:
                closed.update(one.fileno() for one in select.select(silent, [], [], 0)[0])
                return len(closed) >= num

            return are_closed

        eventually(closes(50), within_s=1.5)
        eventually(lambda: ("", "36 connections to it stand, and no more are taken") in told)
        assert before.post(url(door)).status_code == 200
        eventually(closes(100), within_s=10.0)
        assert after.post(url(door)).status_code == 200


LINES = [
    "POST /",
    "POST /v1/control/start-run",
    "POST /v1/fleet/",
    "POST /v1/fleet/pull-messages/../../control/start-run",
    "POST /v1/fleet/../control/start-run",
    "POST /v1/fleet/..%2fcontrol/start-run",
    "POST /v1/fleet/%2e%2e/control/start-run",
    "POST /v1/fleet//control/start-run",
    "POST //v1/fleet/pull-messages",
    "POST /v1/fleet/pull-messages?x=/v1/control/start-run",
    "POST /v1/fleet/pull-messages%00",
    "POST /V1/FLEET/pull-messages",
    "POST http://127.0.0.1/v1/fleet/pull-messages",
    "GET /v1/fleet/pull-messages",
    "HEAD /v1/fleet/pull-messages",
    "CONNECT /v1/fleet/pull-messages",
]


def test_nothing_but_a_post_to_a_plain_fleet_path_passes(
    door: FrontDoor, superlink: Any, identities: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for line in LINES:
            with connected(door, identities / "s2") as connection:
                headers = "host: 127.0.0.1\r\ncontent-length: 0\r\n\r\n"
                connection.sendall(f"{line} HTTP/1.1\r\n{headers}".encode())
                assert connection.recv(4096).split()[1] in (b"404", b"400"), line
    assert superlink.requests == []
    lines = [record.getMessage() for record in caplog.records if "fedwan" in record.name]
    told = "site s2 at 127.0.0.1 asked for 'POST /v1/control/start-run'; only Fleet calls pass"
    assert lines.count(told) == 1


@contextmanager
def connected(door: FrontDoor, identity: Path) -> Iterator[ssl.SSLSocket]:
    tls = Identity.load(identity).ssl_context(server=False)
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=5) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        yield connection


def test_headers_and_bodies_that_do_not_end_are_cut_off(
    door: FrontDoor,
    superlink: Any,
    identities: Path,
    told: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedwan.flower.front_door._HEADERS_S", 0.3)
    whole = f"POST {PULL} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()
    with connected(door, identities / "s1") as connection:
        for _ in range(2):
            connection.sendall(whole)
            assert b"200" in connection.recv(4096)
            time.sleep(0.35)  # who has nothing to ask may be silent
        connection.sendall(whole[:30])
        began = time.monotonic()
        connection.settimeout(0.1)
        with pytest.raises(OSError):
            while time.monotonic() < began + 5.0:
                connection.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        raise ConnectionResetError
    with client_of(identities / "s1") as client, contextlib.suppress(httpx.TransportError):
        answer = client.post(url(door), content=(bytes(1 << 20) for _ in range(20)))
        assert answer.status_code == 413  # or the door hangs up while we are still sending
    assert len(superlink.requests) == 2
    eventually(lambda: [site for site, text in told if "no whole body" in text] == ["s1"])
    assert ("s1", "the headers of a request of s1 took over 0.3 s") in told


def test_a_site_has_its_share_of_the_door_s_calls_and_of_its_log(
    door: FrontDoor,
    identities: Path,
    told: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = f"POST {PULL} HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n".encode()
    with contextlib.ExitStack() as calls:
        for _ in range(8):
            calls.enter_context(connected(door, identities / "s1")).sendall(begun)
        with client_of(identities / "s1") as greedy:
            eventually(lambda: greedy.post(url(door)).status_code == 503)
            assert "has 8 calls under way, and no more" in greedy.post(url(door)).text
            text = "site s1 has 8 calls under way, and no more are its share"
            eventually(lambda: ("s1", text) in told)
        with client_of(identities / "s2") as other:
            assert other.post(url(door)).status_code == 200
            for name, most in (("pull", 1 << 10), ("push", 1 << 14)):
                to = url(door, f"/v1/fleet/{name}-messages")
                assert other.post(to, content=bytes(most)).status_code == 200
                assert other.post(to, content=bytes(most + 1)).status_code == 413
    caplog.clear()
    with client_of(identities / "s1") as client:
        eventually(lambda: client.post(url(door)).status_code == 200)
        for number in range(12):
            assert client.post(url(door, f"/{number}")).status_code == 404
    assert 1 <= len([r for r in caplog.records if "site s1" in r.getMessage()]) <= 9


def test_a_site_that_never_stops_calling_is_held_to_a_rate_and_others_are_not(
    door: FrontDoor,
    superlink: Any,
    identities: Path,
    told: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_door, "_ANOTHER_CALL_AFTER_S", 60.0)
    with client_of(identities / "s1") as greedy, client_of(identities / "s2") as other:
        answers = [greedy.post(url(door)).status_code for _ in range(125)]
        assert answers == [200] * 120 + [503] * 5 and len(superlink.requests) == 120
        assert other.post(url(door)).status_code == 200
    eventually(lambda: [site for site, text in told if "calls a second" in text] == ["s1"])


def test_who_shows_no_site_s_certificate_gets_no_session(
    door: FrontDoor,
    identities: Path,
    foreign_identities: Path,
    told: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    site, coordinator = identities / "s1", identities / "coordinator"
    for own, is_old in ((None, 0), (foreign_identities / "s1", 0), (coordinator, 0), (site, 1)):
        tls = ssl.create_default_context(cafile=str(identities / "ca" / "ca.crt"))
        if own:
            tls.load_cert_chain(own / "identity.crt", own / "identity.key")
        if is_old:
            with pytest.warns(DeprecationWarning):
                tls.minimum_version = ssl.TLSVersion.TLSv1
                tls.maximum_version = ssl.TLSVersion.TLSv1_1
            tls.set_ciphers("ALL:@SECLEVEL=0")
        client = httpx.Client(verify=tls, trust_env=False)
        with client, pytest.raises(httpx.TransportError):
            client.post(url(door))
    foreign = "127.0.0.1 turned away: certificate of another authority"
    lines = [foreign, "127.0.0.1 turned away: unsuitable certificate purpose"]
    eventually(lambda: told == [("", line) for line in lines])
    assert [record.getMessage() for record in caplog.records] == lines


def test_superlink_away_or_in_trouble_is_503_which_flower_tries_again(
    door: FrontDoor, identities: Path, superlink: Any, told: list[tuple[str, str]]
) -> None:
    """Its disk is full, or its database locked: a SuperNode that hears 500 asks no more."""
    superlink.statuses = [500]
    with client_of(identities / "s1") as client:
        assert client.post(url(door)).status_code == 503
        assert client.post(url(door)).status_code == 200
        with open_door(identities) as nowhere:
            assert client.post(url(nowhere)).status_code == 503
    assert told == [], "the ServerApp may be in trouble, too"


@pytest.mark.slow
def test_a_supernodes_call_waits_for_a_door_that_comes_later_and_no_other_leaves_the_site(
    identities: Path, superlink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    caplog.set_level(logging.INFO, "fedwan")
    with forwarding(identities / "s1", port) as forwarder:
        assert post(forwarder, "/v1/control/start-run").status_code == 404
        assert post(forwarder, "/v1/fleet/%2e%2e/control/start-run").status_code == 404
        answer = in_thread(lambda: post(forwarder))
        time.sleep(0.8)  # in which it is tried again, but not said again
        with open_door(identities, superlink.server_port, port):
            assert answer().content == b"x"
        assert [path for path, _, _ in superlink.requests] == [PULL]
        assert not forwarder.take_lost()
    told = [record.getMessage() for record in caplog.records if "front door" in record.getMessage()]
    name = f"front door 127.0.0.1:{port}"
    assert told == [f"{name} is away: Connection refused; trying on", f"{name} answers"]


def test_an_answer_that_comes_when_a_supernode_has_given_up_is_known_as_lost(
    identities: Path, superlink: Any, door: FrontDoor
) -> None:
    """SuperLink hands out a ticket once."""
    cases = (("/v1/fleet/get-run", b"", ""), (BEAT, b"x", ""), (PULL, b"ticket", "given up"))
    with forwarding(identities / "s1", door.port) as forwarder:
        for path, answered, lost in cases:
            superlink.content = answered
            superlink.may_answer.clear()
            with pytest.raises(httpx.ReadTimeout):
                post(forwarder, path, timeout=0.1)
            superlink.may_answer.set()
            eventually(lambda: not forwarder._server.server_state.tasks)
            assert lost in (told := forwarder.take_lost()) and bool(told) == bool(lost)


def test_a_door_that_closes_after_its_run_is_no_trouble(
    identities: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedwan")
    with forwarding(identities / "s1", port := free_port()) as forwarder:
        for forwarder.is_over in (True, True, False):
            forwarder._trouble(PULL, OSError("hung up"))
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    away = f"front door 127.0.0.1:{port} is away: hung up; trying on"
    assert told[-2:] == [("INFO", "waits for the coordinator's next run"), ("WARNING", away)]


def test_a_door_that_is_the_data_plane_is_told_in_one_line(
    identities: Path, tmp_path: Path
) -> None:
    with (
        serving(Bench(tmp_path).hub, identities) as plane,
        forwarding(identities / "s1", plane.port) as forwarder,
    ):
        assert post(forwarder).status_code == 502
        door = f"127.0.0.1:{plane.port}"
        assert str(forwarder.refusal).startswith(f"door = '{door}' is the coordinator's data plane")


def test_a_refusal_stands_and_a_door_that_has_answered_is_taken_for_no_data_plane(
    identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedwan.flower.forwarder.is_data_plane", lambda *_: True)
    with forwarding(identities / "s1", free_port()) as forwarder:
        forwarder._has_met = True
        forwarder._trouble(PULL, OSError("hung up"), is_lost=True)
        assert forwarder.refusal is None
        forwarder._trouble(PULL, refused := IdentityError("is revoked"))
        forwarder._trouble(BEAT, OSError("hung up"))
        assert forwarder.refusal is refused


def test_a_supernode_whose_place_another_one_took_ends_and_its_service_does_not(
    identities: Path, door: FrontDoor
) -> None:
    with forwarding(identities / "s1", door.port) as forwarder, client_of(identities / "s1") as one:
        assert post(forwarder).status_code == 200
        register = url(door, "/v1/fleet/register-node")
        assert one.post(register, headers={front_door.KEY: "another"}).status_code == 200
        answer = post(forwarder)
        assert answer.status_code == 401
        assert forwarder.refusal is None and "has this identity" in forwarder.take_lost()


FAB = "/v1/fleet/get-fab"
BEAT = "/v1/fleet/send-node-heartbeat"


def test_what_a_supernode_hears_of_each_answer_and_what_is_noticed(
    identities: Path, superlink: Any, door: FrontDoor
) -> None:
    """Flower's client takes any 2xx, and goes where a 3xx leads; nothing is asked for twice."""
    with forwarding(identities / "s1", door.port) as forwarder:
        for path, answers, status, lost in (
            (BEAT, [None], 502, ""),  # which carries nothing
            (PULL, [None], 502, "answer"),
            (PULL, [401], 401, "SuperLink is a new one"),
            *((FAB, [odd], 502, "answer") for odd in (201, 206, 307)),
        ):
            superlink.statuses = answers
            answer = post(forwarder, path, b"code")
            assert (answer.status_code, "location" in answer.headers) == (status, False)
            assert status == 401 or b"code" not in answer.content
            told = forwarder.take_lost()
            assert lost in told and bool(told) == bool(lost)
            assert not forwarder.take_lost() and forwarder.refusal is None
            assert [path for path, *_ in superlink.requests] == [path]
            superlink.requests.clear()
        for path, num_asked in ((PULL, 3), ("/v1/fleet/get-run", 1)):  # there is no ticket yet
            superlink.num_empty = 2
            assert bool(post(forwarder, path).content) == (path == PULL)
            assert len(superlink.requests) == num_asked
            superlink.requests.clear()


@pytest.mark.parametrize("when", ["another authority", "revoked before", "revoked meanwhile"])
def test_a_site_that_is_refused_learns_it_in_one_line(
    authority: pki.Authority,
    foreign_identities: Path,
    superlink: Any,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Forwarder, "_patience_s", 0.0)
    if when == "revoked before":
        authority.revoke("s1")
    ours = authority.directory
    theirs = foreign_identities if when == "another authority" else ours
    with (
        open_door(theirs, superlink.server_port) as door,
        forwarding(ours / "s1", door.port) as forwarder,
    ):
        if when == "revoked meanwhile":  # on the connection that it has
            assert post(forwarder).status_code == 200
            authority.revoke("s1")
        waiting = in_thread(lambda: post(forwarder))
        eventually(lambda: forwarder.refusal is not None)
        text = str(forwarder.refusal)
        says = "did not prove to be this run's coordinator"
        if when != "another authority":
            says = "is revoked; delete identity.key there, and request anew: fedwan pki request s1"
        assert says in text and "\n" not in text
        assert len(superlink.requests) == (when == "revoked meanwhile")
    waiting()


def test_a_list_that_lapsed_at_the_coordinator_keeps_a_site_waiting_for_another(
    authority: pki.Authority, superlink: Any
) -> None:
    ours = authority.directory
    crl = ours / "coordinator" / "crl.pem"
    good = crl.read_bytes()
    with (
        open_door(ours, superlink.server_port) as door,
        forwarding(ours / "s1", door.port) as forwarder,
    ):
        let_lapse(authority)
        with client_of(ours / "s1") as client:
            answer = client.post(url(door))
        assert answer.status_code == 503 and "has to bring a new crl.pem" in answer.text
        waiting = in_thread(lambda: post(forwarder))
        eventually(lambda: "its log says why" in forwarder._said)
        crl.write_bytes(good)
        assert waiting().status_code == 200 and forwarder.refusal is None


@pytest.mark.slow
def test_a_stranger_in_the_door_s_place_ends_no_site_that_it_has_answered(
    identities: Path, foreign_identities: Path, superlink: Any
) -> None:
    port, target = free_port(), superlink.server_port
    with forwarding(identities / "s1", port) as forwarder:
        with open_door(identities, target, port):
            assert post(forwarder).status_code == 200
        with open_door(foreign_identities, target, port):
            waiting = in_thread(lambda: post(forwarder))
            eventually(lambda: "certificate verify failed" in forwarder._said)
        with open_door(identities, target, port):
            assert waiting().status_code == 200 and forwarder.refusal is None


def test_a_renewed_identity_is_shown_at_both_ends_though_it_cannot_be_read_for_a_moment(
    authority: pki.Authority, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_RENEW_S", 0.05)
    ours, load_into, loaded = authority.directory, Identity.load_into, []

    def failing_once(self: Identity, context: ssl.SSLContext) -> None:
        loaded.append(self.expires)
        if len(loaded) == 1:
            raise OSError("Too many open files")
        load_into(self, context)

    with (
        open_door(ours, superlink.server_port) as door,
        forwarding(ours / "s1", door.port) as forwarder,
    ):
        monkeypatch.setattr(Identity, "load_into", failing_once)
        authority.renew("s1", days=1)
        authority.renew("coordinator", days=2)
        eventually(lambda: len(loaded) == 3)
        roles: list[tuple[str, Any]] = [("s1", "site"), ("coordinator", "coordinator")]
        assert set(loaded) == {Identity.load(ours / name, role).expires for name, role in roles}
        assert post(forwarder).status_code == 200


def test_a_site_that_trusts_another_authority_now_takes_no_door_of_the_first(
    authority: pki.Authority, superlink: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As once all have moved to the second one."""
    monkeypatch.setattr(relay, "_RENEW_S", 0.05)
    monkeypatch.setattr(Forwarder, "_patience_s", 0.0)
    ours, second = authority.directory, pki.Authority.make(tmp_path / "second", None)
    for file in ("ca.crt", "crl.pem"):
        both = [(one / "ca" / file).read_bytes() for one in (ours, second.directory)]
        (ours / "coordinator" / file).write_bytes(b"".join(both))
    with (
        open_door(ours, superlink.server_port) as door,
        forwarding(ours / "s1", door.port) as forwarder,
    ):
        assert post(forwarder).status_code == 200
        second.sign(ours / "s1" / "identity.csr")
        for file in ("ca.crt", "identity.crt"):
            (ours / "s1" / file).write_bytes((second.directory / "s1" / file).read_bytes())
        eventually(lambda: post(forwarder).status_code == 503)
        assert "certificate verify failed" in forwarder._said


def test_an_answer_that_is_too_long_is_not_held_in_memory(
    door: FrontDoor, superlink: Any, identities: Path
) -> None:
    superlink.content = bytes(relay._MOST_ANSWERED + 1)
    with forwarding(identities / "s1", door.port) as forwarder:
        answer = post(forwarder)
    assert answer.status_code == 502 and "too much" in answer.text


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_code_that_is_neither_the_installed_fedwan_s_nor_approved_is_handed_to_nobody(
    door: FrontDoor, superlink: Any, identities: Path
) -> None:
    own = build_fab(installed_app())

    def bundle(content: bytes) -> bytes:
        return bytes(GetFabResponse(fab=Fab(hash_str="x", content=content)).SerializeToString())

    def ask(forwarder: Forwarder, answered: bytes) -> httpx.Response:
        superlink.content = answered
        return post(forwarder, FAB)

    sha256 = hashlib.sha256(own + b"0").hexdigest()
    with forwarding(identities / "s1", door.port) as forwarder:
        assert ask(forwarder, bundle(own)).status_code == 200 and forwarder.refusal is None
        for content in (bundle(own + b"0"), b"\xff"):
            answer = ask(forwarder, content)
            assert answer.status_code == 403 and own not in answer.content
        assert "no bundle where one was asked for" in str(forwarder.refusal)
        ask(forwarder, bundle(own + b"0"))
        assert f"add a line bundles: [{sha256}] to SITE.yaml" in str(forwarder.refusal)
    with forwarding(identities / "s1", door.port, [sha256]) as forwarder:
        for more, status in ((b"", 200), (b"0", 200), (b"1", 403)):
            assert ask(forwarder, bundle(own + more)).status_code == status
