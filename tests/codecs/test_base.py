"""Codecs by name."""

from __future__ import annotations

import pytest

from fedwan.codecs import codec_by_name
from fedwan.errors import ConfigError

NAMES = ("fp32", "bf16", "int8", "int4", "float4", "topk2")


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_found_by_its_name(name: str) -> None:
    assert codec_by_name(name).name == name


def test_an_unknown_codec_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="codec 'int3' does not exist; choose one of fp32, bf16"):
        codec_by_name("int3")


@pytest.mark.parametrize(
    ("name", "meant"), [("int3", "int4"), ("BF16", "bf16"), ("topk", "topk2"), ("int-8", "int8")]
)
def test_an_unknown_codec_names_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"topk2; did you mean '{meant}'[?]$"):
        codec_by_name(name)


def test_codecs_have_encodings_of_their_own() -> None:
    assert len({codec_by_name(name).encoding for name in NAMES} - {0}) == len(NAMES)
