"""What many sites may have on its way at once."""

from __future__ import annotations

from fedwan.link.limits import FEW_SITES, MIN_WINDOW_BYTES, WINDOWS_BYTES, window_options


def test_windows_are_divided_among_many_sites_and_left_alone_for_a_few() -> None:
    assert window_options(1, 4) == window_options(FEW_SITES, 4) == []
    for num_sites, channels in ((FEW_SITES + 1, 4), (16, 1), (64, 4), (64, 1)):
        options = dict(window_options(num_sites, channels))
        assert options["grpc.http2.bdp_probe"] == 0
        together = options["grpc.http2.lookahead_bytes"] * num_sites * channels
        assert 0.9 * WINDOWS_BYTES < together <= WINDOWS_BYTES


def test_a_window_is_never_too_small_for_a_part_of_a_chunk() -> None:
    assert dict(window_options(10_000, 16))["grpc.http2.lookahead_bytes"] == MIN_WINDOW_BYTES
