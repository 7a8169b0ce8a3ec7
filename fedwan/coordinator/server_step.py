"""What the coordinator does with a merged contribution, in two halves.

`propose(merged)` gives what will be broadcast; it is coded once for all sites; `commit(update)`
then moves the global weights by what the sites will decode, so that every party ends on the same
bits whatever the codec loses. Tensors that are no parameters (running means and so on) are merged
already: they pass through and are set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from fedwan.codecs import Coded, plain
from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError, ConfigError
from fedwan.optim_state import NamedOptimizers
from fedwan.outer import Transform
from fedwan.state import Layout, Role, State, add_prefix, network_of, select_prefix
from fedwan.workloads.optim import build_optimizer, clip, set_rates


class ServerStep(Protocol):
    """Turns merged contributions into new global weights."""

    def begin(self, run_step: int) -> None:
        """An update is made next, after so many steps of the run; learning rates follow it."""
        ...

    def propose(self, merged: State, times: int = 1) -> State:
        """What to broadcast."""
        ...

    def commit(self, update: Mapping[str, Coded]) -> None:
        """Move the global state, in place, by what was broadcast."""
        ...

    def state(self) -> State:
        """The optimiser's state, for checkpoints and for sites that rejoin; no copies."""
        ...

    def load_state(self, state: State) -> None:
        """The inverse of `state`; a `CheckpointError` if it is of another strategy or model."""
        ...


class _Outer:
    """Deltas go through an outer transform per network; the global state is a sum of updates."""

    def __init__(self, model: State, layout: Layout, transforms: Mapping[str, Transform]) -> None:
        self._model = model
        self._layout = layout
        _check_networks(layout, transforms)
        self._transforms = transforms
        self._state: dict[str, State] = {}
        self._names: dict[str, dict[str, list[str]]] = {}
        for network, transform in transforms.items():
            names = _parameters(layout, network)
            self._state[network] = transform.init({n: model[n] for n in names})
            self._names[network] = _names_by_tensor(self._state[network], names)

    def begin(self, run_step: int) -> None:
        pass

    def propose(self, merged: State, times: int = 1) -> State:
        out: State = {}
        for name in list(merged):
            out[name] = merged.pop(name)
            if self._layout[name].role is Role.PARAMETER:
                delta = out[name]
                out[name] = self._update(name, delta)
                for _ in range(times - 1):
                    out[name].add_(self._update(name, delta))
        return out

    def _update(self, name: str, delta: Tensor) -> Tensor:
        network = network_of(name)
        whole = self._state[network]
        part = {n: whole[n] for n in self._names[network][name]}
        update, new = self._transforms[network].update({name: delta}, part)
        assert new.keys() <= whole.keys(), "an outer transform made state that `init` did not"
        whole.update(new)
        return update[name]

    def commit(self, update: Mapping[str, Coded]) -> None:
        _move(self._model, self._layout, update)

    def state(self) -> State:
        flat: State = {}
        for network, state in self._state.items():
            flat |= add_prefix(network, state)
        return flat

    def load_state(self, state: State) -> None:
        shapes = {name: value.shape for name, value in self.state().items()}
        found = {name: value.shape for name, value in state.items()}
        if found != shapes:
            odd = min(n for n in {**shapes, **found} if shapes.get(n) != found.get(n))
            raise CheckpointError(
                f"outer state {odd!r} is {_shape_text(found, odd)} in the checkpoint and "
                f"{_shape_text(shapes, odd)} in this strategy; "
                "resume with the strategy and model that the run began with"
            )
        for network in self._state:
            self._state[network] = select_prefix(network, state)


