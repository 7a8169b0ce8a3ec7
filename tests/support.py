"""What several tests share: runs of a workload of a few numbers, and links that misbehave."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fedwan.app import load_strategy
from fedwan.codecs import Payload, fp32
from fedwan.codecs.payload import Source
from fedwan.config import Config, InnerConfig, merge
from fedwan.coordinator.intake import Upload
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.servicer import Servicer
from fedwan.data import InMemory, Shard
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.protocol.round import Key
from fedwan.recipes import resolve_strategy
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.simulation import Absence, SimulatedRun, simulate
from fedwan.site.group import Group
from fedwan.site.recipe import train
from fedwan.site.site import Membership
from fedwan.state import Layout, Role, State, TensorSpec, hash_state
from fedwan.strategy import Strategy
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizer, clip

BATCH = 4
ADAM = InnerConfig(name="adam", lr=1e-2)
SGD = InnerConfig(name="sgd", lr=0.05, beta1=0.0)
NET = {"velocity": ADAM}
GAN = {"discriminator": ADAM, "generator": SGD}


def no_links(path: Path, link: Path) -> None:
    """For `os.link`, as on a file system without hard links."""
    raise PermissionError(errno.EPERM, "Operation not permitted", str(path), None, str(link))


class TinyNetwork(nn.Module):
    """A two-layer perceptron whose parameters are not in name order."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(2, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.again = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.norm(self.first(x))))


def keep_local() -> None:
    """The `Reduce` of strategies whose gradients stay at the site."""


class TinyWorkload:
    """Each network learns to turn its points by a right angle, under a little noise."""

    def __init__(
        self,
        inner: Mapping[str, InnerConfig],
        *,
        norm: bool = False,
        seed: int = 0,
    ) -> None:
        self.inner = inner
        with seeded_init(seed):
            self.networks: dict[str, nn.Module] = {name: TinyNetwork(norm) for name in inner}
        self.optimizers = {
            name: build_optimizer(inner[name], network.parameters())
            for name, network in self.networks.items()
        }
        self.batches: list[Tensor] = []
        self.rng: NamedGenerators | None = None

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        self.batches.append(batch.x)
        self.rng = rng
        noise = 0.01 * torch.randn(batch.x.shape, generator=rng["noise"])
        return self.step_on(batch.x + noise, reduce)

    def step_on(self, x: Tensor, reduce: Reduce) -> dict[str, Tensor]:
        losses = {}
        for name, network in self.networks.items():
            self.optimizers[name].zero_grad()
            losses[name] = (network(x) - x.flip(1)).square().mean()
            losses[name].backward()
        reduce()
        for name, optimizer in self.optimizers.items():
            clip(self.networks[name].parameters(), self.inner[name].clip_norm)
            optimizer.step()
        return {name: loss.detach() for name, loss in losses.items()}

    def sample(self, num: int, seed: int) -> Tensor:
        network = next(iter(self.networks.values()))
        return network(torch.zeros(num, 2))

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        network = next(iter(self.networks.values()))
        loss = (network(real.x) - real.x.flip(1)).square().mean()
        return {"fd": float(loss), "fd_floor": 0.0}


def tiny_shard(site: int, num: int = 20) -> Shard:
    """Points around a place of the site's own; held out are the same at all."""
    points, held_out = _points(site, num), _points(0, num)
    return Shard(train=InMemory(points), held_out=held_out, public=False)


def _points(place: int, num: int) -> Batch:
    generator = torch.Generator().manual_seed(place)
    x = torch.randn(num, 2, generator=generator) + place
    return Batch(x, torch.zeros(num, dtype=torch.int64))


def tiny_config(
    strategy: str = "diloco",
    inner: Mapping[str, InnerConfig] = NET,
    *,
    sites: int = 2,
    h: int = 2,
    steps: int = 8,
    kind: NetworkKind = "adversarial",
    **sections: Mapping[str, Any],
) -> Config:
    """A resolved configuration for tiny workloads; sections as in a YAML file."""
    config = Config(strategy=strategy, sites=sites, h=h, steps=steps, inner=dict(inner))
    config.data.batch = BATCH
    config.eval.every = 0
    config = merge(config, sections)
    resolve_strategy(load_strategy(strategy), config, dict.fromkeys(inner, kind))
    return config


def build_strategy(
    recipe: ModuleType, inner: Mapping[str, InnerConfig], sites: int, h: int, **codec: str
) -> Strategy:
    """A recipe's strategy as the coordinator and the sites would build it."""
    config = Config(sites=sites, h=h, steps=8 * h, inner=dict(inner))
    config.codec.up = codec.get("up", "fp32")
    config.codec.down = codec.get("down", "fp32")
    resolve_strategy(recipe, config, {name: "adversarial" for name in inner})
    return recipe.build(config)


@dataclass
class Ran:
    """A run of tiny workloads that has ended."""

    result: SimulatedRun
    workloads: dict[str, TinyWorkload]
    """Of each site, the last."""

    @property
    def state(self) -> State:
        """Global weights."""
        return self.result.model.state

    @property
    def hashes(self) -> set[str]:
        """Of the coordinator's final weights and of every site's: one if all agree."""
        return {hash_state(self.state), *self.result.site_sha256.values()}

    def rounds(self, site: str = "") -> list[dict[str, Any]]:
        """Rows of contributions, of one site or all."""
        rows = [row for row in self.result.records if row["kind"] == "round"]
        return [row for row in rows if site in ("", row["site"])]

    def events(self, kind: str) -> list[str]:
        """Texts of events."""
        return [row["text"] for row in self.result.records if row.get("event") == kind]


