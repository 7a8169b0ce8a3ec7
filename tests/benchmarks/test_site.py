"""The table of what a site does by its own means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import site
from fedwan.data import find_source

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_variant_has_a_row() -> None:
    with site.size_words(False, None) as (words, batch):
        words = [*words, "model.width=4", "model.depth=2"]
        rows = [site.measure(v, words, batch, is_quick=True) for v in site.variants(CPU)]
    names = "variant device size steps epoch_s held_mb d_loss g_loss".split()
    assert all(list(row) == names for row in rows)
    assert all(row["epoch_s"] > 0 and row["device"] == "cpu" for row in rows)
    by_name = {row["variant"]: row for row in rows}
    plain, again = by_name["baseline"], by_name["recomputed blocks"]
    assert (plain["d_loss"], plain["g_loss"]) == (again["d_loss"], again["g_loss"])
    parallel = by_name["data parallel, 2"]
    held = [parallel["held_mb"]]
    for stage in (1, 2, 3):
        row = by_name[f"ZeRO-{stage}, 2"]
        assert (row["d_loss"], row["g_loss"]) == (parallel["d_loss"], parallel["g_loss"])
        assert row["held_mb"] < held[-1]
        held.append(row["held_mb"])
    assert held[-1] == pytest.approx(held[0] / 2, rel=0.1)
    assert by_name["weights in bf16"]["held_mb"] == pytest.approx(
        plain["held_mb"] * 10 / 16, rel=0.05
    )
    assert by_name["accumulation of 4"]["size"].endswith("batch 64")
    assert by_name["AMP, bf16-mixed"]["g_loss"] == pytest.approx(plain["g_loss"], rel=0.05)


@pytest.mark.slow
def test_pairs_of_full_size_are_edges_beside_their_photograph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(find_source("photo_edges").load()[0].x) >= site.NUM_PAIRS
    monkeypatch.setattr(site, "NUM_PAIRS", 5)
    site.draw_pairs(tmp_path)
    found = sorted(tmp_path.glob("*.png"))
    assert len(found) == 5
    image = site.Image.open(found[0])
    assert image.size == (2 * site.SIDE, site.SIDE)
    red, green, blue = image.crop((0, 0, site.SIDE, site.SIDE)).convert("RGB").split()
    assert red.tobytes() == green.tobytes() == blue.tobytes(), "edges are grey"
