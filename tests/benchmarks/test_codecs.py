"""The benchmark of the codecs."""

from __future__ import annotations

import torch

from benchmarks.codecs import delta_like, measure_codec, pix2pix_layout
from fedwan.codecs import int4


def test_the_values_are_those_of_pix2pix() -> None:
    assert sum(spec.num_values for spec in pix2pix_layout(64).values()) == 57_182_660


def test_a_row_has_the_columns_and_the_codecs_own_figures() -> None:
    layout = pix2pix_layout(4)
    row = measure_codec(int4(), layout, delta_like(layout, torch.device("cpu")), passes=1)
    columns = "codec device bits_per_value encode_mb_s decode_mb_s rel_error"
    assert list(row) == columns.split()
    assert row["codec"] == "int4" and row["device"] == "cpu"
    assert 4.125 < row["bits_per_value"] < 4.5
    assert 0.1 < row["rel_error"] < 0.3
