"""Mixtures of Gaussians."""

from __future__ import annotations

import pytest
import torch

from fedwan.data.mixture import Mixture, draw_mixture

FAR_APART = Mixture(torch.tensor([[0.0, 0.0, 0.0], [100.0, 0.0, 0.0]]), sigma=2.0)


def test_points_have_the_spread_about_the_centre_of_their_label() -> None:
    x, y = draw_mixture(FAR_APART, 3000, "test", "train")
    assert x.shape == (6000, 3)
    for mode, centre in enumerate(FAR_APART.centres):
        offsets = x[y == mode] - centre
        assert len(offsets) == 3000
        assert offsets.std(dim=0).tolist() == pytest.approx([2.0] * 3, rel=0.05)
        assert offsets.mean(dim=0).tolist() == pytest.approx([0.0] * 3, abs=0.15)


def test_a_draw_follows_from_name_and_part_alone() -> None:
    first, again, part, name = (
        draw_mixture(FAR_APART, 10, *of).x
        for of in (("a", "train"), ("a", "train"), ("a", "held out"), ("b", "train"))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, part)
    assert not torch.equal(first, name)
