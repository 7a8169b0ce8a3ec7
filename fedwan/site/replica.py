"""What trains at a site: the workload's live tensors beside the global weights they started from.

Memory: the model and its optimisers, which the workload owns, and one copy of the global weights.
Where the site's processes share moments or gradients out, those that lie with others are on torch's
`meta` device here, and had one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.config import InnerConfig
from fedwan.errors import UserError
from fedwan.fragments import Fragment
from fedwan.site.holding import GRADIENT, WEIGHT, holding_of, parameter_of
from fedwan.state import (
    Layout,
    OnDemand,
    Role,
    State,
    hash_state,
    layout_of,
    network_of,
    refresh_spectral_norm,
    state_of,
)
from fedwan.workloads.base import Keeping, Workload
from fedwan.workloads.home import staying_home
from fedwan.workloads.moments import (
    averaged,
    is_moment,
    model_name,
    moment_layout,
    optimizer_name,
)

__all__ = ["Replica"]


class Replica:
    """A site's copy of the networks.

    Args:
        workload: freshly built, holding the initial weights.
        inner: by network: what becomes of its moments when an update lands; kept if not named.
        exclude: by network: patterns of names of its tensors that stay at this site.

    Raises:
        ConfigError: of `exclude`, or of networks that have nothing to train: see `staying_home`.
    """

    def __init__(
        self,
        workload: Workload,
        inner: Mapping[str, InnerConfig] | None = None,
        exclude: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.workload = workload
        self._inner = inner or {}
        trained = {n: m for n, m in workload.networks.items() if n in workload.optimizers}
        frozen = {n: m for n, m in workload.networks.items() if n not in workload.optimizers}
        self._trained = trained
        home = staying_home(workload.networks, workload.optimizers, exclude or {})
        self.live: State = state_of(trained, home)
        self.local: State = {
            name: tensor
            for name, tensor in _named(trained)
            if name not in self.live and home.get(name) is not Role.FROZEN
        }
        """What is this site's own (excluded tensors, spectral norm's vectors), sharing memory."""
        self._fixed = {n: t for n, t in _named(trained) if home.get(n) is Role.FROZEN}
        self.kept: Mapping[str, Tensor] = workload.kept if isinstance(workload, Keeping) else {}
        """What is kept beside networks and optimisers, sharing memory with who keeps it."""
        self.layout: Layout = layout_of(trained, home)
        self.layout = dict(sorted((self.layout | moment_layout(self.layout, self._inner)).items()))
        self.holding = holding_of(workload)
        pieces = self.holding.weights()
        for here in (self.live, self.local, self._fixed):
            here |= {name: pieces[name] for name in here.keys() & pieces.keys()}
        self._share_moments()
        self.base: State = {n: self._widen(n, self.take(n)).clone() for n in self.live}
        self.initial_sha256 = hash_state(self.base)
        others = state_of(frozen)
        self.frozen_sha256 = hash_state(
            OnDemand([*others, *self._fixed], lambda n: others[n] if n in others else self.take(n))
        )
        self._fixed_marks = _marks(self._fixed)

    def _check_fixed(self) -> None:
        """Refuse to go on where frozen parameters have changed: they would never be merged.

        Not of those that lie in pieces.
        """
        marks = _marks(self._fixed)
        for name in (name for name, mark in marks.items() if mark != self._fixed_marks[name]):
            raise UserError(
                f"parameter {name!r} was frozen when training began (no gradient was required, or "
                "no optimiser held it), so that it does not travel, and has changed since; have "
                "its optimiser step it from the beginning, or make it a buffer"
            )

    def _widen(self, name: str, value: Tensor) -> Tensor:
        """Parameters in fp32, as the coordinator keeps them; everything else as it is."""
        return value.float() if self.layout[name].role is Role.PARAMETER else value

    def _share_moments(self) -> None:
        """Have moments that travel among the live tensors; to be called when they were replaced."""
        networks = averaged(self._inner)
        self.holding.begin(networks)
        moments = self.holding.moments() if networks else {}
        self.live |= {
            model_name(name): value
            for name, value in moments.items()
            if network_of(parameter_of(name)) in networks and model_name(name) in self.layout
        }

    def _forget_moments(self, names: Iterable[str]) -> None:
        """Of these parameters, where that is what becomes of them."""
        forgetful = {n for n, config in self._inner.items() if config.state == "reset"}
        wanted = {name for name in names if network_of(name) in forgetful}
        if wanted:
            self.holding.forget(wanted)

    def _find(self, name: str) -> Tensor:
        for tensors in (self.live, self.local):
            if name in tensors:
                return tensors[name]
        return self._fixed[name]

    def take(self, name: str) -> Tensor:
        """A tensor of the trained networks, or a moment that travels, wherever it lies."""
        value = self._find(name)
        return self.holding.take(_held(name)) if value.is_meta else value

    def put(self, name: str, value: Tensor) -> None:
        """Write a value into one, wherever it lies."""
        if self._find(name).is_meta:
            self.holding.put(_held(name), value)
        else:
            self._find(name).copy_(value)

    @contextmanager
    def _changing(self, name: str) -> Iterator[Tensor]:
        """A live tensor to change in place, wherever it lies."""
        value = self.take(name)
        yield value
        if self.live[name].is_meta:
            self.put(name, value)

    def delta(self) -> Mapping[str, Tensor]:
        """Δ = global - local for parameters, local values for the rest; made when taken.

        Raises:
            UserError: a frozen parameter was changed.
        """
        self._check_fixed()
        return OnDemand(self.layout, self._delta_of)

    def _delta_of(self, name: str) -> Tensor:
        is_parameter = self.layout[name].role is Role.PARAMETER
        return self._landed(name) - self.take(name) if is_parameter else self.take(name)

    def _landed(self, name: str) -> Tensor:
        """A global weight in its own dtype, but rounded as it lands in the local one.

        What rounding takes away is no step of the site: in Δ it would be merged into the global
        weights, and what adds up there be lost.
        """
        base, dtype = self.base[name], self.live[name].dtype
        return base if base.dtype == dtype else base.to(dtype).to(base.dtype)

    def take_delta(self, fragment: Fragment, room: State) -> None:
        """Write a fragment's Δ, and its local values that are no parameters, into a room's tensors.

        One pass over the weights: a delta may wait for its encoding while training goes on.

        Raises:
            UserError: a frozen parameter was changed.
        """
        self._check_fixed()
        for name, spec in fragment.layout.items():
            if spec.role is Role.PARAMETER:
                torch.sub(self._landed(name), self.take(name), out=room[name])
            else:
                room[name].copy_(self.take(name))

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients of parameters (zero where there is none), local values for the rest.

        Raises:
            UserError: a frozen parameter was changed.
        """
        self._check_fixed()
        return OnDemand(self.live, self._gradient_of)

    def _gradient_of(self, name: str) -> Tensor:
        is_parameter = self.layout[name].role is Role.PARAMETER
        return self.holding.take(_gradient(name)) if is_parameter else self.take(name)

    def advance(self, payload: Source, fragment: Fragment, codec: Codec) -> None:
        """Global += update, for every tensor of the fragment; the local weights stay.

        Raises:
            PayloadError: the payload is damaged. The replica is then in between two versions: end
                this process; its successor takes the global weights.
        """
        for name, coded in codec.read_each(payload, fragment.layout):
            if self.layout[name].role is Role.PARAMETER:
                coded.add_to(self.base[name])
            else:
                self.base[name].copy_(coded.tensor())

    def land(self, fragment: Fragment, alpha: float, correction: State | None = None) -> None:
        """L ← α l + (1 - α) g for a fragment's parameters, l ← g for the rest of it.

        Args:
            fragment: which.
            alpha: share of the local weights that is kept.
            correction: if given, parameters are moved by it instead.
        """
        for name, spec in fragment.layout.items():
            base = self.base[name]
            if spec.role is Role.PARAMETER and correction is not None:
                with self._changing(name) as live:
                    live.add_(correction[name])
            elif spec.role is Role.PARAMETER and alpha:
                with self._changing(name) as live:
                    live.lerp_(base.to(live.dtype), 1.0 - alpha)
            else:
                self.put(name, base)
        self._forget_moments(fragment.layout)
        refresh_spectral_norm(self._trained)

    def owe(self, owed: State) -> None:
        """L ← l - e: keep in the local weights what error feedback has not sent yet."""
        for name, value in owed.items():
            with self._changing(name) as live:
                live.sub_(value.to(live.device, live.dtype))
        if owed:
            refresh_spectral_norm(self._trained)

    def apply_gradients(self, payload: Source, fragment: Fragment, codec: Codec) -> None:
        """Put the mean gradient in place of the local one, and set merged buffers.

        Raises:
            PayloadError: see `advance`.
        """
        for name, value in codec.decode_each(payload, fragment.layout):
            if self.layout[name].role is Role.PARAMETER:
                self.holding.put(_gradient(name), value)
            else:
                self.put(name, value)

    def reset(self) -> None:
        """Local = global: throw the steps since the last update away."""
        for name in self.live:
            self.put(name, self.base[name])
        refresh_spectral_norm(self._trained)

    def load_base(self, weights: State) -> None:
        """Set the global weights and leave the local ones."""
        for name, value in weights.items():
            self.base[name].copy_(value)

    def adopt(self, weights: State) -> None:
        """Take global weights over as both global and local."""
        self.load_base(weights)
        self.reset()
        self._forget_moments(weights)

    def load_live(self, weights: State) -> None:
        """Set the local weights and leave the global ones: steps taken since the last update."""
        for name, value in weights.items():
            self.put(name, value)

    def load_local(self, tensors: State) -> None:
        """Set those of `local` that are named."""
        for name, value in tensors.items():
            self.put(name, value)

    def keep(self, tensors: State) -> None:
        """Have checkpoints keep these as well, and write into them what they kept."""
        self.kept = {**self.kept, **tensors}

    def load_kept(self, tensors: State) -> None:
        """Set what the workload keeps; what it keeps under no such name is left out."""
        for name in self.kept.keys() & tensors.keys():
            self.kept[name].copy_(tensors[name])

    def global_sha256(self) -> str:
        """Hash of the live weights as the coordinator would keep them.

        It keeps what rounds to them, if that is what it sent last.
        """
        return hash_state(OnDemand(self.live, self._kept_as))

    def _kept_as(self, name: str) -> Tensor:
        value, base = self.take(name), self.base[name]
        is_rounded = value.dtype != base.dtype and torch.equal(value, base.to(value.dtype))
        return base if is_rounded else self._widen(name, value)

    @contextmanager
    def showing(self, weights: State) -> Iterator[None]:
        """The networks hold other weights, in evaluation mode, for a while.

        Costs a second copy of the model meanwhile.
        """
        both = self.live | self.local
        present = {n: v for n, v in both.items() if not (is_moment(n) or v.is_meta)}
        kept = {name: value.clone() for name, value in present.items()}
        modules = [m for network in self._trained.values() for m in network.modules()]
        modes = [module.training for module in modules]
        try:
            with self.holding.lending():
                for name, value in weights.items():
                    if not is_moment(name):
                        self.put(name, value)
                refresh_spectral_norm(self._trained)
                for network in self._trained.values():
                    network.eval()
                yield
        finally:
            for name, value in kept.items():
                present[name].copy_(value)
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def optimizer_state(self) -> State:
        """All inner optimisers' tensors, by network and parameter; no copies."""
        return self.holding.moments()

    def reset_optimizers(self) -> None:
        """Forget all inner optimisers' state, as if they had never stepped."""
        self.holding.forget()
        self._share_moments()

    def load_optimizers(self, flat: State) -> None:
        """The inverse of `optimizer_state`."""
        self.holding.load(flat)
        self._share_moments()


def _named(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every buffer and parameter, sharing memory."""
    for network, module in networks.items():
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            yield f"{network}/{name}", tensor.detach()


def _marks(state: State) -> dict[str, tuple[int, int]]:
    """What tells whether a tensor was written to."""
    return {name: (value.data_ptr(), value._version) for name, value in state.items()}


def _held(name: str) -> str:
    """The name in a holding of a tensor that lies elsewhere: a moment or a parameter."""
    return optimizer_name(name if is_moment(name) else f"{name}|{WEIGHT}")


def _gradient(parameter: str) -> str:
    """Its name in a holding."""
    return optimizer_name(f"{parameter}|{GRADIENT}")
