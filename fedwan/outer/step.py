"""What the coordinator does with a merged contribution, in two halves.

`propose(merged)` gives what will be broadcast; it is coded once for all sites; `commit(update)`
then moves the global weights by what the sites will decode, so that every party ends on the same
bits whatever the codec loses. Tensors that are no parameters (running means and so on) are merged
already: they pass through and are set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from fedwan.codecs import Coded
from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError, ConfigError, UserError, place_of
from fedwan.optim_state import NamedOptimizers
from fedwan.outer import Transform, sgd
from fedwan.outer.transforms import apart
from fedwan.state import Layout, Role, State, is_moment, network_of
from fedwan.workloads.optim import begin_moments, build_optimizer, clip, set_rates

_MEAN = sgd(1.0)


class ServerStep:
    """Turns merged contributions into new global weights: `model`, which is moved in place."""

    def __init__(self, model: State, layout: Layout, networks: Iterable[str]) -> None:
        self._model = model
        self._parameters: dict[str, list[str]] = {}
        """By network, in name order."""
        for name, spec in layout.items():
            if spec.role is Role.PARAMETER:
                self._parameters.setdefault(network_of(name), []).append(name)
        self._names = {name for names in self._parameters.values() for name in names}
        if set(networks) != self._parameters.keys():
            raise ConfigError(
                f"the strategy steps {', '.join(sorted(networks))} but the model has parameters of "
                f"{', '.join(sorted(self._parameters))}; list the trained networks in the "
                "workload's NETWORKS"
            )

    def propose(self, merged: State, times: int = 1, run_step: int = 0) -> State:
        """What to broadcast; `merged`, which is emptied, counts as so many contributions.

        `run_step` are the steps of the run so far, which learning rates may follow.
        """
        order = list(merged)
        out = {name: merged.pop(name) for name in order if name not in self._names}
        out |= self._step(merged, times, run_step)
        return {name: out[name] for name in order}

    def _step(self, merged: State, times: int, run_step: int) -> State:
        raise NotImplementedError

    def commit(self, update: Mapping[str, Coded]) -> None:
        """Move the global state by what was broadcast: parameters += update, all else is set."""
        for name, coded in update.items():
            if name in self._names:
                coded.add_to(self._model[name])
            else:
                coded.write_to(self._model[name])

    def offload(self, copy: Callable[[State], State]) -> None:
        """Keep the optimiser's state in what `copy` makes of it, and write to that."""
        raise NotImplementedError

    def state(self) -> State:
        """The optimiser's state, for checkpoints and for sites that rejoin; no copies."""
        raise NotImplementedError

    def load_state(self, state: State) -> None:
        """The inverse of `state`; a `CheckpointError` if it is of another strategy or model."""
        raise NotImplementedError


class _Outer(ServerStep):
    """Deltas go through an outer transform per network; the global state is a sum of updates."""

    def __init__(self, model: State, layout: Layout, transforms: Mapping[str, Transform]) -> None:
        super().__init__(model, layout, transforms)
        self._transforms = transforms
        self._is_offloaded = False
        self._state: dict[str, State] = {
            name: self._begin(name, model[name])
            for network in transforms
            for name in self._parameters[network]
        }
        """By tensor, its state by field."""

    def _begin(self, name: str, param: Tensor) -> State:
        try:
            return dict(self._of(name).init(param))
        except Exception as error:
            raise UserError(
                f"the outer step of {network_of(name)} cannot begin at {name!r}: {error!r}"
                f"{place_of(error)}; its init gets a tensor and returns the tensor's state by field"
            ) from None

    def _of(self, name: str) -> Transform:
        """Averages that sites make go where their mean is, whatever the weights do."""
        return _MEAN if is_moment(name) else self._transforms[network_of(name)]

    def _step(self, merged: State, times: int, run_step: int) -> State:
        out: State = {}
        for name in list(merged):
            delta = merged.pop(name)
            for left in reversed(range(times)):
                moved = self._update(name, delta.clone() if left else delta)
                out[name] = out[name].add_(moved) if name in out else moved
        return out

    def _update(self, name: str, delta: Tensor) -> Tensor:
        network, part = network_of(name), self._state[name]
        try:
            moved, new = self._of(name).update(delta, dict(part))
            if not isinstance(moved, Tensor):
                raise TypeError(f"a {type(moved).__name__} in place of a tensor")
            if odd := new.keys() - part.keys():
                raise KeyError(f"state {min(odd)!r} that init did not make")
            if odd := {own for own, value in new.items() if not isinstance(value, Tensor)}:
                raise TypeError(f"state {min(odd)!r} that is no tensor")
            moved = apart(moved, part, new)
            if self._is_offloaded:
                new = _written(part, new)
        except Exception as error:
            raise UserError(
                f"the outer step of {network} failed at {name!r}: {error!r}{place_of(error)}; its "
                "update gets a tensor's (Δ, state) and returns its (update, state)"
            ) from None
        if moved.shape != delta.shape:
            raise UserError(
                f"the outer step of {network} made an update of {name!r} of shape "
                f"{tuple(moved.shape)} and not {tuple(delta.shape)}; mend its Transform"
            )
        part.update(new)
        return moved

    def offload(self, copy: Callable[[State], State]) -> None:
        """See `ServerStep`."""
        self.load_state(copy(self.state()))
        self._is_offloaded = True

    def state(self) -> State:
        return {
            f"{network_of(name)}:{field}:{name}": value
            for name, part in self._state.items()
            for field, value in part.items()
        }

    def load_state(self, state: State) -> None:
        present, saved = (
            {(n, tuple(v.shape)) for n, v in each.items()} for each in (self.state(), state)
        )
        if odd := present ^ saved:
            name, shape = min(odd)
            raise CheckpointError(
                f"outer state {name!r} of shape {shape} is in the checkpoint or in this strategy "
                "alone; resume with the strategy and model that the run began with"
            )
        for name, part in self._state.items():
            part.update({own: state[f"{network_of(name)}:{own}:{name}"] for own in part})


