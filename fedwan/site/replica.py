"""What trains at a site: the live tensors of its networks beside the global weights.

Each process holds the pieces that it trains, and the same pieces of the global weights: all of
them, or under FSDP2 and tensor parallel its part. A tensor is whole only while it travels, one at a
time. Methods that read or write whole tensors are collective (`fedwan.site.group`); whole weights
that they are given are at rank 0 alone.

Memory: one fp32 copy of this process's pieces, the global weights; of buffers alone where every
site's own steps make these, for which the networks are in fp32. Two more of a network whose average
over every step travels.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedwan.codecs import Codec, Coded
from fedwan.codecs.payload import Source
from fedwan.config import InnerConfig
from fedwan.errors import UserError
from fedwan.fragments import Fragment
from fedwan.optim_state import NamedOptimizers, placed
from fedwan.pieces import is_cut, is_plain, local, piece_like, reshard, whole
from fedwan.site.copies import Copies
from fedwan.site.frozen import check_frozen, marks_of
from fedwan.site.group import Group
from fedwan.state import (
    Layout,
    OnDemand,
    Role,
    State,
    ema_name,
    hash_hashes,
    hash_state,
    is_moment,
    is_storable,
    layout_of,
    layout_to_json,
    network_of,
    spectral_norms,
    state_of,
)
from fedwan.workloads.home import staying_home
from fedwan.workloads.optim import averaged, model_name, moment_layout

FIRST_COMPARED, COMPARED_EVERY = 3, 50
"""Gradients of a process that are compared with those of its site's others."""
_OWN = "own:"
"""Before the name of a tensor that never travels, in a checkpoint."""