class _Mirror:
    """Gradients go to the same inner optimiser as at every site, stepped on the global weights."""

    def __init__(
        self, model: State, layout: Layout, inner: Mapping[str, InnerConfig], num_steps: int
    ) -> None:
        self._model = model
        self._layout = layout
        _check_networks(layout, inner)
        self._inner = inner
        self._num_steps = num_steps
        self._params: dict[str, dict[str, Tensor]] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for network, config in inner.items():
            params = {n: model[n] for n in _parameters(layout, network)}
            self._params[network] = params
            self._optimizers[network] = build_optimizer(config, list(params.values()))
        everything = {name: p for params in self._params.values() for name, p in params.items()}
        self._named = NamedOptimizers(everything, self._optimizers)

    def begin(self, run_step: int) -> None:
        set_rates(self._optimizers, self._inner, run_step, self._num_steps)

    def propose(self, merged: State, times: int = 1) -> State:
        return {name: merged.pop(name) for name in list(merged)}

    def commit(self, update: Mapping[str, Coded]) -> None:
        for name, coded in update.items():
            if self._layout[name].role is not Role.PARAMETER:
                coded.write_to(self._model[name])
        for network, optimizer in self._optimizers.items():
            params = self._params[network]
            for name, param in params.items():
                param.grad = torch.empty_like(param)
                update[name].write_to(param.grad)
            clip(list(params.values()), self._inner[network].clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> State:
        return self._named.state()

    def load_state(self, state: State) -> None:
        self._named.load(state)


class _Inner:
    """Gradients go to inner optimisers that the coordinator alone has: a parameter server."""

    def __init__(
        self, model: State, layout: Layout, inner: Mapping[str, InnerConfig], num_steps: int
    ) -> None:
        self._model = model
        self._layout = layout
        # Steps on copies: what sites decode may differ from what was stepped, and it is this that
        # moves the global weights.
        self._params = {
            name: torch.zeros_like(value)
            for name, value in model.items()
            if layout[name].role is Role.PARAMETER
        }
        self._mirror = _Mirror(self._params, _parameters_only(layout), inner, num_steps)

    def begin(self, run_step: int) -> None:
        self._mirror.begin(run_step)

    def propose(self, merged: State, times: int = 1) -> State:
        order = list(merged)
        out = {n: merged.pop(n) for n in order if self._layout[n].role is not Role.PARAMETER}
        for name, value in self._params.items():
            value.copy_(self._model[name])
        self._mirror.commit(plain(merged))
        out |= {name: value - self._model[name] for name, value in self._params.items()}
        return {name: out[name] for name in order}

    def commit(self, update: Mapping[str, Coded]) -> None:
        _move(self._model, self._layout, update)

    def state(self) -> State:
        return self._mirror.state()

    def load_state(self, state: State) -> None:
        self._mirror.load_state(state)


def _move(model: State, layout: Layout, update: Mapping[str, Coded]) -> None:
    """Parameters += update; everything else is set."""
    for name, coded in update.items():
        if layout[name].role is Role.PARAMETER:
            coded.add_to(model[name])
        else:
            coded.write_to(model[name])


def _parameters_only(layout: Layout) -> Layout:
    return {name: spec for name, spec in layout.items() if spec.role is Role.PARAMETER}


def _check_networks(layout: Layout, stepped: Iterable[str]) -> None:
    trained = {network_of(n) for n, spec in layout.items() if spec.role is Role.PARAMETER}
    if trained != set(stepped):
        raise ConfigError(
            f"the strategy steps {', '.join(sorted(stepped))} but the model has parameters of "
            f"{', '.join(sorted(trained))}; list the trained networks in the workload's NETWORKS"
        )


def _shape_text(shapes: Mapping[str, torch.Size], name: str) -> str:
    return f"of shape {tuple(shapes[name])}" if name in shapes else "absent"


def _parameters(layout: Layout, network: str) -> list[str]:
    """A network's parameters in the layout's order, which is name order."""
    return [
        name
        for name, spec in layout.items()
        if spec.role is Role.PARAMETER and network_of(name) == network
    ]


def _names_by_tensor(state: State, tensors: Iterable[str]) -> dict[str, list[str]]:
    """Each tensor's own part of an outer state: names end in ":tensor", whatever the chain."""
    names: dict[str, list[str]] = {tensor: [] for tensor in tensors}
    for name in state:
        tail = name
        while tail and tail not in names:
            tail = tail.partition(":")[2]
        if tail:
            names[tail].append(name)
    return names


def step_outer(transforms: Mapping[str, Transform]) -> Callable[[State, Layout], ServerStep]:
    """Outer transforms by network: DiLoCo and its kin.

    What it returns raises a `ConfigError` for a model of other networks.
    """
    return lambda model, layout: _Outer(model, layout, transforms)


def mirror_inner(
    inner: Mapping[str, InnerConfig], num_steps: int = 0
) -> Callable[[State, Layout], ServerStep]:
    """The sites' own inner optimisers by network: synchronous data parallel.

    Sites and coordinator step the same optimiser on the same mean gradient, so the coordinator
    knows the global weights without ever being sent them. Optimiser state costs as much as at a
    site. `num_steps` are the run's, for learning rates that change.
    """
    return lambda model, layout: _Mirror(model, layout, inner, num_steps)


def step_inner(
    inner: Mapping[str, InnerConfig], num_steps: int = 0
) -> Callable[[State, Layout], ServerStep]:
    """Inner optimisers by network, stepped on every merged gradient: a parameter server.

    What is broadcast is the step itself, so that sites need no optimiser. Costs the optimisers'
    state and one more copy of the parameters. `num_steps` are the run's, for learning rates that
    change.
    """
    return lambda model, layout: _Inner(model, layout, inner, num_steps)
