"""Any LightningModule, unchanged: its own networks, losses, optimisers and schedules.

    workload=lightning model.module=my_models.gan:Gan model.args.width=64

Each of its optimisers makes one network of what it trains, named by the module's attribute. Batches
are `(samples, labels)` of the run's data, whatever loaders the module has. With several optimisers
(`automatic_optimization = False`) `site.accumulate` says in how many batches all of them step.

The module needs Lightning, `pip install 'fedwan[lightning]'`, at the coordinator, too.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig
from fedwan.data import source_of
from fedwan.errors import ConfigError, UserError
from fedwan.lightning.finding import find_class, is_overridden, make_module
from fedwan.lightning.fit import Fit
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.models.bounded import clamp_images
from fedwan.rng import NamedGenerators, derive_seed, lent_generators, seeded_init
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.settings import (
    require_at_least,
    require_one_of,
)

_KINDS: dict[str, NetworkKind] = {"adversarial": "adversarial", "regression": "regression"}
_OWN = InnerConfig(name="own")
_BATCH, _STEPS = 32, 2000


@dataclass
class Model:
    """Settings under `model.*`."""

    module: str = ""
    """The class, as `package.module:ClassName`; `sites._NAME:ClassName` for a file of the app's."""
    args: dict[str, Any] = field(default_factory=dict)
    """What it is made with."""
    kind: str = ""
    """How its networks learn, which decides their outer optimiser: `adversarial` or `regression`;
    empty takes `adversarial` where there are several."""
    latents: int = 0
    """Values of a latent z of which `module(z)` makes a sample, where it has no `sample(num, seed)`
    of its own; 0 if it makes none."""


_known: dict[str, tuple[str, ...]] = {}


def _networks(config: Config) -> dict[str, NetworkKind]:
    """The networks of the module, which is made without memory where that works."""
    model = Model(**config.model)
    key = json.dumps([model.module, model.args], sort_keys=True)
    if key not in _known:
        asked = copy.deepcopy(config)
        asked.steps, asked.data.batch = config.steps or _STEPS, config.data.batch or _BATCH
        try:
            with torch.device("meta"):
                fit = Fit(make_module(model.module, model.args), asked)
        except (RuntimeError, NotImplementedError):
            with seeded_init(config.seed):
                fit = Fit(make_module(model.module, model.args), asked)
        _known[key] = tuple(fit.optimizers)
    kind = model.kind or ("adversarial" if len(_known[key]) > 1 else "regression")
    require_one_of("model.kind", kind, _KINDS)
    return dict.fromkeys(_known[key], _KINDS[kind])


NETWORKS = _networks


USES = ("site.precision", "site.accumulate", "data.labels", "inner.*.name=own")
DEFAULTS = {"data.batch": _BATCH, "steps": _STEPS, "inner.*": _OWN}
PAIRS = None


def check(config: Config) -> None:
    """Refuse what is the module's own to choose."""
    model = Model(**config.model)
    require_at_least("model.latents", model.latents, 0)
    for network, chosen in config.inner.items():
        for name, value in vars(dataclasses.replace(chosen, clip_norm=0.0)).items():
            if value != getattr(_OWN, name):
                raise ConfigError(
                    f"inner.{network}.{name} = {value!r} has no effect: {model.module} configures "
                    "its optimisers itself; leave it out, or give it a model.args of its own"
                )
    _check_figures(model, config)


def _from_inputs(module_class: type, config: Config) -> bool:
    """Whether a module's samples are made of inputs that the site holds."""
    return bool(getattr(module_class, "samples_from_inputs", source_of(config.data).inputs > 0))


def _check_figures(model: Model, config: Config) -> None:
    module_class = find_class(model.module)
    samples = hasattr(module_class, "sample") or model.latents > 0
    if samples and source_of(config.data).inputs:
        samples = False  # its images would have inputs
    if not samples and not is_overridden(module_class, "validation_step"):
        raise ConfigError(
            f"model.module = {model.module!r} has no sample(num, seed) and no validation_step, so "
            "that nothing could be measured; add one of them, or set model.latents to the number "
            "of values that it makes a sample from"
        )
    if hasattr(module_class, "sample") and model.latents:
        raise ConfigError(
            f"model.latents = {model.latents} has no effect: {model.module} has a sample of its "
            "own; leave it out"
        )


def build(config: Config, device: torch.device | str) -> Lightning:
    """The module, the same at every site of a run, and what drives it."""
    model = Model(**config.model)
    with seeded_init(config.seed):
        module = make_module(model.module, model.args)
    fit = Fit(module.to(device), config)
    return Lightning(
        *(fit.networks, fit.optimizers, fit.kept, fit, config, model, torch.device(device))
    )


@dataclass(frozen=True)
class Lightning:
    """See `fedwan.workloads.base.Workload`."""

    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    kept: Mapping[str, Tensor]
    fit: Fit
    config: Config
    model: Model
    device: torch.device

    def begin(self, step: int) -> None:
        """See `fedwan.workloads.base.Following`."""
        self.fit.begin(step)

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """One step of every optimiser. The module draws from torch's own generators."""
        return self.fit.step(batch, reduce)

    def sample(self, num: int, seed: int) -> Tensor:
        """Samples, (num, …): the module's own, or of fixed latents; blank where it makes none."""
        shape = source_of(self.config.data).shape
        with self._judging(derive_seed(seed, "sample")):
            if hasattr(self.fit.module, "sample"):
                samples: Tensor = self.fit.module.sample(num, seed)
            elif self.model.latents:
                samples = self.fit.module(torch.randn(num, self.model.latents).to(self.device))
            else:
                return torch.zeros(num, *shape)
        if samples.shape != (num, *shape):
            raise UserError(
                f"{self.model.module} makes samples of shape {tuple(samples.shape)}, data.name="
                f"{self.config.data.name} has {(num, *shape)}; make them alike"
            )
        return clamp_images(samples)

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """What `validation_step` finds, as `fd` too; or, of samples, see `measure_quality`."""
        real = Batch(*(part.to(self.device) for part in real))
        with self._judging(derive_seed(seed, "validate")):
            found: dict[str, Any] = self.fit.validate(real)
        if self._makes_samples:
            generated = self.sample(NUM_DRAWS * len(real.x), derive_seed(seed, "evaluate"))
            return found | measure_quality(self.config.data.name, real, generated)
        return found | {"fd": found.get("loss", next(iter(found.values()))), "fd_floor": 0.0}

    @property
    def samples_from_inputs(self) -> bool:
        """See `fedwan.workloads.base.Disclosing`: the module's own word; of pairs, yes."""
        return _from_inputs(type(self.fit.module), self.config)

    @property
    def _makes_samples(self) -> bool:
        is_able = hasattr(self.fit.module, "sample") or self.model.latents > 0
        return is_able and not source_of(self.config.data).inputs

    @contextmanager
    def _judging(self, seed: int) -> Iterator[None]:
        """In evaluation mode, without gradients, under a seed; then as it was."""
        modules = list(self.fit.module.modules())
        modes = [module.training for module in modules]
        gpus = [self.device] if self.device.type == "cuda" else []
        try:
            self.fit.module.eval()
            with torch.no_grad(), lent_generators(gpus):
                torch.manual_seed(seed)
                yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
