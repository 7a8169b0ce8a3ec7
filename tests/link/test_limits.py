"""What many sites may have on its way at once."""

from __future__ import annotations

from fedwan.link.limits import FEW_SITES, WINDOWS_BYTES, window_options
from fedwan.link.stripes import START_CHANNELS


def test_windows_are_divided_among_many_sites_and_left_alone_for_a_few() -> None:
    assert window_options(1) == window_options(FEW_SITES) == []
    for num_sites in (FEW_SITES + 1, 16, 64):
        options = dict(window_options(num_sites))
        assert options["grpc.http2.bdp_probe"] == 0
        together = options["grpc.http2.lookahead_bytes"] * num_sites * START_CHANNELS
        assert 0.9 * WINDOWS_BYTES < together <= WINDOWS_BYTES