def take_part(member: Membership, workload: Any, shard: Shard | None = None) -> str:
    """A site's part in a run: its workload's steps to the end; the hash that it ended with."""
    index = int(member.name[1:]) - 1
    kinds: dict[str, NetworkKind] = dict.fromkeys(sorted(workload.networks), "regression")
    return train(member, Group(), workload, shard or tiny_shard(index), kinds)


def run_tiny(
    folder: Path,
    config: Config,
    strategy: Strategy | None = None,
    *,
    norm: bool = False,
    make: Callable[[], TinyWorkload] | None = None,
    part: Callable[[Membership, TinyWorkload], object] = take_part,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
    absences: Mapping[str, Absence] | None = None,
    resume: bool = False,
) -> Ran:
    """Simulate a run whose sites train tiny workloads; options as in `simulate`.

    `make` builds a site's workload, `part` is what it does with it.
    """
    workloads: dict[str, TinyWorkload] = {}

    def live(member: Membership) -> None:
        workload = make() if make else TinyWorkload(config.inner, norm=norm)
        workloads[member.name] = workload
        part(member, workload)

    strategy = strategy or load_strategy(config.strategy).build(config)
    words = {"strategy": strategy, "wrap": wrap, "absences": absences, "resume": resume}
    return Ran(simulate(config, folder, train=live, **words), workloads)  # type: ignore[arg-type]


def hub_of(link: Any) -> Servicer:
    """The coordinator at the other end of a loopback link."""
    return link._hub


class WrappedLink:
    """Passes everything on to another link."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Stopped(Exception):  # noqa: N818
    """A site has died, and a run in one process with it."""


class Killed(BaseException):
    """The coordinator's process ends."""


@contextmanager
def killed_after(version: int) -> Iterator[None]:
    """The coordinator of the run in here is killed after a version."""
    after = CoordinatedRun._after_version

    def die(run: CoordinatedRun, model: Any, before: int) -> None:
        after(run, model, before)
        if model.version == version:
            raise Killed

    with patch.object(CoordinatedRun, "_after_version", die), pytest.raises(Killed):
        yield


class DyingLink(WrappedLink):
    """Its site dies before it sends the contribution to a version."""

    def __init__(self, inner: Link, version: int) -> None:
        super().__init__(inner)
        self._version = version

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        if header.version == self._version:
            raise Stopped
        return self._inner.upload(header, payload)


class RewritingLink(WrappedLink):
    """Contributions are not what the site computed, but what is made of them."""

    def __init__(
        self, inner: Any, change: Callable[[wire.UploadHeader, str, Tensor, Role], Tensor]
    ) -> None:
        super().__init__(inner)
        self._change = change

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        if header.kind == wire.UploadHeader.CONTRIBUTION:
            key = Key(header.fragment, header.version, self._inner._site)
            layout = hub_of(self._inner).intake._codec_and_layout(Upload(header.kind, key))[1]
            state = fp32().decode(payload, layout)
            state = {n: self._change(header, n, v, layout[n].role) for n, v in state.items()}
            payload = encoded(state, layout)
            header.checksum = payload.checksum
        return self._inner.upload(header, payload)


class PoisoningLink(RewritingLink):
    """Of one contribution a parameter is not a number."""

    def __init__(self, inner: Link, version: int) -> None:
        super().__init__(inner, self._poison)
        self._version = version

    def _poison(self, header: wire.UploadHeader, _: str, value: Tensor, role: Role) -> Tensor:
        if header.version == self._version and role is Role.PARAMETER:
            self._version = -1
            value = torch.full_like(value, float("nan"))
        return value


def random_state(seed: int, layout: Layout) -> State:
    """Normal values; counters are at the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.tensor(seed)
        if s.role is Role.COUNTER
        else torch.randn(s.shape, generator=generator)
        for name, s in layout.items()
    }


def encoded(state: State, layout: Layout) -> Payload:
    """A state in fp32."""
    return fp32().encode(state, {}, layout)[0]


def spec(
    shape: Sequence[int], role: Role = Role.PARAMETER, dtype: torch.dtype = torch.float32
) -> TensorSpec:
    """A tensor's spec, fp32 parameters by default."""
    return TensorSpec(tuple(shape), dtype, role)


def read_all(payload: Source) -> bytes:
    """A payload's bytes."""
    return bytes(payload.read(0, payload.num_bytes))


class StrictSource:
    """A payload in memory that never serves a byte beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        assert 0 <= offset and 0 <= size and offset + size <= len(self._data)
        return self._data[offset : offset + size]


@contextmanager
def other_defaults(dtype: torch.dtype) -> Iterator[None]:
    """As in a script that has made another dtype and another device torch's default."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same names, dtypes, shapes and bits (so NaN equals itself)."""
    return a.keys() == b.keys() and hash_state(a) == hash_state(b)
