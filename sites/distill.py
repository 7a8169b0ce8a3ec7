"""A few-step student of a flow: phased consistency, and a judge on the frozen teacher's features.

The student starts as the teacher, the moving average that a run with `workload=flow` left. The
teacher takes one Euler step from a noised sample; the student's jump to the end of its phase must
arrive where its own moving average, the target, arrives from there (Wang et al. 2024, 2405.18407).

    L_student = |f(x_i) - f_target(x_i-1)| - adversarial * E D(f(x_i))
    L_heads   = E max(0, 1 - D(real)) + E max(0, 1 + D(f(x_i)))         both noised to one level

The paper's scripts step D on even and G on odd steps. Here both step at once, as in `sites/gan.py`.

Neither the teacher nor the target is sent (`fedwan.workloads.distillation`): what is merged,
averaged and measured is the student.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.config_tree import NOT_NEGATIVE, setting, span
from fedwan.data import source_of
from fedwan.data.sources import parse_classes
from fedwan.errors import ConfigError
from fedwan.files import absolute_path
from fedwan.metrics import measure_quality
from fedwan.models.velocity import build_velocity
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.workloads import flow
from fedwan.workloads.adversarial import LOSSES
from fedwan.workloads.base import Batch, NetworkKind, share_above, spread
from fedwan.workloads.descent import Descent
from fedwan.workloads.distillation import (
    FeatureHeads,
    Followed,
    Teacher,
    load_teacher,
    read_teacher,
)

# What the student learns from moves as well: its own average, and the judge.
NETWORKS: dict[str, NetworkKind] = {"student": "adversarial", "heads": "adversarial"}


@dataclass
class Model:
    """Settings under `model.*`."""

    teacher: str = ""
    """Folder of the run that trained the teacher, `workload=flow`: a copy of it at every site."""
    student_steps: int = setting(2, span(1))
    """Steps from noise to a sample that the student is trained for."""
    solver_steps: int = setting(0, NOT_NEGATIVE)
    """Of the teacher, dealt into as many phases; 0 takes those that it is sampled with."""
    guidance: float = setting(1.0, NOT_NEGATIVE)
    """How closely a teacher that is told the class follows it; the student needs it no more."""
    adversarial: float = setting(0.1, NOT_NEGATIVE)
    """Weight of the judge in the student's loss; 0 leaves it without a say."""
    half_life: float = setting(10.0, NOT_NEGATIVE)
    """Of the student's moving average, the target, in steps; 0 takes the student itself."""


def _teacher(config: Config) -> Teacher:
    if not config.model["teacher"]:
        raise ConfigError(
            "model.teacher names no teacher: train one with `fedwan demo workload=flow "
            "out=runs/flow`, then add model.teacher=runs/flow"
        )
    return read_teacher(Path(config.model["teacher"]).absolute())


def _samples(data: DataConfig) -> dict[str, str | int]:
    """What a flow's samples are of, by the setting; equal where they are the same."""
    classes = ",".join(parse_classes(data.classes))
    return {"name": data.name, "size": source_of(data).shape[-1], "classes": classes}


def _student(config: Config, kind: NetworkKind) -> InnerConfig:
    lr = 1e-3 if _teacher(config).sizes.network == "dit" else 5e-4
    return InnerConfig(lr=lr, beta1=0.9, beta2=0.99)


USES = ("site.precision", "site.accumulate")
DEFAULTS = {
    "data.batch": 64,
    "steps": 2000,
    "model.solver_steps": lambda config: _teacher(config).euler_steps,
    "inner.student": _student,
    "inner.heads": InnerConfig(lr=2e-3, beta1=0.5, beta2=0.99),
}


