"""The networks of pix2pix."""

from __future__ import annotations

import pytest
import torch

from fedwan.models.pix2pix import PatchDiscriminator, UNetGenerator


@pytest.mark.parametrize("settings", [{}, {"norm": "instance"}])
def test_by_default_they_are_the_paper_s_networks_weight_for_weight(
    settings: dict[str, str],
) -> None:
    with torch.device("meta"):  # without memory
        networks = (UNetGenerator(**settings), PatchDiscriminator(**settings))
    counts = [sum(p.numel() for p in network.parameters()) for network in networks]
    assert counts == [54_413_955, 2_768_705]


def test_patches_are_judged_each_on_its_own_and_a_logit_sees_70_pixels() -> None:
    for size, patches in ((32, 2), (64, 6)):
        logits = PatchDiscriminator(4, width=4)(torch.randn(2, 4, size, size))
        assert logits.shape == (2, 1, patches, patches)
    network = PatchDiscriminator(1, width=2).eval()
    x = torch.randn(1, 1, 128, 128, requires_grad=True)
    (gradient,) = torch.autograd.grad(network(x)[0, 0, 7, 7], x)
    seen = (gradient[0, 0] != 0).any(dim=0).nonzero().squeeze(1)
    assert int(seen[-1] - seen[0]) + 1 == 70


def test_what_is_dropped_depends_on_the_generator_of_the_draws_alone() -> None:
    network, x = UNetGenerator(1, 3, width=4, depth=5), torch.randn(2, 1, 32, 32)
    before = torch.random.get_rng_state()
    first, again, other = (network(x, torch.Generator().manual_seed(n)) for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)
