"""Patience with calls that fail."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from fedwan.errors import (
    DiskFull,
    FedwanError,
    IdentityError,
    LinkLost,
    NotJoined,
    PayloadError,
    SessionLost,
)
from fedwan.link import rpc
from fedwan.link import wire_pb2 as wire
from fedwan.link.rpc import LONGEST_WAIT_S, MAX_MESSAGE_BYTES, Patience, code_of
from tests.planes import RUN, Bench, Failure, joined

Code = grpc.StatusCode


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits, on a clock that moves by them alone."""
    waits: list[float] = []
    monkeypatch.setattr(rpc.time, "monotonic", lambda: sum(waits))
    return waits


def test_waits_double_up_to_a_limit_and_end_with_patience(slept: list[float]) -> None:
    tries = Patience("host:1", 60.0, lambda: None, slept.append)
    said = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Failed to "
    said += "connect to remote host: Connection refused"
    why = r"host:1 could not be reached for 60 s \(Connection refused\).*patience_s"
    with pytest.raises(LinkLost, match=why):
        while True:
            tries.failed(Failure(Code.UNAVAILABLE, said))
    assert slept[:4] == [0.05, 0.1, 0.2, 0.4] and max(slept) == LONGEST_WAIT_S
    assert 60 < sum(slept) < 60 + 2 * LONGEST_WAIT_S
    for until_s in (100.0, 150.0):  # something came through: it counts anew
        tries.succeeded()
        while sum(slept) < until_s:
            tries.failed(Failure(Code.UNAVAILABLE, said))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code.UNAUTHENTICATED, IdentityError),
        (Code.FAILED_PRECONDITION, SessionLost),
        (Code.NOT_FOUND, NotJoined),
        (Code.INVALID_ARGUMENT, PayloadError),
        (Code.UNIMPLEMENTED, LinkLost),
    ],
)
def test_what_cannot_pass_is_raised_at_once(
    slept: list[float], code: grpc.StatusCode, expected: type[FedwanError]
) -> None:
    with pytest.raises(expected, match="why"):
        Patience("host:1", 60.0, lambda: None, slept.append).failed(Failure(code, "why"))
    assert not slept


def test_a_message_that_is_too_large_is_not_sent_again(tmp_path: Path, identities: Path) -> None:
    report = wire.QualityReport(run_id=RUN, figures_json="{}", samples=bytes(MAX_MESSAGE_BYTES))
    with joined(Bench(tmp_path), identities) as link, pytest.raises(PayloadError, match="too much"):
        link.report(report)


def test_a_disk_that_is_full_at_the_coordinator_is_waited_for(slept: list[float]) -> None:
    tries = Patience("host:1", 60.0, lambda: None, slept.append)
    tries.failed(Failure(code_of(DiskFull("the disk of /srv/run is full"))))
    assert slept == [0.05]


def test_a_certificate_that_is_refused_is_noticed_at_once_and_one_that_expires_later_too(
    slept: list[float],
) -> None:
    is_final = True

    def diagnose() -> str | None:
        if is_final:
            raise IdentityError("certificate has expired")
        return None

    tries = Patience("host:1", 300.0, diagnose, slept.append)
    with pytest.raises(IdentityError, match="expired"):
        tries.failed(Failure(Code.UNAVAILABLE))
    assert slept == []
    is_final = False
    for _ in range(12):
        tries.failed(Failure(Code.UNAVAILABLE))
    is_final = True
    with pytest.raises(IdentityError):
        tries.failed(Failure(Code.UNAVAILABLE))


def test_a_complaint_that_is_not_final_is_told_when_patience_ends(slept: list[float]) -> None:
    tries = Patience("host:1", 10.0, lambda: "a strange certificate", slept.append)
    with pytest.raises(LinkLost, match=r"for 10 s \(a strange certificate\)"):
        while True:
            tries.failed(Failure(Code.UNAVAILABLE))
