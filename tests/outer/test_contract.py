"""What every outer transform must do, whatever its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedwan.outer import Transform, chain, clip_by_norm, delayed_nesterov, nesterov, sgd
from fedwan.state import State, clone, read_tensors, write_tensors
from tests.support import same_bits

TRANSFORMS = {
    "sgd": sgd(0.7),
    "nesterov": nesterov(0.7, 0.9),
    "nesterov_without_momentum": nesterov(0.7, 0.0),
    "delayed_nesterov": delayed_nesterov(0.7, 0.9, every=3),
    "clip": clip_by_norm(0.5),
    "clip_never": clip_by_norm(1e9),
    "chain": chain(clip_by_norm(0.5), nesterov(0.7, 0.9)),
    "nested_chain": chain(chain(clip_by_norm(2.0)), chain(nesterov(0.5, 0.5), sgd(-1.0))),
    "empty_chain": chain(),
}

every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


def random_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "g/empty": (0, 3),
        "g/scalar": (),
        "g/vector": (5,),
        "g/weight": (3, 4),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def run(transform: Transform, state: State, steps: range) -> tuple[list[State], State]:
    updates = []
    for step in steps:
        update, state = transform.update(random_state(step), state, random_state(0))
        updates.append(update)
    return updates, state


@every_transform
def test_keeps_names_shapes_and_dtypes(transform: Transform) -> None:
    delta = random_state(1)
    update, _ = transform.update(delta, transform.init(random_state(0)), random_state(0))
    assert list(update) == list(delta)
    for name, value in update.items():
        assert (value.shape, value.dtype) == (delta[name].shape, delta[name].dtype)


@every_transform
def test_mutates_none_of_its_inputs(transform: Transform) -> None:
    params, delta = random_state(0), random_state(1)
    _, state = run(transform, transform.init(params), range(2, 4))
    inputs = (params, delta, state)
    before = [clone(value) for value in inputs]
    transform.init(params)
    transform.update(delta, state, params)
    assert all(same_bits(a, b) for a, b in zip(inputs, before, strict=True))


@every_transform
def test_update_shares_no_memory_with_parameters_or_state(transform: Transform) -> None:
    params = random_state(0)
    old = transform.init(params)
    update, new = transform.update(random_state(1), old, params)
    kept = {n: v for state in (params, old, new) for n, v in state.items() if v.numel()}
    addresses = {value.data_ptr() for value in kept.values()}
    assert not addresses & {value.data_ptr() for value in update.values() if value.numel()}


@every_transform
def test_state_round_trips_through_safetensors(transform: Transform, tmp_path: Path) -> None:
    _, state = run(transform, transform.init(random_state(0)), range(1, 4))
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    write_tensors(tmp_path / "state", state, {})
    assert same_bits(read_tensors(tmp_path / "state")[0], state)


@every_transform
def test_state_keeps_its_names_and_shapes(transform: Transform) -> None:
    first = transform.init(random_state(0))
    _, last = run(transform, first, range(1, 4))
    assert {n: v.shape for n, v in first.items()} == {n: v.shape for n, v in last.items()}


@every_transform
def test_every_state_name_ends_in_its_tensors_name(transform: Transform) -> None:
    params = random_state(0)
    assert all(name.rpartition(":")[2] in params for name in transform.init(params))


@every_transform
def test_resume_is_bit_identical(transform: Transform, tmp_path: Path) -> None:
    first = transform.init(random_state(0))
    whole, last = run(transform, first, range(1, 9))
    _, middle = run(transform, first, range(1, 5))
    write_tensors(tmp_path / "state", middle, {})
    resumed, end = run(transform, read_tensors(tmp_path / "state")[0], range(5, 9))
    assert all(same_bits(a, b) for a, b in zip(whole[4:], resumed, strict=True))
    assert same_bits(end, last)


@pytest.mark.parametrize("transform", [t for t in TRANSFORMS.values() if t.per_tensor])
def test_per_tensor_means_one_tensor_at_a_time_gives_the_same(transform: Transform) -> None:
    params, delta = random_state(0), random_state(1)
    _, state = run(transform, transform.init(params), range(2, 4))
    whole, after = transform.update(delta, state, params)
    for name, value in delta.items():
        part = {n: v for n, v in state.items() if n.endswith(f":{name}")}
        update, new = transform.update({name: value}, part, {name: params[name]})
        assert same_bits(update, {name: whole[name]})
        assert same_bits(new, {n: after[n] for n in part})


@every_transform
def test_the_same_inputs_give_the_same_bits(transform: Transform) -> None:
    first, second = (run(transform, transform.init(random_state(0)), range(1, 4)) for _ in "ab")
    assert all(same_bits(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert same_bits(first[1], second[1])


@every_transform
def test_nothing_in_nothing_out(transform: Transform) -> None:
    update, state = transform.update({}, transform.init({}), {})
    assert (update, state) == ({}, {})
