"""The payload's bytes, as docs/wire.md shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedwan.codecs import Codec, Payload, bf16, fp32
from fedwan.codecs.payload import framed_bytes, tensor_bytes, tensor_from_bytes
from fedwan.state import Role
from tests.support import StrictSource, read_all, same_bits, spec

ROOT = Path(__file__).parents[2]
STATE = {"g/n": torch.tensor(3), "g/w": torch.tensor([1.0, -2.5])}
LAYOUT = {"g/n": spec((), Role.COUNTER, torch.int64), "g/w": spec((2,))}

# Made by:
# python -c "from tests.codecs.test_payload import *; print(hex_of(fp32()), hex_of(bf16()))"
GOLDEN = {
    "fp32": "4657504c0100000002000000240000000300672f6e000400080000000000000003"
    "00672f77010001020000000800000000000000000000000300000000000000"
    "0000803f000020c0880bf6757b93ef31",
    "bf16": "4657504c0100000002000000240000000300672f6e000400080000000000000003"
    "00672f77020001020000000400000000000000000000000300000000000000"
    "803f20c0000000000f23ec9415fe4881",
}


def hex_of(codec: Codec) -> str:
    """The example's payload."""
    return read_all(codec.encode(STATE, {}, LAYOUT)[0]).hex()


@pytest.mark.parametrize("codec", [fp32(), bf16()], ids=["fp32", "bf16"])
def test_the_bytes_are_those_that_were_committed(codec: Codec) -> None:
    assert hex_of(codec) == GOLDEN[codec.name]


@pytest.mark.parametrize("codec", [fp32(), bf16()], ids=["fp32", "bf16"])
def test_committed_bytes_are_still_read(codec: Codec) -> None:
    payload = StrictSource(bytes.fromhex(GOLDEN[codec.name]))
    assert same_bits(codec.decode(payload, LAYOUT), STATE)


def test_the_command_in_the_comment_makes_them() -> None:
    command = "from tests.codecs.test_payload import *; print(hex_of(fp32()), hex_of(bf16()))"
    out = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.split() == [GOLDEN["fp32"], GOLDEN["bf16"]]


def test_the_documentation_shows_these_bytes() -> None:
    page = (ROOT / "docs" / "wire.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", page[page.index("An example, byte by byte") :], re.DOTALL)
    for name, parts in (("fp32", blocks[:1]), ("bf16", blocks[:2])):
        assert _lay_out(parts).hex() == GOLDEN[name]


def _lay_out(blocks: list[str]) -> bytes:
    """Bytes that the page's lines put at their offsets; a later block overwrites an earlier one."""
    data = bytearray(80)
    for line in "".join(blocks).splitlines():
        found = re.match(r" ?(\d+) +((?:[0-9a-f]{2} {1,2})+) ", line)
        if found:
            value = bytes.fromhex(found[2])
            data[int(found[1]) : int(found[1]) + len(value)] = value
    return bytes(data)


def test_a_payload_of_several_buffers_reads_like_one() -> None:
    payload = Payload([b"", b"abc", b"", b"defg", b"h"], 0)
    whole = b"abcdefgh"
    assert payload.num_bytes == len(whole)
    for begin in range(len(whole) + 1):
        for end in range(begin, len(whole) + 1):
            assert bytes(payload.read(begin, end - begin)) == whole[begin:end]


def test_framed_bytes_counts_names_in_utf_8() -> None:
    sizes = [framed_bytes([(name, spec(()), 8)]) for name in ("abcdefgh", "äbcdefgäö")]
    assert sizes[1] - sizes[0] in (0, 8)
    payload, _ = fp32().encode({"äö": torch.tensor(1.0)}, {}, {"äö": spec(())})
    assert payload.num_bytes == framed_bytes([("äö", spec(()), 4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensor_bytes_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(6)[: max(1, torch.Size(shape).numel())].to(dtype)
    value = value[: torch.Size(shape).numel()].reshape(shape)
    for data in (tensor_bytes(value), bytes(tensor_bytes(value))):
        back = tensor_from_bytes(data, dtype, shape)
        assert same_bits({"x": back}, {"x": value})
