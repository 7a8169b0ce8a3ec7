"""A trained flow as a teacher: read from the folder of the run that trained it.

Every site has its own copy, of `config.yaml` and `checkpoint/coordinator.safetensors` at least.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from fedwan.config import load
from fedwan.errors import ConfigError, FedwanError
from fedwan.models.velocity import VelocitySizes
from fedwan.weights import load as load_trained


class Teacher(NamedTuple):
    """What a flow's run says of its network."""

    folder: Path
    data_name: str
    sizes: VelocitySizes
    label_dropout: float
    shift: float
    """Of the schedule that it was trained and sampled with."""
    euler_steps: int
    """That it is sampled with."""


def read_teacher(folder: Path) -> Teacher:
    """What a run's folder says of the flow that was trained there; weights are not read yet."""

    def refused(what: str) -> ConfigError:
        return ConfigError(f"model.teacher = {str(folder)!r} {what}")

    if not (folder / "config.yaml").is_file():
        raise refused(
            "holds no config.yaml on this machine; name the folder of a run with workload=flow, "
            f"which every site has a copy of (`fedwan demo workload=flow out={folder}` makes one)"
        )
    config = load(folder / "config.yaml")
    if config.workload != "flow":
        raise refused(f"is of a run with workload = {config.workload!r}; name one of workload=flow")
    if config.data.labels == "site":
        raise refused("is of a run with data.labels=site, which knows no classes; name another")
    if config.excluded:
        raise refused(
            f"is of a run whose checkpoint lacks what each site had of its own ({config.excluded}, "
            "network.velocity.exclude); name the folder of one without"
        )
    model = config.model
    sizes = VelocitySizes(*(model[field] for field in VelocitySizes._fields))
    rest = (model[field] for field in ("label_dropout", "shift", "euler_steps"))
    if not (folder / "checkpoint" / "coordinator.safetensors").is_file():
        raise refused(
            "holds no checkpoint/coordinator.safetensors; wait until that run is done, or copy the "
            "file there"
        )
    return Teacher(folder, config.data.name, sizes, *rest)


def load_teacher(teacher: Teacher, network: nn.Module) -> None:
    """Put the moving average of the teacher's weights into a network, in place."""
    try:
        missing = load_trained(teacher.folder).load_into(network, "velocity")
    except FedwanError as error:
        raise ConfigError(f"model.teacher: {error} (copy both files from one run)") from None
    if missing:
        raise ConfigError(
            f"model.teacher = {str(teacher.folder)!r}: weight {missing[0]!r} is missing; copy both "
            "files from the same run"
        )
