"""The ring of eight Gaussians."""

from __future__ import annotations

import pytest
import torch

from fedwan.data.ring8 import RADIUS, SIGMA, load_ring8, ring8_centres


def test_points_scatter_about_the_centre_of_their_label() -> None:
    train, held_out = load_ring8()
    for part in (train, held_out):
        offsets = part.x - ring8_centres()[part.y]
        assert float(offsets.std()) == pytest.approx(SIGMA, rel=0.05)
        assert torch.bincount(part.y).unique().numel() == 1


def test_centres_lie_evenly_on_the_circle() -> None:
    centres = ring8_centres()
    assert torch.allclose(centres.norm(dim=1), torch.full((8,), RADIUS))
    gaps = (centres - centres.roll(1, dims=0)).norm(dim=1)
    assert torch.allclose(gaps, gaps[0].expand(8), atol=1e-6)


def test_every_process_sees_the_same_points() -> None:
    assert torch.equal(load_ring8()[0].x, load_ring8()[0].x)
