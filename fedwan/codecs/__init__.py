"""Codecs: how parameters are written on the wire, one file for each kind of them."""

from fedwan.codecs.base import Codec, Coded, Plain, Reading, bf16, fp32, plain, with_feedback
from fedwan.codecs.blocks import int2, int4, int8
from fedwan.codecs.masked import BITS, masked
from fedwan.codecs.payload import Payload
from fedwan.codecs.topk2 import topk2
from fedwan.errors import ConfigError
from fedwan.names import nearest

__all__ = [
    "Coded",
    "Codec",
    "Payload",
    "Plain",
    "Reading",
    "bf16",
    "codec_by_name",
    "codecs_by_name",
    "fp32",
    "int2",
    "int4",
    "int8",
    "plain",
    "topk2",
    "with_feedback",
]


def codecs_by_name(sites: int = 1) -> dict[str, Codec]:
    """All that there are, for so many sites."""
    every = (fp32(), bf16(), int8(), int4(), int2(), topk2())
    under_masks = (masked(bits, sites) for bits in BITS)
    return {codec.name: codec for codec in (*every, *under_masks)}


def codec_by_name(name: str, sites: int = 1) -> Codec:
    """The codec that `codec.up` or `codec.down` names, for so many sites; else a `ConfigError`."""
    codecs = codecs_by_name(sites)
    if name not in codecs:
        near = nearest(name, codecs)
        raise ConfigError(f"codec {name!r} does not exist; choose one of {', '.join(codecs)}{near}")
    return codecs[name]
