"""The pix2pix recipe."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.data import Shard
from fedwan.errors import ConfigError
from fedwan.output.samples import draw_samples
from fedwan.rng import NamedGenerators
from fedwan.state import hash_state
from fedwan.workloads.base import Batch
from fedwan.workloads.descent import Descent
from fedwan.workloads.settings import resolve_page
from sites import flow, gan, pix2pix
from tests.sites.support import Run, equal, weights

FAST = {name: InnerConfig(lr=2e-3, beta1=0.5) for name in pix2pix.NETWORKS}


def config(seed: int = 0, **model: object) -> Config:
    return Config(
        workload="pix2pix",
        seed=seed,
        sites=2,
        data=DataConfig("photo_edges", batch=8),
        inner=copy.deepcopy(FAST),
        model={"width": 4, **model},
    )


def few(shard: Shard) -> Shard:
    """The same with fewer held-out pairs."""
    return dataclasses.replace(shard, held_out=Batch(*(part[:64] for part in shard.held_out)))


# A step ------------------------------------------------------------------------------------------


def test_each_network_gets_the_gradient_of_its_own_loss_at_the_present_weights() -> None:
    run = Run(pix2pix, config())
    run.step(2)
    batch = next(run.stream)
    networks = run.workload.networks
    d, g = networks["discriminator"], networks["generator"]
    seen: dict[str, list[Tensor]] = {}

    def keep(names: Sequence[str]) -> None:
        assert sorted(names) == sorted(networks)
        for name in names:
            params = networks[name].parameters()
            seen[name] = [p.grad.clone() for p in params if p.grad is not None]

    def bce(logits: Tensor, target: float) -> Tensor:
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

    # The two losses apart, each through its own graph: nothing of G's loss may be in D's gradient.
    edges, photo = batch.x[:, :1], batch.x[:, 1:]

    def made() -> Tensor:
        image: Tensor = g(edges, NamedGenerators(0, "twin")["dropout"])
        return image

    beside = torch.cat([edges, made().detach()], dim=1)
    loss_d = (bce(d(batch.x), 1) + bce(d(beside), 0)) / 2
    expected_d = torch.autograd.grad(loss_d, list(d.parameters()))
    image = made()
    loss_g = bce(d(torch.cat([edges, image], dim=1)), 1) + 100 * l1_loss(image, photo)
    expected_g = torch.autograd.grad(loss_g, list(g.parameters()))

    losses = run.workload.step(batch, NamedGenerators(0, "twin"), keep)
    for name, expected in (("discriminator", expected_d), ("generator", expected_g)):
        torch.testing.assert_close(tuple(seen[name]), expected, rtol=1e-4, atol=1e-6)
    assert float(losses["discriminator"]) == pytest.approx(loss_d.item(), rel=1e-5)
    assert all(loss.shape == () and not loss.requires_grad for loss in losses.values())


def test_the_generators_phase_leaves_the_discriminators_gradient_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(pix2pix, config())
    d, g = (run.workload.networks[name] for name in ("discriminator", "generator"))
    real_add, kept = Descent.add_gradients, []

    def watch(self: Descent, name: str, loss: Tensor, *, keep_graph: bool = False) -> None:
        real_add(self, name, loss, keep_graph=keep_graph)
        kept.append([p.grad.clone() for p in d.parameters() if p.grad is not None])
        assert name == "discriminator" or equal(kept[0], kept[1])

    monkeypatch.setattr(Descent, "add_gradients", watch)
    run.step()
    assert len(kept) == 2 and kept[0]
    assert all(p.grad is not None for p in g.parameters())


def test_a_step_moves_every_weight() -> None:
    run = Run(pix2pix, config())
    before = weights(run)
    run.step(3)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_run_resumes_from_its_state_bit_for_bit(dropout: float) -> None:
    run = Run(pix2pix, config(dropout=dropout))
    run.step(2)
    state = run.state()
    run.step(3)
    resumed = Run(pix2pix, config(dropout=dropout))
    resumed.load_state(state)
    resumed.step(3)
    assert hash_state(flat(resumed)) == hash_state(flat(run))


def flat(run: Run) -> dict[str, Tensor]:
    networks = run.workload.networks.items()
    return {f"{name}/{key}": v for name, n in networks for key, v in n.state_dict().items()}


def test_every_draw_comes_from_the_named_generators() -> None:
    before = torch.random.get_rng_state()
    run = Run(pix2pix, config())
    run.step(2)
    drawn = run.rng.state_dict()
    run.workload.sample(2, seed=0)
    run.workload.evaluate(run.held_out, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(run.rng.state_dict(), drawn, rtol=0, atol=0)


def test_sites_start_from_the_same_weights_and_seeds_from_others() -> None:
    first, second = Run(pix2pix, config(), site=0), Run(pix2pix, config(), site=1)
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(Run(pix2pix, config(seed=1))))


# Images ------------------------------------------------------------------------------------------


def test_samples_are_of_the_held_out_inputs_and_change_nothing() -> None:
    run = Run(pix2pix, config())
    run.step(2)
    before = hash_state(flat(run))
    first, again = (run.workload.sample(6, seed) for seed in (1, 2))
    assert first.shape == (6, 3, 32, 32)
    assert torch.equal(first, again) and not first.requires_grad
    generator = run.workload.networks["generator"]
    assert generator.training and hash_state(flat(run)) == before
    with torch.no_grad():
        direct = generator(run.held_out.x[:6, :1])
    torch.testing.assert_close(first, direct)
    assert hash_state(flat(run)) != before  # as it would have been without care
    generator.eval()
    torch.testing.assert_close(run.workload.sample(6, 0), first)
    assert not generator.training


def test_images_are_made_with_running_statistics_where_asked() -> None:
    run = Run(pix2pix, config(statistics="running"))
    run.step(2)
    before = hash_state(flat(run))
    images = run.workload.sample(20, seed=0)
    alone = run.workload.sample(1, seed=0)
    torch.testing.assert_close(images[:1], alone)  # whatever lies beside it
    assert not torch.equal(images, Run(pix2pix, config()).workload.sample(20, seed=0))
    generator = run.workload.networks["generator"]
    assert generator.training and hash_state(flat(run)) == before


def test_under_instance_norm_an_image_is_made_and_judged_whatever_lies_beside_it() -> None:
    run = Run(pix2pix, config(norm="instance"))
    run.step(2)
    torch.testing.assert_close(run.workload.sample(9, seed=0)[:1], run.workload.sample(1, seed=0))
    discriminator, pairs = run.workload.networks["discriminator"], run.held_out.x
    torch.testing.assert_close(discriminator(pairs[:9])[:1], discriminator(pairs[:1]))
    assert not [name for net in run.workload.networks.values() for name, _ in net.named_buffers()]


def test_inputs_are_taken_again_where_more_images_are_asked_for() -> None:
    run = Run(pix2pix, config())
    num = len(run.held_out.x)
    images = run.workload.sample(num + 5, seed=0)
    assert torch.equal(images[num:], images[:5])


def test_samples_are_drawn_beside_inputs_and_photographs(tmp_path: Path) -> None:
    run = Run(pix2pix, config())
    draw_samples(tmp_path / "a.png", run.workload.sample(9, 0), run.held_out.x[:9], "title")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 3 * 400


def test_quality_is_ready_for_json_and_repeatable() -> None:
    run = Run(pix2pix, config())
    first, again = (run.workload.evaluate(run.held_out, seed=0) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    assert set(first) == {"fd", "fd_floor", "l1"}
    assert first["fd"] > 3 * first["fd_floor"] > 0


# Settings ----------------------------------------------------------------------------------------


def test_resolving_twice_changes_nothing() -> None:
    once = Config(data=DataConfig("photo_edges"), model=dataclasses.asdict(pix2pix.Model()))
    resolve_page(pix2pix, once)
    twice = copy.deepcopy(once)
    resolve_page(pix2pix, twice)
    assert once == twice
    assert set(once.inner) == set(pix2pix.NETWORKS)
    assert once.inner["generator"] == InnerConfig(lr=2e-4, beta1=0.5)
    assert all(once.steps % h == 0 for h in (1, 10, 20, 50, 100))


def test_settings_that_cannot_work_are_refused_in_one_line() -> None:
    def refused(match: str, name: str = "photo_edges", **model: object) -> None:
        with pytest.raises(ConfigError, match=match) as caught:
            resolve_page(pix2pix, Config(workload="pix2pix", data=DataConfig(name), model=model))
        assert "\n" not in str(caught.value)

    refused("model.width = 0 is out of range", width=0)
    refused("model.depth = 1 is out of range", depth=1)
    refused("model.depth = 6 halves .* 32 pixels .* photo_edges allow; choose 5 or less", depth=6)
    refused("model.dropout = 1.0 is out of range", dropout=1.0)
    refused("model.statistics = 'runing' .* did you mean 'running'", statistics="runing")
    refused("model.norm = 'layer' is none of batch, instance", norm="layer")
    refused("'running' needs model.norm=batch", norm="instance", statistics="running")
    refused("'digits' holds no pairs .* 'pix2pix' learns from; set data.name=photo_edges", "digits")


@pytest.mark.parametrize("recipe", [gan, flow], ids=["gan", "flow"])
def test_pairs_are_not_for_workloads_that_make_samples_from_noise(recipe: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"pairs .* does not learn from; set data.name=digits"):
        resolve_page(recipe, Config(data=DataConfig("photo_edges")))


def test_every_model_setting_is_explained_in_the_recipe() -> None:
    text = Path(pix2pix.__file__).read_text()
    for field in dataclasses.fields(pix2pix.Model):
        default = f'"{field.default}"' if isinstance(field.default, str) else field.default
        assert f'    {field.name}: {field.type} = {default}\n    """' in text


# Whole runs --------------------------------------------------------------------------------------
