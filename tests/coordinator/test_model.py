"""The global model: what a round changes, and what survives a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedwan import state as state_module
from fedwan.codecs import Codec, bf16, fp32
from fedwan.config import Config, DataConfig
from fedwan.coordinator.model import (
    CHECKPOINT,
    GlobalModel,
    find_checkpoint,
    update_ema,
)
from fedwan.errors import CheckpointError
from fedwan.fragments import Fragment, whole
from fedwan.link import wire_pb2 as wire
from fedwan.state import Layout, Role, State, clone, hash_hashes, hash_state, tensor_bytes
from fedwan.strategy import Strategy
from strategies import diloco, local_sgd, sync
from tests.support import ADAM, build_strategy, same_bits, spec

Kinds = wire.DownloadRequest
LAYOUT: Layout = {
    "discriminator/w": spec((5,)),
    "generator/empty": spec((0,)),
    "generator/num_batches_tracked": spec((), Role.COUNTER, torch.int64),
    "generator/running_mean": spec((3,), Role.MEAN),
    "generator/running_var": spec((3,), Role.VARIANCE),
    "generator/w": spec((3, 4)),
}
INNER = {"discriminator": ADAM, "generator": ADAM}
RECIPES = {"diloco": diloco, "local_sgd": local_sgd, "sync": sync}
CONFIG = Config(steps=100, data=DataConfig(batch=4))
HALF_LIFE = CONFIG.half_life

every_recipe = pytest.mark.parametrize("name", RECIPES)


def strategy_of(name: str, down: str = "fp32") -> Strategy:
    return build_strategy(RECIPES[name], INNER, sites=2, h=1, down=down)


def random_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.tensor(seed)
        if s.role is Role.COUNTER
        else torch.randn(s.shape, generator=generator).abs()
        for name, s in LAYOUT.items()
    }


def make_model(strategy: Strategy) -> GlobalModel:
    return GlobalModel(random_state(0), LAYOUT, strategy, HALF_LIFE)


def advance(model: GlobalModel, seeds: range) -> None:
    for seed in seeds:
        model.commit(model.fragments[0], random_state(seed), samples=30)


def contents(model: GlobalModel) -> tuple[State, State, list[int]]:
    return model.state, model.ema, model.versions


# Rounds ------------------------------------------------------------------------------------------


def test_one_commit_moves_all_networks() -> None:
    model = make_model(strategy_of("diloco"))
    before = clone(model.state)
    advance(model, range(1, 2))
    moved = {name for name in LAYOUT if not torch.equal(before[name], model.state[name])}
    assert moved == LAYOUT.keys() - {"generator/empty"}


@pytest.mark.parametrize("codec", [fp32(), bf16()], ids=["fp32", "bf16"])
def test_global_weights_are_what_sites_decode(codec: Codec) -> None:
    model = make_model(strategy_of("diloco", down=codec.name))
    site = clone(model.state)
    for seed in range(1, 6):
        payload = model.commit(model.fragments[0], random_state(seed), samples=30)
        for name, value in codec.decode_each(payload, LAYOUT):
            if LAYOUT[name].role is Role.PARAMETER:
                site[name].add_(value)
            else:
                site[name].copy_(value)
    assert hash_state(site) == hash_state(model.state)


def test_the_average_follows_the_global_weights() -> None:
    model = make_model(strategy_of("local_sgd"))
    before = clone(model.state)
    advance(model, range(1, 2))
    weight = 1 - 0.5 ** (30 / HALF_LIFE)
    expected = torch.lerp(before["generator/w"], model.state["generator/w"], weight)
    torch.testing.assert_close(model.ema["generator/w"], expected)


def test_parameters_are_kept_in_fp32_whatever_the_sites_have() -> None:
    layout = {"generator/w": spec((2,), dtype=torch.bfloat16)}
    initial = {"generator/w": torch.ones(2, dtype=torch.bfloat16)}
    strategy = build_strategy(diloco, {"generator": ADAM}, sites=2, h=1)
    model = GlobalModel(initial, layout, strategy, HALF_LIFE)
    model.commit(model.fragments[0], {"generator/w": torch.full((2,), 1e-3)}, samples=1)
    assert model.state["generator/w"].dtype == torch.float32
    assert 0 < float(1 - model.state["generator/w"][0]) < 1e-2  # bf16 would have lost it


# Snapshots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [Kinds.GLOBAL, Kinds.EMA])
def test_a_snapshot_does_not_change_while_training_goes_on(what: Any) -> None:
    model = make_model(strategy_of("diloco"))
    advance(model, range(1, 3))
    payload, version = model.snapshot(what)
    kept = model.state if what == Kinds.GLOBAL else model.ema
    expected = hash_state(kept)
    advance(model, range(3, 6))
    decoded = fp32().decode(payload, LAYOUT)
    assert (hash_state(decoded), version) == (expected, (2,))


def test_the_average_goes_on_from_where_a_snapshot_was_taken() -> None:
    watched, plain = (make_model(strategy_of("diloco")) for _ in "ab")
    held = []
    for seed in range(1, 6):
        held.append(watched.snapshot(Kinds.EMA))
        advance(watched, range(seed, seed + 1))
        advance(plain, range(seed, seed + 1))
    assert same_bits(watched.ema, plain.ema)


def test_the_outer_snapshot_is_the_optimisers_state() -> None:
    model = make_model(strategy_of("sync"))
    advance(model, range(1, 3))
    payload, version = model.snapshot(Kinds.OUTER)
    flat = safetensors.torch.load(bytes(payload.read(0, payload.num_bytes)))
    assert version == (2,) and float(flat["generator:step|generator/w"]) == 2.0


# Checkpoints -------------------------------------------------------------------------------------


@every_recipe
def test_a_checkpoint_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    strategy = strategy_of(name)
    model = make_model(strategy)
    advance(model, range(1, 4))
    model.save(tmp_path, {"totals": {"rejected": 2}})
    loaded = GlobalModel.load(tmp_path, strategy, CONFIG)
    assert find_checkpoint(tmp_path)[0]["totals"] == {"rejected": 2}
    assert loaded.layout == model.layout and list(loaded.layout) == list(model.layout)
    for mine, theirs in zip(contents(loaded), contents(model), strict=True):
        if isinstance(mine, dict):
            assert same_bits(mine, theirs)  # type: ignore[arg-type]
        else:
            assert mine == theirs


@every_recipe
@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str, down: str, tmp_path: Path) -> None:
    strategy = strategy_of(name, down)
    model = make_model(strategy)
    advance(model, range(1, 4))
    model.save(tmp_path, {})
    loaded = GlobalModel.load(tmp_path, strategy, CONFIG)
    advance(model, range(4, 8))
    advance(loaded, range(4, 8))
    assert same_bits(model.state, loaded.state)
    assert same_bits(model.ema, loaded.ema)


def test_the_hashes_of_the_last_two_versions_are_known(tmp_path: Path) -> None:
    model = make_model(strategy_of("diloco"))
    hashes = []
    for version in (1, 2, 3):
        advance(model, range(version, version + 1))
        hashes.append(model.hash_of(model.fragments[0]))
        assert hashes[-1] == hash_state(model.state)
    expected = ["", *(hash_hashes([sha256]) for sha256 in hashes[1:])]
    assert [model.hash_at([version]) for version in (1, 2, 3)] == expected


def test_every_truncation_is_refused_in_one_line(tmp_path: Path) -> None:
    strategy = strategy_of("diloco")
    model = make_model(strategy)
    advance(model, range(1, 3))
    model.save(tmp_path, {})
    data = (tmp_path / CHECKPOINT).read_bytes()
    for length in [*range(0, 200), *range(200, len(data), 37), len(data) - 1]:
        (tmp_path / CHECKPOINT).write_bytes(data[:length])
        with pytest.raises(CheckpointError) as raised:
            GlobalModel.load(tmp_path, strategy, CONFIG)
        assert "\n" not in str(raised.value) and CHECKPOINT in str(raised.value)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at .*without --resume"):
        GlobalModel.load(tmp_path, strategy_of("diloco"), CONFIG)


@every_recipe
@pytest.mark.parametrize("other", RECIPES)
def test_another_strategys_checkpoint_is_refused(name: str, other: str, tmp_path: Path) -> None:
    model = make_model(strategy_of(name))
    advance(model, range(1, 3))
    model.save(tmp_path, {})
    if other == name:
        GlobalModel.load(tmp_path, strategy_of(other), CONFIG)
        return
    with pytest.raises(CheckpointError, match="resume with the strategy") as raised:
        GlobalModel.load(tmp_path, strategy_of(other), CONFIG)
    assert "\n" not in str(raised.value)


@every_recipe
def test_another_workloads_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    layout = {"velocity/w": spec((3,))}
    strategy = build_strategy(RECIPES[name], {"velocity": ADAM}, sites=2, h=1)
    model = GlobalModel({"velocity/w": torch.zeros(3)}, layout, strategy, HALF_LIFE)
    model.commit(model.fragments[0], {"velocity/w": torch.ones(3)}, samples=1)
    model.save(tmp_path, {})
    with pytest.raises(CheckpointError):
        GlobalModel.load(tmp_path, strategy_of(name), CONFIG)


def test_another_number_of_fragments_is_refused(tmp_path: Path) -> None:
    def halves(layout: Layout) -> tuple[Fragment, ...]:
        names = list(layout)
        return tuple(
            Fragment(i, {n: layout[n] for n in part})
            for i, part in enumerate((names[:3], names[3:]))
        )

    strategy = strategy_of("local_sgd")
    assert strategy.fragments is whole
    make_model(strategy._replace(fragments=halves)).save(tmp_path, {})
    with pytest.raises(CheckpointError, match="2 fragments where the strategy has 1"):
        GlobalModel.load(tmp_path, strategy, CONFIG)


def test_a_crash_while_writing_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = strategy_of("diloco")
    model = make_model(strategy)
    advance(model, range(1, 3))
    model.save(tmp_path, {})
    expected = hash_state(model.state)

    written: list[Tensor] = []

    def half_a_file(value: Tensor) -> memoryview:
        if written:
            raise OSError("No space left on device")
        written.append(value)
        return tensor_bytes(value)

    advance(model, range(3, 5))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(state_module, "tensor_bytes", half_a_file)
        model.save(tmp_path, {})
    loaded = GlobalModel.load(tmp_path, strategy, CONFIG)
    assert (hash_state(loaded.state), loaded.versions) == (expected, [2])
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]


# The moving average -------------------------------------------------------------------------------

SMALL: Layout = {
    "g/n": spec((), Role.COUNTER, torch.int64),
    "g/var": spec((), Role.VARIANCE),
    "g/w": spec((2,)),
}


def small(n: int, var: float, w: float) -> State:
    return {"g/n": torch.tensor(n), "g/var": torch.tensor(var), "g/w": torch.full((2,), w)}


def test_after_a_half_life_the_old_state_counts_half() -> None:
    ema = small(1, 1.0, 0.0)
    update_ema(ema, small(9, 3.0, 8.0), SMALL, samples=500, half_life=500.0)
    assert (int(ema["g/n"]), float(ema["g/var"]), ema["g/w"].tolist()) == (9, 2.0, [4.0, 4.0])


@pytest.mark.parametrize("parts", [1, 4, 40])
def test_it_does_not_depend_on_how_many_samples_make_a_round(parts: int) -> None:
    ema = small(0, 1.0, 1.0)
    for _ in range(parts):
        update_ema(ema, small(0, 0.0, 0.0), SMALL, samples=1200 // parts, half_life=400.0)
    torch.testing.assert_close(ema["g/w"], torch.full((2,), 0.125))


def test_a_fragment_moves_its_own_tensors_alone() -> None:
    ema = small(0, 1.0, 1.0)
    update_ema(ema, {"g/w": torch.zeros(2)}, SMALL, 400, 400.0)
    assert (float(ema["g/var"]), ema["g/w"].tolist()) == (1.0, [0.5, 0.5])
