"""What comes with a contribution under masks."""

from __future__ import annotations

from typing import Any

import pytest

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.unmasking import SHARE_BYTES, SIGNATURE_BYTES, Unmasking, check_bundle

MOST = 5 * SHARE_BYTES
"""Of what is sealed for each of three sites."""


def bundle(**changes: Any) -> wire.MaskBundle:
    parts = {"sealed": [bytes(MOST)] * 3, "hashes": [bytes(SHARE_BYTES)] * 3, "basis": bytes(32)}
    return wire.MaskBundle(**(parts | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sealed": [bytes(MOST)] * 2},
        {"sealed": [bytes(MOST), bytes(MOST), bytes(MOST - 1)]},
        {"sealed": [bytes(MOST + 1)] * 3},
        {"hashes": [bytes(SHARE_BYTES)] * 4},
        {"hashes": [bytes(SHARE_BYTES), bytes(SHARE_BYTES), bytes(SHARE_BYTES + 1)]},
        {"basis": bytes(31)},
    ],
)
def test_shares_of_another_number_or_length_than_the_sites_need_are_refused(
    changes: dict[str, Any],
) -> None:
    check_bundle(bundle(), 3)
    with pytest.raises(PayloadError, match="share"):
        check_bundle(bundle(**changes), 3)


def test_a_site_answers_each_question_once_and_by_a_signature_of_the_right_length() -> None:
    names = ["s1", "s2", "s3"]
    unmasking = Unmasking(names, 2, 0, 4, bytes(32), {name: bundle() for name in names})
    for num_bytes in (0, SIGNATURE_BYTES - 1, SIGNATURE_BYTES + 1):
        unmasking.hear("s1", wire.Unmasked(signature=bytes(num_bytes)))
    assert unmasking.waits_for == names
    signed, shared = (wire.Unmasked(version=4) for _ in range(2))
    signed.signature, shared.shares[:] = bytes(SIGNATURE_BYTES), [bytes(SHARE_BYTES)] * 3
    for answer in (signed, shared):
        unmasking.hear("s1", answer)
        assert [unmasking.asks(name, answer) for name in names] == [False, True, True]
        unmasking.hear("s2", answer)
    assert unmasking.waits_for == ["s3"]