def check(config: Config) -> None:
    """Refuse what cannot be built; the folder becomes absolute, as sites run in their own."""
    config.model["teacher"] = absolute_path(config.model["teacher"])
    model, teacher = Model(**config.model), _teacher(config)
    ours = _samples(config.data)
    for key, theirs in _samples(teacher.data).items():
        is_told = key != "classes" or teacher.sizes.network == "dit"
        if is_told and theirs != ours[key]:
            raise ConfigError(
                f"model.teacher = {model.teacher!r} makes samples of data.{key} = {theirs!r}, not "
                f"of {ours[key]!r}; set data.{key}={theirs}"
            )
    if model.student_steps > model.solver_steps:
        raise ConfigError(
            f"model.student_steps = {model.student_steps} is more than model.solver_steps = "
            f"{model.solver_steps}, so that a phase would hold none; "
            f"set model.student_steps={model.solver_steps} or less"
        )
    if model.guidance != 1 and not (teacher.sizes.network == "dit" and teacher.label_dropout):
        raise ConfigError(
            f"model.guidance = {model.guidance!r} needs a teacher that learned with classes and "
            f"without, which {model.teacher!r} is not; leave it out, or train one with "
            "model.network=dit"
        )


class Distill(Descent):
    """The teacher has no optimiser, and so stays at home."""

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.model = model = Model(**config.model)
        self.origin = read_teacher(Path(model.teacher))
        source, sizes = source_of(config.data), self.origin.sizes
        self.shape = source.shape
        self.num_classes = source.num_classes if sizes.network == "dit" else 0
        """That teacher and student are told; 0 for none."""
        with seeded_init(config.seed):
            teacher = build_velocity(source.shape, source.num_classes, sizes)
            heads = FeatureHeads(sizes.width, sizes.depth)
        load_teacher(self.origin, teacher)
        self.student = Followed(copy.deepcopy(teacher), model.half_life).to(device)
        self.teacher_fds: dict[tuple[int, int], float] = {}
        self.teacher_spreads: dict[int, Tensor] = {}
        """By seed and number of samples, and by number alone: the teacher does not change."""
        frozen = {"teacher": teacher.to(device).requires_grad_(False)}
        trained = {"student": self.student, "heads": heads.to(device)}
        super().__init__(config, trained, frozen=frozen)
        self.student.follow(self.optimizers["student"])

    @cached_property
    def _phases(self) -> flow.Phases:
        sigmas = flow.flow_sigmas(self.model.solver_steps, self.origin.shift).to(self.device)
        return flow.Phases(sigmas, self.model.student_steps)

    def backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """Of both networks, each against the other as it was."""
        made, target, edge, top = self._jumps(batch, rng)
        share = torch.rand(len(edge), generator=rng["level"]).to(edge, non_blocking=True)
        real, fake = self._judge(batch, made, edge, edge + share * (top - edge), rng)
        hinge = LOSSES["hinge"]
        losses = {
            "student": flow.consistency_loss(made, target),
            "heads": hinge.discriminator(real, fake),
            "adversarial": hinge.generator(real, fake),
        }
        self.add_gradients("heads", losses["heads"], keep_graph=True)
        adversarial = self.model.adversarial * losses["adversarial"]
        self.add_gradients("student", losses["student"] + adversarial)
        return losses

    def _jumps(self, batch: Batch, rng: NamedGenerators) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the student jumps to, where it should, (batch, …), and its phase, (batch,) each."""
        phases, student = self._phases, self.student
        solver, told = phases.solver, self._told(batch)
        index = torch.randint(self.model.solver_steps, (len(batch.x),), generator=rng["timestep"])
        index = index.to(self.device, non_blocking=True)
        edge, top, sigma, below = (
            levels[index].to(batch.x.dtype)
            for levels in (phases.edges, phases.tops, solver.sigmas, solver.sigmas_prev)
        )
        x, _ = flow.interpolate(batch.x, self._noise(batch, rng), sigma)
        with torch.no_grad():
            teacher: Callable[..., Tensor] = self.networks["teacher"]
            if self.num_classes:
                teacher = flow.guide(teacher, batch.y, self.num_classes, self.model.guidance)
            x_below = solver.step(x, teacher(x, sigma), index)
            target = flow.jump(x_below, student.target(x_below, below, *told), below, edge)
        return flow.jump(x, student(x, sigma, *told), sigma, edge), target, edge, top

    def _judge(
        self, batch: Batch, made: Tensor, edge: Tensor, level: Tensor, rng: NamedGenerators
    ) -> tuple[Tensor, Tensor]:
        """Logits of data and of the student's samples, both noised to `level`."""
        teacher, heads, told = self.networks["teacher"], self.networks["heads"], self._told(batch)
        real, _ = flow.interpolate(batch.x, self._noise(batch, rng), level)
        fake = flow.renoise(made, self._noise(batch, rng), edge, level)
        features: Callable[..., list[Tensor]] = teacher.features
        return heads(features(real, level, *told)), heads(features(fake, level, *told))

    def sample(self, num: int, seed: int) -> Tensor:
        """Samples of the student from fixed noise, (num, …); as many of each class, if told."""
        return self.sample_like(self._balanced(num, seed), seed)

    def sample_like(self, labels: Tensor, seed: int) -> Tensor:
        """See `Descent`."""
        return self._sample("student", self._phases.jumps, labels, seed)

    def _balanced(self, num: int, seed: int) -> Tensor:
        return flow.balanced_labels(num, max(1, self.num_classes), seed)

    @torch.no_grad()
    def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
        """Of the judge, and of the student's samples, whose spread is told over the teacher's.

        A shard's own samples may be of few classes, which the student is not asked for.
        """
        made, _, edge, top = self._jumps(held_out, NamedGenerators(seed, "jumps"))
        level = (edge + top) / 2
        judged = [
            self._judge(real, made, edge, level, NamedGenerators(seed, "judge"))
            for real in (train, held_out)
        ]
        (train_logits, _), (held_out_logits, fake_logits) = (
            [logits.flatten(1).mean(1) for logits in pair] for pair in judged
        )
        return {
            "memory/heads": share_above(train_logits, held_out_logits),
            "separation/heads": share_above(held_out_logits, fake_logits),
            "spread/student": self._spread(len(train.x)),
        }

    def _spread(self, num: int) -> Tensor:
        seed = derive_seed(self.config.seed, "spread")
        if num not in self.teacher_spreads:
            labels = self._balanced(num, seed)
            samples = self._sample("teacher", self._phases.solver, labels, seed)
            self.teacher_spreads[num] = spread(samples)
        return spread(self.sample(num, seed)) / self.teacher_spreads[num]

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """And the teacher's, in the steps of its own run."""
        labels, seed = self._labels(real), derive_seed(seed, "evaluate")
        measure = partial(measure_quality, self._measured, real, features=self.config.eval.features)
        if (key := (seed, len(labels))) not in self.teacher_fds:
            sigmas = flow.flow_sigmas(self.origin.euler_steps, self.origin.shift).to(self.device)
            made = self._sample("teacher", flow.EulerSolver(sigmas), labels, seed)
            self.teacher_fds[key] = measure(generated=made)["fd"]
        figures = measure(generated=self.sample_like(labels, seed))
        return figures | {"teacher_fd": self.teacher_fds[key]}

    def _sample(self, name: str, solver: flow.EulerSolver, labels: Tensor, seed: int) -> Tensor:
        """Of the teacher, guided, or of the student."""
        told = (self.num_classes, self.model.guidance if name == "teacher" else 1.0)
        return flow.sample_flow(self.networks[name], solver, self.shape, labels, seed, *told)

    def _told(self, batch: Batch) -> list[Tensor]:
        return [batch.y] if self.num_classes else []

    def _noise(self, batch: Batch, rng: NamedGenerators) -> Tensor:
        generator = rng.on("noise", self.device)
        return torch.randn(batch.x.shape, generator=generator, device=self.device)


build = Distill