class Replica:
    """A site's copy of the networks, which hold the initial weights.

    `inner` says by network what becomes of its moments when an update lands, `exclude` which of its
    tensors stay at this site; a network that no optimiser steps is frozen. `is_mirrored`: whether
    the local weights are the global ones after every step. `half_life`: of an average over every
    step, in steps.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        inner: Mapping[str, InnerConfig] | None = None,
        exclude: Mapping[str, Sequence[str]] | None = None,
        group: Group | None = None,
        *,
        is_mirrored: bool = False,
        half_life: float = 1.0,
    ) -> None:
        self.group = group or Group()
        check_trainable(networks)
        if self.group.size > 1:
            reshard(networks.values())  # one that has stepped before may hold its weights whole
        self.inner = NamedOptimizers.of(networks, optimizers)
        self._config = inner or {}
        held = self.inner.held()
        names = {network_of(name) for name in held}
        self.trained = {n: m for n, m in networks.items() if n in names}
        frozen = {n: m for n, m in networks.items() if n not in names}
        self._networks = networks
        modules = [module for network in networks.values() for module in network.modules()]
        self._children = [module._modules for module in modules]
        self._tables = [t for m in modules for t in (m._parameters, m._buffers)]
        self._seen: list[int] = []
        self._spectral_norms = spectral_norms(self.trained)
        home = staying_home(self.trained, held, exclude or {})
        self.live: State = state_of(self.trained, home)
        stays = {n: t.detach() for n, t in _named(self.trained) if n not in self.live}
        fixed = {n: t for n, t in stays.items() if home.get(n) is Role.FROZEN}
        others = {n: t.detach() for n, t in _named(frozen) if isinstance(t, nn.Parameter)}
        self._frozen = fixed | others
        self._frozen_marks = marks_of(self._frozen)
        own = stays | {n: t.detach() for n, t in _named(frozen)}
        self.local: State = {
            n: t for n, t in own.items() if n not in self._frozen and is_storable(t.dtype)
        }
        """What is this site's own (excluded tensors, spectral norm's vectors, buffers of frozen
        networks), sharing memory."""
        layout = layout_of(self.trained, home)
        self.layout: Layout = dict(sorted((layout | moment_layout(layout, self._config)).items()))
        copies = Copies(self.inner, self.live, self._config, is_silent=self.group.rank > 0)
        self.following = copies.following
        """While local weights of these names are written to; copies in optimisers follow."""
        self.group.agree("networks", hashlib.sha256(layout_to_json(layout).encode()).hexdigest())
        self._share_moments()
        self._averages = self._begin_averages(layout)
        self._ema_share = 1.0 - 0.5 ** (1.0 / half_life)
        named = {n: t for n, t in self.live.items() if not (is_mirrored and self._is_stepped(n))}
        # Parameters in fp32, as the coordinator keeps them.
        own = {n: (t.float() if self._is_parameter(n) else t).clone() for n, t in named.items()}
        self.base: MutableMapping[str, Tensor] = own
        if is_mirrored:
            self._check_mirrored()
            self.base = ChainMap(own, self.live)
        self.initial_sha256 = self._hash(self.base)
        self.frozen_sha256 = self._hash(state_of(frozen) | fixed)
        self.is_cut = any(is_cut(tensor) for tensor in self.live.values())
        devices = [tensor.device for tensor in self.live.values()]
        self.device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        """Where it computes."""
        self._numbers = itertools.count()

    def _hash(self, state: Mapping[str, Tensor]) -> str:
        return hash_state(OnDemand(state, lambda name: whole(state[name])))

    def compare(self, frozen: State) -> None:
        """Have tensors of no network compared between sites, as frozen ones are; collective."""
        if frozen:
            self.frozen_sha256 = hash_hashes((self.frozen_sha256, self._hash(frozen)))

    def follow(self) -> None:
        """Keep to tensors that have taken the place of others, as `param.data = ...` has it.

        A `UserError` of what would never be merged.
        """
        looks = self._looks()
        # Of what is cut, FSDP2 puts other tensors in the parameters' place; buffers stay.
        for name, tensor in () if looks == self._seen else _named(self._networks):
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter and (self.is_cut or network_of(name) not in self.trained):
                continue
            is_other = is_parameter and self.inner.params.get(name) is not tensor
            if is_other or (name in self.live and tensor.shape != self.layout[name].shape):
                raise UserError(
                    f"{name!r} was added, replaced or given the shape {tuple(tensor.shape)} after "
                    "fedwan.join, and would not be merged; add it before, copy values into it "
                    "(load_state_dict without assign=True), or register a buffer that grows with "
                    "persistent=False"
                )
            for own in (self.live, self.local, self._frozen):
                if name in own and own[name].data_ptr() != tensor.data_ptr():
                    own[name] = tensor.detach()
        self._seen = looks
        check_frozen(self._frozen, self._frozen_marks)

    def _looks(self) -> list[int]:
        """What changes where a tensor takes another's place or shape, or one is added.

        2 ms of 2,800.
        """
        looks = [len(table) for tables in (self._children, self._tables) for table in tables]
        for table in self._tables:
            for tensor in table.values():
                if tensor is not None:
                    looks += (id(tensor), tensor.data_ptr(), hash(tensor.shape))
        return looks

    def _is_parameter(self, name: str) -> bool:
        return self.layout[name].role is Role.PARAMETER

    def _is_stepped(self, name: str) -> bool:
        """Whether optimisers alone write to it; to a buffer the forward pass before them does."""
        return self._is_parameter(name) or is_moment(name)

    def _check_mirrored(self) -> None:
        """Refuse parameters whose steps the coordinator's, in fp32, would leave."""
        for name, value in self.live.items():
            if self._is_parameter(name) and value.dtype != torch.float32:
                raise UserError(
                    f"parameter {name!r} is {str(value.dtype).removeprefix('torch.')}, and the "
                    "coordinator takes the same steps in float32, which would lead elsewhere; keep "
                    "weights in float32 and compute in autocast, or set strategy=local_sgd"
                )

    def _share_moments(self) -> None:
        """Have moments that travel among the live tensors; to be called when they were replaced."""
        if networks := averaged(self._config):
            self.inner.begin(networks)
            named = {model_name(name): value for name, value in self.inner.state().items()}
            self.live |= {name: value for name, value in named.items() if name in self.layout}

    def _begin_averages(self, layout: Layout) -> State:
        """Averages over every step, by parameter, which begin as the weights."""
        averages = {
            name: self.live[name].to(self.layout[ema_name(name)].dtype, copy=True)
            for name in layout
            if ema_name(name) in self.layout
        }
        self.live |= {ema_name(name): value for name, value in averages.items()}
        # The parameters themselves: what they hold may be replaced (`follow`).
        pairs = [(local(value), local(self.inner.params[n])) for n, value in averages.items()]
        self._alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        self._wider = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        return averages

    @torch.no_grad()
    def average(self) -> None:
        """A step is complete: averages over every step move towards the weights."""
        if self._alike:
            means, weights = map(list, zip(*self._alike, strict=True))
            torch._foreach_lerp_(means, weights, self._ema_share)
        for mean, weight in self._wider:  # one at a time: of all, a copy would be made
            mean.lerp_(weight.to(mean.dtype), self._ema_share)

    def _forget_moments(self, names: Iterable[str]) -> None:
        """Of these parameters, where that is what becomes of them."""
        forgetful = {n for n, config in self._config.items() if config.state == "reset"}
        if wanted := {name for name in names if network_of(name) in forgetful}:
            self.inner.forget(wanted)

    # What leaves ---------------------------------------------------------------------------

    def landed_value(self, name: str) -> Tensor:
        """A global weight in its own dtype, but rounded as it lands in the local one.

        What rounding takes away is no step of the site: Δ must not hold it.
        """
        base, dtype = self.base[name], self.live[name].dtype
        return base if base.dtype == dtype else base.to(dtype).to(base.dtype)

    def _delta_of(self, name: str) -> Tensor:
        live = self.live[name]
        return self.landed_value(name) - live if self._is_parameter(name) else live

    def _gradient_of(self, name: str) -> Tensor:
        if not self._is_parameter(name):
            return self.live[name]
        param = self.inner.params[name]
        if param.grad is None:
            return torch.zeros_like(param).detach()
        grad = param.grad.detach()
        return grad.to_dense() if grad.is_sparse else grad

    def delta(self, fragment: Fragment) -> Mapping[str, Tensor]:
        """Δ = global - local for parameters, local values for the rest; made when taken.

        Where tensors lie in pieces: made at once, for rank 0 alone.
        """
        return self._gathered(fragment.layout, self._delta_of)

    def gradients(self, fragment: Fragment) -> Mapping[str, Tensor]:
        """Gradients of parameters (zero where there is none), local values for the rest."""
        number = next(self._numbers)
        # Of others nobody would hear. A script without DDP differs at once; a hash takes 1 s a GB.
        if self.group.size > 1 and (number < FIRST_COMPARED or number % COMPARED_EVERY == 0):
            self.group.agree("gradients", hash_state(OnDemand(self.alike(), self._gradient_of)))
        return self._gathered(fragment.layout, self._gradient_of)

    def whole_base(self) -> Mapping[str, Tensor]:
        """The global weights with the pieces of all processes, at rank 0; no copy if not cut."""
        return self._gathered(self.base, self.base.__getitem__)

    def _gathered(
        self, names: Iterable[str], make: Callable[[str], Tensor]
    ) -> Mapping[str, Tensor]:
        if not self.is_cut:
            return OnDemand(names, make)
        taken: State = {}
        for name in names:
            value = whole(make(name))
            if self.group.rank == 0:
                taken[name] = value.cpu()  # a GPU may not have room for all of them
        return taken

    def take_delta(self, fragment: Fragment, room: State) -> State:
        """What `delta` gives as it stands now, at rank 0; in `room`'s tensors if it has any."""
        taken = self.delta(fragment)
        if self.group.rank:
            return {}
        if not room:  # as on a GPU, where a call takes longer to start than to run
            names = [name for name in fragment.layout if self._is_parameter(name)]
            if self.is_cut or not names:
                made = {name: taken[name] for name in names}
            else:
                held = [self.landed_value(n) for n in names], [self.live[n] for n in names]
                made = dict(zip(names, torch._foreach_sub(*held), strict=True))
            return {n: made[n] if n in made else taken[n].clone() for n in fragment.layout}
        for name, value in room.items():
            if self._is_parameter(name) and not self.is_cut:
                torch.sub(self.landed_value(name), self.live[name], out=value)
            else:
                value.copy_(taken[name])
        return room

    # What lands ----------------------------------------------------------------------------

    def advance(self, payload: Source, fragment: Fragment, codec: Codec) -> None:
        """Global += update, for every tensor of the fragment; the local weights stay.

        After a `PayloadError` the replica is in between two versions: end this process.
        """

        def parameters() -> Iterator[tuple[Coded, Tensor]]:
            for name, coded in codec.read_each(payload, fragment.layout):
                base = self.base[name]
                if not self._is_parameter(name):
                    local(base).copy_(piece_like(coded.tensor(), base))
                elif is_cut(base):
                    local(base).add_(piece_like(coded.tensor(), base))
                else:
                    yield coded, base

        codec.add_each(parameters())

    def land(self, fragment: Fragment, alpha: float) -> None:
        """L ← α l + (1 - α) g for a fragment's parameters, l ← g for the rest of it."""
        mixed = {name for name in fragment.layout if alpha and self._is_parameter(name)}
        with self.following(fragment.layout):
            for names in filter(None, (mixed, fragment.layout.keys() - mixed)):
                lives = [local(self.live[name]) for name in names]
                bases = [local(self.base[name]) for name in names]
                if names is mixed:
                    cast = [base.to(live.dtype) for live, base in zip(lives, bases, strict=True)]
                    torch._foreach_lerp_(lives, cast, 1.0 - alpha)
                else:
                    torch._foreach_copy_(lives, bases)
        self.landed(fragment)

    def landed(self, fragment: Fragment) -> None:
        """A fragment's local weights were written: what follows from them is made anew."""
        self._forget_moments(fragment.layout)
        self._refresh()

    def _refresh(self) -> None:
        """Make anew what follows from local weights that were written."""
        if self.is_cut:
            reshard(self.trained.values())
        for refresh in self._spectral_norms:
            refresh()

    def owe(self, owed: State) -> None:
        """L ← l - e: keep in the local weights what error feedback has not sent yet."""
        names = self.group.lead(lambda: list(owed))
        with self.following(names):
            for name in names:
                live = local(self.live[name])
                live.sub_(self.piece(name, owed.get(name)).to(live.device, live.dtype))
        if names:
            self._refresh()

    def piece(self, name: str, value: Tensor | None) -> Tensor:
        """This process's piece of a whole tensor that rank 0 has."""
        spec = self.layout[name]
        dtype = torch.float32 if spec.role is Role.PARAMETER else spec.dtype
        return piece_like(self.group.spread(value, spec.shape, dtype), self.live[name])

    def apply_gradients(self, payload: Source, fragment: Fragment, codec: Codec) -> None:
        """Put the mean gradient in place of the local one, and set merged buffers."""
        for name, coded in codec.read_each(payload, fragment.layout):
            value = coded.tensor()
            if not self._is_parameter(name):
                for held in (self.live[name], self.base[name]):
                    local(held).copy_(piece_like(value, held))
                continue
            param = self.inner.params[name]
            # A new tensor: the old one may lie otherwise than its parameter, as sums that are still
            # to be taken.
            param.grad = placed(value.to(param.dtype), param, is_whole=True)

    def load_base(self, weights: State | None) -> None:
        """Set the global weights and leave the local ones."""
        for name in self.group.lead(lambda: list(weights or {})):
            local(self.base[name]).copy_(self.piece(name, (weights or {}).get(name)))

    def adopt(self) -> None:
        """Have the global weights as the local ones, too."""
        with self.following(self.live):
            for name, live in self.live.items():
                local(live).copy_(local(self.base[name]))
        self._refresh()
        self._forget_moments(self.layout)

    def load_optimizers(self, flat: Mapping[str, Tensor], *, is_whole: bool = False) -> None:
        """Have these moments and no others, as `NamedOptimizers.state` names them."""
        self.inner.load(flat, is_whole=is_whole)
        self._share_moments()

    # Checkpoints, hashes, and a look at other weights --------------------------------------

    def pieces(self) -> State:
        """What this process trains, without its optimisers' moments; no copies."""
        self.follow()
        both = self.live | {f"{_OWN}{name}": value for name, value in self.local.items()}
        moments = set(filter(is_moment, both)) - {*map(ema_name, self._averages)}
        return {name: local(value) for name, value in both.items() if name not in moments}

    def load_pieces(self, pieces: State, *, with_model: bool) -> None:
        """Put back what `pieces` gave; what is the site's own always, the rest if asked to."""
        present = self.pieces()
        for name, value in pieces.items():
            is_own = name.startswith(_OWN)
            if is_own and present[name].shape != value.shape:
                continue  # a cache that grows as it is used
            if with_model or is_own:
                present[name].copy_(value)

    def global_sha256(self) -> str:
        """Hash of the global weights as the coordinator keeps them."""
        return self._hash(self.base)

    def held_sha256(self, fragments: Iterable[Fragment]) -> str:
        """One hash of those of the fragments' global weights."""
        return hash_hashes(self.base_sha256(fragment) for fragment in fragments)

    def base_sha256(self, fragment: Fragment) -> str:
        """`hash_state` of a fragment's global weights; collective, 1 s a GB."""
        return self._hash({name: self.base[name] for name in fragment.layout})

    def alike(self) -> list[str]:
        """What every process of the site must have alike: parameters that are not cut."""
        return [n for n, v in self.live.items() if self._is_parameter(n) and not is_cut(v)]

    @contextmanager
    def showing(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """The networks hold other weights, in evaluation mode, for a while.

        Costs a second copy of this process's pieces meanwhile.
        """
        kept = [(piece, piece.clone()) for n, piece in self.pieces().items() if not is_moment(n)]
        try:
            for name in self.group.lead(lambda: [n for n in weights or {} if not is_moment(n)]):
                local(self.live[name]).copy_(self.piece(name, (weights or {}).get(name)))
            self._refresh()
            with evaluating(self._networks.values()):
                yield
        finally:
            for present, value in kept:
                present.copy_(value)
            if self.is_cut:
                reshard(self.trained.values())


def check_trainable(networks: Mapping[str, nn.Module]) -> None:
    """Refuse tensors that cannot be trained, or written to."""
    for name, tensor in _named(networks):
        if is_lazy(tensor):
            raise UserError(
                f"{name!r} has no shape yet; call its network once before fedwan.join and its "
                "optimiser, or give the layer its number of inputs"
            )
        if not is_plain(tensor):
            kind = type(tensor).__name__ if tensor.layout == torch.strided else tensor.layout
            raise UserError(
                f"{name!r} is a {kind}, whose values lie in other tensors; give fedwan.join dense "
                "weights, or of a quantised network the modules that are trained, as adapters in "
                "an nn.ModuleList"
            )
        is_spread = any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.is_meta or (is_spread and not is_cut(tensor)):
            raise UserError(
                f"{name!r} lies on meta or is an expanded view, without memory of its own; give it "
                "values before fedwan.join, such as those of its .clone()"
            )


@contextmanager
def evaluating(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Every module in evaluation mode, so that no running statistic moves; then as it was.

    By the flag alone: `eval()` of some modules changes weights (loralib's merges adapters).
    """
    modes = [(module, module.training) for network in networks for module in network.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _named(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every buffer and parameter."""
    for network, module in networks.items():
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            yield f"{network}/{name}", tensor
