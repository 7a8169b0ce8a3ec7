"""A codec for each network: a discriminator exactly and its generator in 4 bits, in one payload.

The payload's table names each tensor's encoding (docs/wire.md), so that it needs no word of which
network goes how; what a reader expects of each, its own configuration says.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan.codecs.base import Codec

__all__ = ["by_network"]


def by_network(rest: Codec, own: Mapping[str, Codec]) -> Codec:
    """Parameters of each network in its own codec; what is owed stays with each.

    Args:
        rest: of the networks that have none of their own.
        own: by network; each a codec for all networks.
    """
    if not own:
        return rest
    parts = (rest, *own.values())
    assert not any(part.networks for part in parts), "each part is for all networks alike"
    texts = (f"{network}: {codec.name}" for network, codec in own.items())
    return rest._replace(
        name=f"{rest.name} ({', '.join(texts)})",
        is_exact=all(part.is_exact for part in parts),
        has_feedback=any(part.has_feedback for part in parts),
        networks=dict(own),
    )
