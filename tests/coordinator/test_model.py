"""The global model: what a round changes, and what survives a crash."""

from __future__ import annotations

import errno
import math
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedwan.codecs import fp32
from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.coordinator import members
from fedwan.coordinator.model import (
    CHECKPOINT,
    PREVIOUS,
    GlobalModel,
    find_checkpoint,
    go_back,
    saved_version,
    update_ema,
)
from fedwan.coordinator.run import CoordinatedRun
from fedwan.errors import (
    CheckpointError,
    ConfigError,
    DiskFull,
    FedwanError,
    SiteEjected,
    UserError,
)
from fedwan.fragments import strided
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Link
from fedwan.site.site import Membership
from fedwan.state import (
    Layout,
    Role,
    State,
    add_prefix,
    clone,
    hash_hashes,
    hash_state,
    is_moment,
    read_tensors,
    read_tensors_meta,
    write_tensors,
)
from fedwan.strategy import Strategy
from strategies import async_diloco, diloco, local_sgd, sync
from tests.support import (
    ADAM,
    DyingLink,
    RewritingLink,
    Stopped,
    TinyWorkload,
    WrappedLink,
    build_strategy,
    killed_after,
    random_state,
    run_tiny,
    same_bits,
    spec,
    take_part,
    tiny_config,
)

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
RECIPES = {r.__name__.split(".")[1]: r for r in (async_diloco, diloco, local_sgd, sync)}
CONFIG = Config(steps=100, data=DataConfig(batch=4))
HALF_LIFE = CONFIG.half_life
NUM_BYTES = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in LAYOUT.values())


def strategy_of(name: str, down: str = "fp32") -> Strategy:
    return build_strategy(RECIPES[name], INNER, sites=2, h=1, down=down)


def positive_state(seed: int) -> State:
    return {name: value.abs() for name, value in random_state(seed, LAYOUT).items()}


def make_model(strategy: Strategy, folder: Path | None = None) -> GlobalModel:
    return GlobalModel(positive_state(0), LAYOUT, strategy, HALF_LIFE, folder)


def advance(model: GlobalModel, seeds: range) -> None:
    for seed in seeds:
        model.commit(model.fragments[0], positive_state(seed), samples=30)


# Rounds ------------------------------------------------------------------------------------------


def test_parameters_are_kept_in_fp32_whatever_the_sites_have() -> None:
    layout = {"generator/w": spec((2,), dtype=torch.bfloat16)}
    initial = {"generator/w": torch.ones(2, dtype=torch.bfloat16)}
    strategy = build_strategy(diloco, {"generator": ADAM}, sites=2, h=1)
    model = GlobalModel(initial, layout, strategy, HALF_LIFE)
    model.commit(model.fragments[0], {"generator/w": torch.full((2,), 1e-3)}, samples=1)
    assert model.state["generator/w"].dtype == torch.float32
    assert 0 < float(1 - model.state["generator/w"][0]) < 1e-2  # bf16 would have lost it


@pytest.mark.parametrize(
    ("name", "recipe", "down"),
    [
        ("generator/running_var", "sync", "fp32"),
        *(("generator/w", name, down) for name in ("sync", "diloco") for down in ("fp32", "int4")),
        ("generator/w", "diloco", "int2"),
    ],
)
def test_an_update_that_is_not_finite_is_told_by_tensor_and_moves_nothing(
    name: str, recipe: str, down: str
) -> None:
    model = make_model(strategy_of(recipe, down))
    advance(model, range(1, 3))
    before, average = clone(model.state), clone(model.ema)
    merged = positive_state(3)
    merged[name].view(-1)[0] = math.inf
    says = f"the update of '{name}' holds values that are not finite.* mend the outer Transform"
    with pytest.raises(UserError, match=says):
        model.commit(model.fragments[0], merged, samples=30)
    assert same_bits(model.state, before) and same_bits(model.ema, average)
    assert model.versions == [2] and not model.is_whole


def test_a_buffer_that_its_dtype_cannot_hold_moves_nothing() -> None:
    layout = {"generator/w": spec((2,)), "generator/x": spec((2,), Role.MEAN, torch.float16)}
    initial = {"generator/w": torch.ones(2), "generator/x": torch.ones(2, dtype=torch.float16)}
    strategy = build_strategy(diloco, {"generator": ADAM}, sites=2, h=1)
    model = GlobalModel(initial, layout, strategy, HALF_LIFE)
    merged = {"generator/w": torch.ones(2), "generator/x": torch.full((2,), 1e5)}
    with pytest.raises(UserError, match="'generator/x' holds values that are not finite"):
        model.commit(model.fragments[0], merged, samples=1)
    assert all(bool(value.eq(1).all()) for value in model.state.values())


