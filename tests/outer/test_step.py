"""Merged contributions become global weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan import outer
from fedwan.codecs import plain
from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError, ConfigError, UserError
from fedwan.outer.step import MirrorInner, ServerStep, StepInner, step_outer
from fedwan.state import Layout, Role, State, clone, read_tensors, write_tensors
from tests.support import random_state, same_bits, spec

LAYOUT: Layout = {
    "discriminator/w": spec((3,)),
    "generator/b": spec((2,)),
    "generator/n": spec((), Role.COUNTER, torch.int64),
    "generator/running_mean": spec((2,), Role.MEAN),
    "generator/w": spec((2, 2)),
}
TRANSFORMS = {
    "discriminator": outer.sgd(1.0),
    "generator": outer.nesterov(0.5, 0.5),
}


def advance(step: ServerStep, seeds: range, layout: Layout = LAYOUT) -> None:
    for seed in seeds:
        step.commit(plain(step.propose(random_state(seed, layout))))


# Outer transforms --------------------------------------------------------------------------------


def test_names_that_end_alike_keep_their_own_state() -> None:
    layout = {"a/w": spec((1,)), "aa/w": spec((1,)), "a/w.w": spec((1,))}
    transforms = {network: outer.nesterov(1.0, 0.5) for network in ("a", "aa")}
    step = step_outer(transforms)(random_state(0, layout), layout)
    advance(step, range(1, 2), layout)
    assert sorted(step.state()) == ["a:momentum:a/w", "a:momentum:a/w.w", "aa:momentum:aa/w"]
    state = step.state()
    for name, value in random_state(1, layout).items():
        assert torch.equal(state[f"{name.partition('/')[0]}:momentum:{name}"], value)
    with pytest.raises(CheckpointError, match=r"outer state 'a:momentum:a/w' of shape \(1,\)"):
        step.load_state({name: value[None] for name, value in state.items()})


BOTH = ("discriminator", "generator")
KINDS = {
    "outer": step_outer(TRANSFORMS),
    **{
        name: partial(MirrorInner, inner={network: InnerConfig(name, lr=1e-2) for network in BOTH})
        for name in ("adam", "adamw", "sgd")
    },
    "server": partial(StepInner, inner={network: InnerConfig("adam", lr=1e-2) for network in BOTH}),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_state_round_trips_and_goes_on_bit_for_bit(
    make: Callable[[State, Layout], ServerStep], tmp_path: Path
) -> None:
    model = random_state(0, LAYOUT)
    step = make(model, LAYOUT)
    advance(step, range(1, 5))
    for name in ("generator/n", "generator/running_mean"):
        assert torch.equal(model[name], random_state(4, LAYOUT)[name]), "set and not stepped"
    write_tensors(tmp_path / "state", step.state(), {})
    resumed = clone(model)
    again = make(resumed, LAYOUT)
    again.load_state(read_tensors(tmp_path / "state")[0])
    assert same_bits(again.state(), step.state())
    for each in (step, again):
        advance(each, range(5, 9))
    assert same_bits(model, resumed)
    other = KINDS["adam" if make is KINDS["outer"] else "outer"](random_state(0, LAYOUT), LAYOUT)
    advance(other, range(1, 2))
    with pytest.raises(CheckpointError):
        step.load_state(other.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_outer_step_may_hand_its_state_on_where_that_is_written_over(dtype: Any) -> None:
    """As one does that is two rounds late; where memory is short its state lies in files."""

    def init(param: Tensor) -> State:
        return {age: param * 0 for age in ("new", "old")}

    def update(delta: Tensor, state: State) -> tuple[Tensor, State]:
        return state["old"].float(), {"new": -delta.to(dtype), "old": state["new"]}

    layout = {"net/b": spec((3,)), "net/w": spec((2, 2))}
    ends, moves = list[tuple[State, State]](), [random_state(n, layout) for n in range(1, 5)]
    for is_offloaded in (False, True):
        weights = {name: torch.zeros_like(value) for name, value in moves[0].items()}
        step = step_outer(outer.Transform(init, update))(weights, layout)
        if is_offloaded:
            step.offload(clone)
        for move in moves:
            step.commit(plain(step.propose(clone(move))))
        ends.append((weights, step.state()))
        assert same_bits(weights, {n: -moves[0][n] - moves[1][n] for n in layout})
    assert all(map(same_bits, *ends))


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_an_update_that_is_the_state_itself_is_a_copy_of_it(is_offloaded: bool) -> None:
    """Whoever gets it writes to it: the next link of a chain, and the codec on its way down."""

    def update(delta: Tensor, state: State) -> tuple[Tensor, State]:
        return state["sum"].mul_(0.5).add_(delta), {}  # the state is written to, and not named

    halving = outer.Transform(lambda param: {"sum": torch.zeros_like(param)}, update)
    for transform, scale in ((halving, 1.0), (outer.chain(halving, outer.sgd(-2.0)), 2.0)):
        layout: Layout = {"net/w": spec((2,))}
        step = step_outer(transform)({"net/w": torch.zeros(2)}, layout)
        if is_offloaded:
            step.offload(clone)
        for expected in (1.0, 1.5, 1.75):
            moved = step.propose({"net/w": torch.ones(2)})["net/w"]
            assert moved.tolist() == [scale * expected] * 2
            moved.fill_(7.0)
            (kept,) = step.state().values()
            assert kept.tolist() == [expected] * 2


def test_a_model_of_other_networks_is_refused() -> None:
    fewer = {"generator": TRANSFORMS["generator"]}
    with pytest.raises(ConfigError, match="steps generator but .* discriminator, generator"):
        step_outer(fewer)(random_state(0, LAYOUT), LAYOUT)


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (lambda delta, state: (delta[:1], state), "of shape .* and not"),
        (lambda delta, state: ({}, state), r"failed at '.*': TypeError.* its \(update, state"),
        (lambda delta, state: delta.sum(), "failed at '.*': TypeError"),
        (lambda delta, state: (delta, {"m": 0}), "state 'm' that init did not make"),
        (lambda delta, state: (delta, {"own": 1}), "state 'own' that is no tensor"),
    ],
)
def test_an_outer_step_that_breaks_the_weights_is_refused_before_it_moves_them(
    update: Any, says: str
) -> None:
    model = random_state(0, LAYOUT)
    before = clone(model)
    broken = outer.Transform(lambda param: {"own": torch.zeros(())}, update)
    with pytest.raises(UserError, match=says):
        step_outer(broken)(model, LAYOUT).propose(random_state(1, LAYOUT))
    assert same_bits(model, before)


def test_an_outer_step_that_cannot_begin_says_what_it_is_given() -> None:
    init: Any = lambda params: {name: value * 0 for name, value in params.items()}  # noqa: E731
    for_all = outer.Transform(init, lambda delta, state: (delta, state))
    with pytest.raises(UserError, match=r"cannot begin at '.*': AttributeError.* gets a tensor"):
        step_outer(for_all)(random_state(0, LAYOUT), LAYOUT)


def test_a_parameter_server_holds_gradients_once_and_moves_nothing_before_it_commits() -> None:
    model, merged = random_state(0, LAYOUT), random_state(1, LAYOUT)
    before = clone(model)
    KINDS["server"](model, LAYOUT).propose(merged)
    assert not merged and same_bits(model, before)


def test_a_mean_taken_for_several_contributions_is_stepped_as_often() -> None:
    transforms = {
        "discriminator": outer.sgd(0.5),
        "generator": outer.delayed_nesterov(0.5, 0.5, every=3),
    }
    once, thrice = random_state(0, LAYOUT), random_state(0, LAYOUT)
    step = step_outer(transforms)(once, LAYOUT)
    step.commit(plain(step.propose(random_state(1, LAYOUT), times=3)))
    other = step_outer(transforms)(thrice, LAYOUT)
    for _ in range(3):
        other.commit(plain(other.propose(random_state(1, LAYOUT))))
    torch.testing.assert_close(once, thrice)
    assert same_bits(step.state(), other.state())
