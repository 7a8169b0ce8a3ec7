"""Private gradients: exact but for noise, bounded by sample, the same again only where they may."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

from fedwan.app import load_run
from fedwan.config import Config, DataConfig, InnerConfig, PrivacyConfig
from fedwan.data import InMemory, Loader
from fedwan.errors import CheckpointError, ConfigError
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.simulation import Absence, SimulatedRun, simulate
from fedwan.workloads.base import Batch
from fedwan.workloads.privacy import EPSILON, Privacy
from sites import flow, gan
from tests.data.files import write_folder
from tests.sites.support import DIT, MLP, Run

SIZE = 8


def config(clip: float = 1.0, batch: int = SIZE, **privacy: Any) -> Config:
    return Config(
        steps=40,
        data=DataConfig("digits", batch=batch),
        privacy=PrivacyConfig(**{"epsilon": 4.0, "unit": f"sample:{clip}", **privacy}),
    )


def private(
    folder: Path, samples: int = 400, noise: float | None = None, **settings: Any
) -> Privacy:
    made = Privacy(config(**settings), samples, folder)
    made.noise = made.noise if noise is None else noise
    return made


def linear_loss(net: nn.Module) -> Any:
    """Whose gradient is the sample itself."""
    return lambda one: net(one.x).sum()


def gradient(privacy: Privacy, x: Tensor) -> Tensor:
    net = nn.Linear(x.shape[1], 1, bias=False)
    return privacy.gradients(net, linear_loss(net), Batch(x, torch.zeros(len(x))))[0][0]


@pytest.mark.parametrize(
    ("recipe", "model"),
    [(flow, MLP), (flow, DIT), (gan, {"width": 4}), (gan, {"width": 4, "gamma_fake": 0.1})],
)
def test_without_noise_and_clipping_it_is_the_plain_gradient(
    recipe: ModuleType, model: dict[str, Any], tmp_path: Path
) -> None:
    asked = config(clip=1e9)
    asked.model = dict(model)
    run = Run(recipe, asked)
    run.step(3)  # from where some gradients are zero
    batch = next(run.stream)
    plain = run.gradients(batch, NamedGenerators(7, "s1"))
    run = Run(recipe, asked)
    run.step(3)
    run.workload.privacy = privacy = private(tmp_path, noise=0.0, clip=1e9)  # type: ignore[attr-defined]
    noised = run.gradients(next(run.stream), NamedGenerators(7, "s1"))
    assert privacy.steps == 1
    assert noised.keys() == plain.keys()
    for network, values in plain.items():
        torch.testing.assert_close(noised[network], values, rtol=1e-3, atol=1e-5)


def test_no_sample_moves_it_by_more_than_the_clip_over_the_batch(tmp_path: Path) -> None:
    x = torch.randn(SIZE, 5) * torch.logspace(-2, 4, SIZE)[:, None]
    privacy = private(tmp_path, noise=0.0, clip=0.5)
    whole = gradient(privacy, x)
    for left in range(SIZE):
        others = torch.cat([x[:left], x[left + 1 :]])
        moved = (whole - gradient(privacy, others)).norm()
        expected = min(0.5, float(x[left].norm())) / SIZE
        torch.testing.assert_close(float(moved), expected, rtol=1e-3, atol=1e-6)
    x[3] = torch.nan
    assert torch.isfinite(gradient(privacy, x)).all()


def test_noise_has_the_deviation_that_the_accountant_asked_for(tmp_path: Path) -> None:
    privacy = private(tmp_path, clip=0.5)
    noise = gradient(privacy, torch.empty(0, 100_000))
    assert float(noise.std()) == pytest.approx(privacy.noise * 0.5 / SIZE, rel=0.01)
    accountant = RDPAccountant()
    accountant.history = [(privacy.noise, SIZE / 400, 40)]
    spent = accountant.get_epsilon(delta=1e-5)
    assert not privacy.epsilon()
    privacy.begin_round(0, 20, "a", 0)
    assert 0 < privacy.epsilon() < spent
    privacy.begin_round(20, 20, "b", 20)
    assert spent == pytest.approx(privacy.epsilon(), abs=1e-9)
    assert 3.99 < spent <= 4.0


def test_noise_comes_again_at_the_same_step_from_the_same_weights_alone(tmp_path: Path) -> None:
    privacy, x = private(tmp_path), torch.randn(SIZE, 5)

    def made(step: int, weights: str, taken: int = 3) -> Tensor:
        privacy.begin_round(step, 1, weights, taken)
        return gradient(privacy, x)

    first = made(3, "a")
    assert torch.equal(made(3, "a"), first)
    assert not torch.equal(made(4, "a"), first)
    assert not torch.equal(made(3, "b"), first)
    assert not torch.equal(made(3, "a", 4), first)  # after a refusal: on other data


def test_steps_that_are_taken_again_from_other_weights_count_and_nothing_forgets_them(
    tmp_path: Path,
) -> None:
    privacy = private(tmp_path)
    privacy.begin_round(0, 20, "a", 0)
    privacy.begin_round(20, 20, "b", 20)
    once = privacy.epsilon()
    privacy = private(tmp_path)  # the site's process is killed, and a checkpoint is older than this
    privacy.begin_round(20, 20, "b", 20)
    assert privacy.epsilon() == once
    privacy.begin_round(20, 20, "c", 20)
    kept = (tmp_path / "privacy.json").read_bytes()
    assert private(tmp_path).secret == privacy.secret
    beside = private(tmp_path)  # of a process that was replaced, and does not know it yet
    beside.begin_round(0, 20, "d", 0)
    privacy.begin_round(20, 20, "c", 20)
    counted = privacy.epsilon()
    beside.begin_round(20, 20, "c", 20)
    assert beside.epsilon() == counted > once
    (tmp_path / "privacy.json").write_bytes(kept)
    privacy.begin_round(20, 20, "c", 20)
    # What both were drawn of are the same samples: less noise, not more steps.
    accountant = RDPAccountant()
    accountant.history = [(privacy.noise, SIZE / 400, 20), (privacy.noise / 2**0.5, SIZE / 400, 20)]
    assert privacy.epsilon() == pytest.approx(accountant.get_epsilon(delta=1e-5), abs=1e-9)
    assert privacy.epsilon() > 1.2 * once
    assert (tmp_path / "privacy.json").stat().st_mode & 0o777 == 0o600

    (tmp_path / "privacy.json").write_text('{"secret": 3}')
    with pytest.raises(CheckpointError, match=r"privacy.json is damaged; move .* away"):
        private(tmp_path)
    lost = private(tmp_path / "other")  # it has spent what it took before, and a round more
    lost.begin_round(20, 20, "c", 20)
    assert lost.epsilon() == pytest.approx(privacy.epsilon())


def test_each_sample_comes_into_a_batch_by_itself_and_by_no_known_seed(tmp_path: Path) -> None:
    privacy, other = private(tmp_path), private(tmp_path / "other")
    drawn = [privacy.places(number) for number in range(2000)]
    sizes = torch.tensor([len(places) for places in drawn]).double()
    assert float(sizes.mean()) == pytest.approx(SIZE, rel=0.03)
    assert float(sizes.var()) == pytest.approx(SIZE * (1 - SIZE / 400), rel=0.15)
    assert float(torch.bincount(torch.cat(drawn)).double().std()) < 10  # 6.3 by chance
    assert torch.equal(privacy.places(5), drawn[5])
    assert not torch.equal(other.places(5), drawn[5])
    assert torch.equal(private(tmp_path).places(5), drawn[5])


def test_a_loader_gives_what_was_drawn_nothing_too_and_goes_on_from_there() -> None:
    drawn = [torch.tensor([3]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 2])]

    def loader(dataset: Any) -> Loader:
        return Loader(dataset, 2, torch.Generator(), places=lambda number: drawn[number - 1])

    rows = [Batch(torch.full((2,), float(i)), torch.tensor(i)) for i in range(4)]
    stacked = InMemory(Batch(torch.stack([r.x for r in rows]), torch.arange(4)))
    for dataset in (rows, stacked):
        source = loader(dataset)
        assert [next(source).y.tolist() for _ in range(2)] == [[3], []]
        after = loader(dataset)
        after.load_state_dict(source.state_dict())
        assert next(after).x.tolist() == [[0, 0], [2, 2]]


def test_what_cannot_be_promised_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stream; give data that can be drawn"):
        private(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"delta = 0.01 is no promise to 100 samples; .*1e-05"):
        private(tmp_path, 100, delta=0.01)
    with pytest.raises(ConfigError, match=r"data.batch = 8 is more than this site's 7 samples"):
        private(tmp_path, 7)


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("strategy=sync", "strategy=local_sgd"),
        ("workload=pix2pix data.name=photo_edges", "leave it out"),
        ("workload=command", "workload=flow"),
        ("site.accumulate=2", "site.* as it is"),
        ("checkpoint.every=2", "checkpoint.every=1"),
        ("round.quorum=1", "round.quorum=0"),
        ("round.least_steps=2", "round.least_steps=0"),
        ("workload=gan network.discriminator.h=5", "no network.NETWORK.h"),
        ("workload=gan model.conditional=true", "without classes"),
        ("workload=gan model.loss=relativistic", "relativistic"),
    ],
)
def test_what_it_does_not_go_with_is_refused(words: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=mend.replace("*", r"\*")) as caught:
        load_run(None, ["workload=flow", "sites=2", "privacy.epsilon=4", *words.split()])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"privacy.unit = 'sample:2' needs privacy.epsilon"):
        load_run(None, ["privacy.unit=sample:2"])


def run(folder: Path, *words: str, **options: Any) -> SimulatedRun:
    usual = "sites=2 steps=20 h=5 privacy.epsilon=4 data.batch=32 eval.num=20"
    return simulate(load_run(None, [*words, *usual.split()]), folder, **options)


TINY_FLOW = ("workload=flow", "model.width=16", "model.depth=1", "model.euler_steps=2")


@pytest.mark.slow
def test_a_site_that_was_killed_goes_on_with_its_secret_and_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytes] = []

    def token(num: int) -> bytes:  # the same of both sites, another of who comes later
        made.append(bytes([len(made) // 2]) * num)
        return made[-1]

    seeds: set[int] = set()
    plain = flow.Flow._loss

    def loss(self: flow.Flow, batch: Batch, rng: NamedGenerators) -> Tensor:
        seeds.add(rng["noise"].initial_seed())
        return plain(self, batch, rng)

    monkeypatch.setattr(secrets, "token_bytes", token)
    monkeypatch.setattr(flow.Flow, "_loss", loss)
    hashes = []
    for name, absences in (("a", {}), ("b", {"s2": Absence(0.5, 0.75)})):
        made.clear()
        ran = run(tmp_path / name, *TINY_FLOW, absences=absences)
        hashes.append(ran.site_sha256["s1"])
        assert ran.totals.epsilon == pytest.approx(4.0, abs=0.01)
    assert len(made) == 3
    assert hashes[0] == hashes[1]
    assert not seeds & {derive_seed(0, site, "noise") for site in ("s1", "s2")}


@pytest.mark.slow
def test_a_gan_tells_its_budget_and_nothing_of_real_samples(tmp_path: Path) -> None:
    rows = run(tmp_path, "workload=gan", "model.width=4").records
    rounds = [row for row in rows if row["kind"] == "round"]
    assert [set(row["losses"]) for row in rounds] == [{"generator"}] * 8
    assert [set(row["figures"]) for row in rounds] == [{EPSILON}] * 8
    spent = [row["epsilon"] for row in rows if row.get("event") == "contribution"]
    assert len(spent) == 8
    assert 0 < spent[0] < spent[-1] <= 4.0


@pytest.mark.slow
def test_of_data_that_are_a_sites_own_no_figures_of_quality_leave_it(tmp_path: Path) -> None:
    for site in ("s1", "s2"):
        write_folder(tmp_path / site, range(30))
    words = ("data.name=folder", "data.split=own", f"data.path={tmp_path}/{{site}}", "data.size=8")
    usual = "workload=flow sites=2 steps=10 h=5 data.batch=8 model.width=16".split()
    usually = {"kind", "version", "step", "site"}
    for own, is_measured in (("privacy.epsilon=4", False), ("seed=0", True)):
        ran = simulate(load_run(None, [*usual, *words, own]), tmp_path / own)
        rows = [row for row in ran.records if row["kind"] == "quality"]
        assert all((row.keys() > usually) == is_measured for row in rows)


class Scaled(nn.Module):
    """A frozen layer below, and a scalar above."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(5, 1, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.below(x)[:, 0] * self.scale