def test_a_run_whose_step_leaves_no_numbers_ends_with_the_checkpoint_before_it(
    tmp_path: Path,
) -> None:
    inner = {"velocity": InnerConfig(name="sgd", lr=1e-2, beta1=0.0)}
    config = tiny_config("sync", inner, sites=2, h=1, steps=6, checkpoint={"every": 1})
    after = CoordinatedRun._after_version

    def spoil(run: CoordinatedRun, model: GlobalModel, before: int) -> None:
        after(run, model, before)
        if model.version == 2:
            (optimizer,) = model._server_step._optimizers.values()  # type: ignore[attr-defined]
            optimizer.param_groups[0]["lr"] = math.inf

    says = r"the step of velocity left .* lower inner.velocity.lr"
    with (
        patch.object(CoordinatedRun, "_after_version", spoil),
        pytest.raises(FedwanError, match=says),
    ):
        run_tiny(tmp_path, config)
    tensors, meta = read_tensors(tmp_path / "checkpoint" / CHECKPOINT)
    assert meta["versions"] == [2] and all(bool(v.isfinite().all()) for v in tensors.values())


# Snapshots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [Kinds.GLOBAL, Kinds.EMA])
def test_a_snapshot_does_not_change_while_training_goes_on_as_without_it(what: Any) -> None:
    watched, plain = (make_model(strategy_of("diloco")) for _ in "ab")
    held = []
    for seed in range(1, 6):
        expected = hash_state(watched.state if what == Kinds.GLOBAL else watched.ema)
        held.append(watched.snapshot(what))
        advance(watched, range(seed, seed + 1))
        advance(plain, range(seed, seed + 1))
        payload, version = held[-1]
        assert (hash_state(fp32().decode(payload, LAYOUT)), version) == (expected, (seed - 1,))
    assert same_bits(watched.ema, plain.ema)


def test_of_two_that_read_the_average_one_may_end_and_it_is_copied_once_for_both() -> None:
    model = make_model(strategy_of("diloco"))
    first, second = (model.snapshot(Kinds.EMA)[0] for _ in "ab")
    expected = hash_state(model.ema)
    del second
    average = model.ema
    advance(model, range(3))
    assert hash_state(fp32().decode(first, LAYOUT)) == expected
    kept = model.ema
    advance(model, range(3, 5))
    assert model.ema is kept is not average


def test_the_outer_snapshot_is_the_optimisers_state() -> None:
    model = make_model(strategy_of("sync"))
    advance(model, range(1, 3))
    payload, version = model.snapshot(Kinds.OUTER)
    flat = safetensors.torch.load(bytes(payload.read(0, payload.num_bytes)))
    assert version == (2,) and float(flat["generator:step|generator/w"]) == 2.0


# Checkpoints -------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_bit_for_bit_and_owes_the_sites_what_it_owed_of_each_fragment(
    tmp_path: Path,
) -> None:
    strategy = strategy_of("diloco", "int2")._replace(fragments=strided(2, 1))
    model = make_model(strategy)

    def go_on(model: GlobalModel, seeds: range) -> None:
        for seed in seeds:
            for fragment in model.fragments:
                merged = {name: positive_state(seed)[name] for name in fragment.layout}
                model.commit(fragment, merged, samples=30)

    go_on(model, range(1, 3))
    parameters = {name for name, spec in LAYOUT.items() if spec.role is Role.PARAMETER}
    assert len(model.fragments) == 2 and model._residual.keys() == parameters
    model.save(tmp_path, {"totals": {"rejected": 2}})
    loaded = GlobalModel.load(tmp_path, strategy, CONFIG)
    assert find_checkpoint(tmp_path)[0]["totals"] == {"rejected": 2}
    assert list(loaded.layout.items()) == list(model.layout.items())
    for each in (model, loaded):
        go_on(each, range(3, 6))
    assert same_bits(model.state, loaded.state) and same_bits(model.ema, loaded.ema)
    assert model.versions == loaded.versions == [5, 5]