def _written(part: State, new: State) -> State:
    """A state, written to where the one before it is, if it fits there."""
    # It may hand on tensors of the one before, under another name.
    free = {own: v if v is part[own] else apart(v, part) for own, v in new.items()}
    for own, value in free.items():
        at = part[own]
        if value is not at and (value.dtype, value.shape) == (at.dtype, at.shape):
            free[own] = at.copy_(value)
    return free


class StepInner(ServerStep):
    """Inner optimisers by network, stepped on every merged gradient: a parameter server.

    What is broadcast is the step itself. Costs the optimisers' state and one more copy of the
    parameters, `_stepped`; `num_steps` are the run's, for learning rates that change.
    """

    def __init__(
        self, model: State, layout: Layout, inner: Mapping[str, InnerConfig], num_steps: int = 0
    ) -> None:
        super().__init__(model, layout, inner)
        self._inner, self._num_steps, self._run_step = inner, num_steps, 0
        self._stepped = self._to_step()
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            network: build_optimizer(config, [self._stepped[n] for n in self._parameters[network]])
            for network, config in inner.items()
        }
        self._named = NamedOptimizers(self._stepped, self._optimizers)

    def _to_step(self) -> State:
        # Copies: what sites decode may differ from what was stepped, and it is this that moves the
        # global weights.
        return {name: torch.zeros_like(self._model[name]) for name in self._names}

    def _step(self, merged: State, times: int, run_step: int) -> State:
        for name, value in self._stepped.items():
            value.copy_(self._model[name])
        self._optimize(merged.pop, run_step)
        return {name: value - self._model[name] for name, value in self._stepped.items()}

    def _optimize(self, take: Callable[[str], Tensor], run_step: int) -> None:
        """A step by gradients, which are taken over by name: clipping spoils them."""
        set_rates(self._optimizers, self._inner, run_step, self._num_steps)
        for network, optimizer in self._optimizers.items():
            params = {name: self._stepped[name] for name in self._parameters[network]}
            for name, param in params.items():
                param.grad = take(name)
            clip(params.values(), self._inner[network].clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def offload(self, copy: Callable[[State], State]) -> None:
        """See `ServerStep`."""
        for network, optimizer in self._optimizers.items():
            params = [self._stepped[name] for name in self._parameters[network]]
            begin_moments(self._inner[network], optimizer, params)
        present = self.state()
        for name, value in copy(present).items():
            present[name].data = value

    def state(self) -> State:
        """See `ServerStep`."""
        return self._named.state()

    def load_state(self, state: State) -> None:
        """See `ServerStep`."""
        self._named.load(state)


class MirrorInner(StepInner):
    """The sites' own inner optimisers, stepped on the global weights: synchronous data parallel.

    Optimiser state costs as much as at a site.
    """

    def _to_step(self) -> State:
        return {name: self._model[name] for name in self._names}

    def _step(self, merged: State, times: int, run_step: int) -> State:
        self._run_step = run_step
        return dict(merged)

    def commit(self, update: Mapping[str, Coded]) -> None:
        """See `ServerStep`."""
        for name in update.keys() - self._names:
            update[name].write_to(self._model[name])

        def decoded(name: str) -> Tensor:
            value = torch.empty_like(self._model[name])
            update[name].write_to(value)
            return value

        self._optimize(decoded, self._run_step)
        for name, value in self._stepped.items():
            if not math.isfinite(float(value.sum())):
                raise UserError(
                    f"the step of {network_of(name)} left {name!r} with values that are not "
                    f"finite; lower inner.{network_of(name)}.lr, and continue with --resume from "
                    "the checkpoint before it"
                )


def step_outer(
    transforms: Mapping[str, Transform] | Transform,
) -> Callable[[State, Layout], ServerStep]:
    """Outer transforms by network, or one for all of them: DiLoCo and its kin.

    What it returns raises a `ConfigError` for a model of other networks.
    """

    def make(model: State, layout: Layout) -> ServerStep:
        if isinstance(transforms, Transform):
            names = [name for name, spec in layout.items() if spec.role is Role.PARAMETER]
            return _Outer(model, layout, dict.fromkeys(map(network_of, names), transforms))
        return _Outer(model, layout, transforms)

    return make