def test_what_is_frozen_has_no_gradient_and_takes_none_of_the_clip(tmp_path: Path) -> None:
    net, x = Scaled(), 0.01 * torch.randn(SIZE, 5)
    batch = Batch(x, torch.zeros(SIZE))
    made = private(tmp_path, noise=0.0).gradients(net, linear_loss(net), batch)
    (expected,) = torch.autograd.grad(net(x).mean(), [net.scale])
    assert len(made) == 1
    torch.testing.assert_close(made[0], expected)


def test_a_shard_with_a_sample_less_has_other_noise_and_counts(tmp_path: Path) -> None:
    spent, made = [], []
    for samples in (400, 399):
        privacy = private(tmp_path, samples, noise=1.0)
        privacy.begin_round(0, 20, "a", 0)
        made.append(gradient(privacy, torch.zeros(0, 5)))
        spent.append(dict(privacy.taken()))
    assert not torch.equal(*made)
    assert spent == [{1: 20}, {2: 20}]


def test_with_any_other_setting_noise_is_another_and_counts(tmp_path: Path) -> None:
    made, spent = [], []
    for lr in (1e-3, 2e-3):
        settings = replace(config(), inner={"velocity": InnerConfig(lr=lr)})
        privacy = Privacy(settings, 400, tmp_path)
        privacy.begin_round(0, 20, "a", 0)
        made.append(gradient(privacy, torch.zeros(0, 5)))
        spent.append(dict(privacy.taken()))
    assert not torch.equal(*made)
    assert spent == [{1: 20}, {2: 20}]


@pytest.mark.parametrize(
    "other", [{"epsilon": 8.0}, {"delta": 1e-4}, {"clip": 40.0}, {"batch": 2 * SIZE}]
)
def test_a_budget_stays_what_the_folder_began_with(tmp_path: Path, other: dict[str, Any]) -> None:
    secret = private(tmp_path).secret
    with pytest.raises(ConfigError, match="this run's budget is .* where it began with") as told:
        private(tmp_path, **other)
    assert "\n" not in str(told.value)
    assert private(tmp_path).secret == secret