@pytest.mark.parametrize("at", [-1, 20])
def test_a_bit_that_flips_in_the_newest_checkpoint_brings_back_the_one_before(
    tmp_path: Path, at: int
) -> None:
    """In its tensors or in its header, of which commands read the latter alone."""
    for version in (1, 2):
        write_tensors(
            tmp_path / CHECKPOINT,
            {"global:net/w": torch.ones(4)},
            {"versions": [version, 0]},
            tmp_path / PREVIOUS,
        )
    data = bytearray((tmp_path / CHECKPOINT).read_bytes())
    data[at] ^= 1
    (tmp_path / CHECKPOINT).write_bytes(data)
    assert saved_version(tmp_path) == (2 if at < 0 else 1)
    meta, complaint = find_checkpoint(tmp_path)
    assert meta["versions"] == [1, 0] and complaint.endswith("the one before it takes its place")
    assert find_checkpoint(tmp_path) == (meta, "") and saved_version(tmp_path) == 1


def test_sites_keep_what_the_checkpoint_before_the_newest_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, told = CoordinatedRun.checkpoint, []

    def note(run: CoordinatedRun, model: GlobalModel) -> None:
        checkpoint(run, model)
        told.append((model.version, run.hub.durable_version))

    monkeypatch.setattr(CoordinatedRun, "checkpoint", note)
    run_tiny(tmp_path, tiny_config(h=2, steps=10, checkpoint={"every": 2}))
    assert told == [(2, 0), (4, 2), (5, 4)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_holds_no_file_that_it_was_read_from(tmp_path: Path) -> None:
    model = make_model(strategy_of("diloco"))
    advance(model, range(1, 3))
    model.save(tmp_path, {})
    again = GlobalModel.load(tmp_path, strategy_of("diloco"), CONFIG)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert hash_state(again.state) == hash_state(model.state)


def mapped_in(folder: Path) -> list[str]:
    """Lines of what this process maps of a folder's files."""
    return [m for m in Path("/proc/self/maps").read_text().splitlines() if str(folder) in m]


def lies_there(model: GlobalModel, folder: Path, wanted: bool) -> None:
    """Average and outer state are, or are not, in files of a folder that have no name."""
    maps = mapped_in(folder)
    assert all(line.endswith("(deleted)") for line in maps)
    spans = [range(*(int(a, 16) for a in line.split()[0].split("-"))) for line in maps]
    for value in (*model.ema.values(), *model._server_step.state().values()):
        assert not value.nbytes or any(value.data_ptr() in span for span in spans) == wanted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("down", ["fp32", "int4"])
@pytest.mark.parametrize("name", RECIPES)
def test_where_memory_is_short_all_but_the_weights_lies_on_disk_with_the_same_bits(
    name: str, down: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, states = strategy_of(name, down), []
    needed = (6 if name == "async_diloco" else 5) * NUM_BYTES  # both sites fetch other weights
    for place, free in (("memory", needed), ("disk", needed - 1)):
        folder = tmp_path / place
        folder.mkdir()
        monkeypatch.setattr("fedwan.coordinator.model.available_bytes", Mock(return_value=free))
        model = make_model(strategy, folder)
        advance(model, range(1, 3))
        average, held = clone(model.ema), model.snapshot(Kinds.EMA)[0]
        advance(model, range(3, 5))
        assert same_bits(fp32().decode(held, LAYOUT), average), "it is being read"
        lies_there(model, folder, place == "disk")
        model.save(folder, {})
        model = GlobalModel.load(folder, strategy, CONFIG)
        advance(model, range(5, 7))
        states.append((model.state, model.ema, model._server_step.state()))
        lies_there(model, folder, place == "disk")
        maps = mapped_in(folder)
        fetched = model.snapshot(Kinds.GLOBAL)
        assert len(mapped_in(folder)) == len(maps) + (place == "disk"), "a copy of its own"
        assert same_bits(fp32().decode(fetched[0], LAYOUT), model.state)
        outer, _ = model.snapshot(Kinds.OUTER)
        found = safetensors.torch.load(bytes(outer.read(0, outer.num_bytes)))
        assert same_bits(found, model._server_step.state())
    assert all(map(same_bits, *states))
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("os.posix_fallocate", side_effect=full), pytest.raises(DiskFull, match=str(folder)):
        make_model(strategy, folder)


@pytest.mark.parametrize(("name", "h"), [("diloco", 2), ("sync", 0)])
def test_a_run_ends_on_the_same_weights_wherever_its_outer_state_lies(
    name: str, h: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, config = [], tiny_config(name, h=h, steps=4)
    for place, free in (("memory", 1 << 30), ("disk", 0)):
        monkeypatch.setattr("fedwan.coordinator.model.available_bytes", Mock(return_value=free))
        begun = run_tiny(tmp_path / place, config).result.model
        ended = run_tiny(tmp_path / place, replace(config, steps=8), resume=True).result.model
        assert begun.is_offloaded == ended.is_offloaded == (place == "disk")
        states.append(ended.state | add_prefix("ema", ended.ema))
    assert same_bits(*states)


def test_a_checkpoint_tells_whose_contribution_the_latest_update_is(tmp_path: Path) -> None:
    """A site that goes on from before it keeps its weights, which rounding makes others."""
    strategy = strategy_of("local_sgd")
    model = make_model(strategy)
    for alone in ("s2", ""):
        model.commit(model.fragments[0], positive_state(1), samples=30, alone=alone)
        model.save(tmp_path, {})
        loaded = GlobalModel.load(tmp_path, strategy, CONFIG)
        assert model.own == loaded.own == [alone]
    advanced = make_model(strategy_of("diloco"))  # whose momentum makes it another update
    advanced.commit(advanced.fragments[0], positive_state(1), samples=30, alone="s2")
    assert advanced.own == [""]


def test_the_hashes_of_the_last_two_versions_are_known(tmp_path: Path) -> None:
    model = make_model(strategy_of("diloco"))
    hashes = []
    for version in (1, 2, 3):
        advance(model, range(version, version + 1))
        hashes.append(model.hash_of(model.fragments[0]))
        assert hashes[-1] == hash_state(model.state)
    expected = ["", *(hash_hashes([sha256]) for sha256 in hashes[1:])]
    assert [model.hash_at([version]) for version in (1, 2, 3)] == expected


def test_what_cannot_be_gone_on_from_is_refused_in_one_line(tmp_path: Path) -> None:
    present = strategy_of("diloco")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*without --resume"):
        GlobalModel.load(tmp_path, present, CONFIG)
    model = make_model(strategy_of("local_sgd"))
    advance(model, range(1))
    model.save(tmp_path, {})
    for other, says in (
        (strategy_of("sync"), "does not fit this run .*deltas, not gradients, were merged"),
        (present, "outer state .* is in the checkpoint or in this strategy alone"),
        (
            build_strategy(diloco, {"velocity": ADAM}, sites=2, h=1),
            "resume with the strategy",
        ),
        (
            strategy_of("local_sgd")._replace(fragments=strided(2, 1)),
            "1 fragments, where",
        ),
    ):
        with pytest.raises(CheckpointError, match=says) as raised:
            GlobalModel.load(tmp_path, other, CONFIG)
        assert "\n" not in str(raised.value)
    model = make_model(present)
    model.save(tmp_path, {})
    with pytest.raises(CheckpointError, match="outer state .* is in the checkpoint or in this"):
        GlobalModel.load(tmp_path, strategy_of("local_sgd"), CONFIG)


# The moving average -------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 4, 40])
def test_the_average_depends_on_samples_not_on_rounds_and_on_a_fragment_s_tensors_alone(
    parts: int,
) -> None:
    layout = {"g/n": spec((), Role.COUNTER, torch.int64), "g/var": spec(()), "g/w": spec((2,))}
    ema = {"g/n": torch.tensor(1), "g/var": torch.tensor(3.0), "g/w": torch.ones(2)}
    present = {"g/n": torch.tensor(9), "g/w": torch.zeros(2)}
    for _ in range(parts):
        update_ema(ema, present, layout, samples=1200 // parts, half_life=400.0)
    assert (int(ema["g/n"]), float(ema["g/var"])) == (9, 3.0)
    torch.testing.assert_close(ema["g/w"], torch.full((2,), 0.125))


def test_averages_of_buffers_in_half_precision_follow_them(tmp_path: Path) -> None:
    layout = {"generator/m": spec((2,), Role.MEAN, torch.bfloat16), "generator/w": spec((2,))}
    strategy = build_strategy(diloco, {"generator": ADAM}, sites=2, h=1)
    initial = {"generator/m": torch.zeros(2, dtype=torch.bfloat16), "generator/w": torch.zeros(2)}
    model = GlobalModel(initial, layout, strategy, 40_000.0)
    merged = {"generator/m": torch.ones(2), "generator/w": torch.zeros(2)}
    for _ in range(200):
        model.commit(model.fragments[0], dict(merged), samples=200)
    assert float(model.ema["generator/m"][0]) == pytest.approx(0.5, abs=0.01)
    model.save(tmp_path, {})
    again = GlobalModel.load(tmp_path, strategy, CONFIG)
    assert hash_state(again.ema) == hash_state(model.ema)
    payload, _ = model.snapshot(Kinds.EMA)
    assert fp32().decode(payload, layout)["generator/m"].dtype == torch.bfloat16


def test_moments_that_are_merged_are_neither_averaged_nor_saved_and_sent_as_averages(
    tmp_path: Path,
) -> None:
    sizes: list[int] = []

    class Counting(WrappedLink):
        def download(self, request: wire.DownloadRequest) -> Delivery:
            delivery: Delivery = self._inner.download(request)
            if request.kind == Kinds.EMA and delivery.payload is not None:
                sizes.append(delivery.payload.num_bytes)
            return delivery

    config = tiny_config(inner={"velocity": replace(ADAM, state="average")})
    ran = run_tiny(tmp_path, config, wrap=lambda _, link: Counting(link))  # type: ignore[arg-type,return-value]
    layout = {n: s for n, s in ran.result.model.layout.items() if not is_moment(n)}
    assert ran.result.totals.quality["fd"] > 0 and layout != ran.result.model.layout
    assert {*sizes} == {fp32().payload_bytes(layout)}
    averages, _ = read_tensors(tmp_path / "checkpoint" / CHECKPOINT, "ema:")
    assert averages.keys() == {f"ema:{name}" for name in layout}


def test_a_run_goes_back_to_a_checkpoint_that_is_kept(tmp_path: Path) -> None:
    config = tiny_config("diloco", sites=2, steps=24, h=2)
    config.checkpoint.every = 2
    (sha256,) = run_tiny(tmp_path / "whole", config).hashes

    out = tmp_path / "stopped"
    with pytest.raises(Stopped):
        run_tiny(out, config, wrap=lambda name, link: DyingLink(link, 9) if name == "s2" else link)
    newest, before = (
        read_tensors_meta(out / "checkpoint" / n)["versions"] for n in (CHECKPOINT, PREVIOUS)
    )
    with pytest.raises(ConfigError, match=rf"--from-version=3 is not kept; kept are {before[0]}, "):
        go_back(out / "checkpoint", 3)
    go_back(out / "checkpoint", newest[0])
    assert (out / "checkpoint" / PREVIOUS).exists()
    go_back(out / "checkpoint", before[0])
    again = run_tiny(out, config, resume=True)
    assert again.hashes == {sha256}
    assert min(row["version"] for row in again.rounds()) == before[0] + 1
    path = out / "checkpoint" / PREVIOUS  # the same version twice is no second one to go back to
    (kept, meta) = read_tensors_meta(path)["versions"], read_tensors_meta(path)
    again.result.model.save(out / "checkpoint", meta)
    assert read_tensors_meta(path)["versions"] == kept != again.result.model.versions
    loaded = GlobalModel.load(out / "checkpoint", diloco.build(config), config)
    loaded.save(out / "checkpoint", meta)  # nor is it where another process wrote the first
    assert read_tensors_meta(path)["versions"] == kept


def test_a_run_goes_back_to_before_a_site_lied_and_ends_as_if_it_had_been_put_out_then(
    tmp_path: Path,
) -> None:
    config = tiny_config(sites=3, steps=16, h=2, round={"gate": 0.0}, checkpoint={"every": 2})
    after = CoordinatedRun._after_version

    def part(member: Membership, workload: TinyWorkload) -> None:
        with suppress(SiteEjected):
            take_part(member, workload)

    def lying(name: str, link: Link) -> Link:
        def change(header: wire.UploadHeader, _: str, value: Tensor, role: Role) -> Tensor:
            return -9 * value if header.version >= 2 and role is Role.PARAMETER else value

        return RewritingLink(link, change) if name == "s3" else link  # type: ignore[return-value]

    def ejecting(version: int) -> Any:
        def eject(run: CoordinatedRun, model: GlobalModel, before: int) -> None:
            after(run, model, before)
            if model.version == version:
                members.answer(run, {"ask": "eject", "site": "s3"})

        return patch.object(CoordinatedRun, "_after_version", eject)

    with ejecting(2):
        honest = run_tiny(tmp_path / "a", config, part=part)
    with ejecting(4), killed_after(4):
        run_tiny(tmp_path / "b", config, part=part, wrap=lying)
    go_back(tmp_path / "b" / "checkpoint", 2)
    ran = run_tiny(tmp_path / "b", config, part=part, wrap=lying, resume=True)
    assert {row["site"] for row in ran.rounds()} == {"s1", "s2"}
    assert hash_state(ran.state) == hash_state(honest.state)
