"""Patience with calls that fail."""

from __future__ import annotations

import grpc
import pytest

from fedwan.errors import FedwanError, IdentityError, LinkLost, PayloadError, SessionLost
from fedwan.link import rpc
from fedwan.link.rpc import LONGEST_WAIT_S, Patience

Code = grpc.StatusCode


class Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, text: str = "text") -> None:
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits, on a clock that moves by them alone."""
    waits: list[float] = []
    monkeypatch.setattr(rpc.time, "monotonic", lambda: sum(waits))
    return waits


def patience(slept: list[float]) -> Patience:
    return Patience("host:1", 60.0, lambda: None, slept.append)


def test_waits_double_up_to_a_limit_and_end_with_patience(slept: list[float]) -> None:
    tries = patience(slept)
    with pytest.raises(LinkLost, match=r"host:1 could not be reached for 60 s .*patience_s"):
        while True:
            tries.failed(Failure(Code.UNAVAILABLE))
    assert slept[:4] == [0.05, 0.1, 0.2, 0.4] and max(slept) == LONGEST_WAIT_S
    assert 60 < sum(slept) < 60 + 2 * LONGEST_WAIT_S


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code.UNAUTHENTICATED, IdentityError),
        (Code.FAILED_PRECONDITION, SessionLost),
        (Code.INVALID_ARGUMENT, PayloadError),
        (Code.UNIMPLEMENTED, LinkLost),
    ],
)
def test_what_cannot_pass_is_raised_at_once(
    slept: list[float], code: grpc.StatusCode, expected: type[FedwanError]
) -> None:
    with pytest.raises(expected, match="why"):
        patience(slept).failed(Failure(code, "why"))
    assert slept == []


def test_a_chunk_damaged_on_the_way_is_sent_again_three_times(slept: list[float]) -> None:
    tries = patience(slept)
    for _ in range(3):
        tries.failed(Failure(Code.INVALID_ARGUMENT, "chunk at 0 was damaged on the way"))
    with pytest.raises(PayloadError, match="damaged"):
        tries.failed(Failure(Code.INVALID_ARGUMENT, "chunk at 0 was damaged on the way"))


def test_a_certificate_that_is_refused_is_noticed_at_once_and_one_that_expires_later_too(
    slept: list[float],
) -> None:
    complaints: list[str | None] = ["certificate has expired"]
    tries = Patience("host:1", 300.0, lambda: complaints[0], slept.append)
    with pytest.raises(IdentityError, match="expired"):
        tries.failed(Failure(Code.UNAVAILABLE))
    assert slept == []
    complaints[0] = None
    for _ in range(12):
        tries.failed(Failure(Code.UNAVAILABLE))
    complaints[0] = "certificate has expired"
    with pytest.raises(IdentityError):
        tries.failed(Failure(Code.UNAVAILABLE))
