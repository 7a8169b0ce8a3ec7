"""A trained flow as a teacher: read from the folder of the run that trained it.

Every site reads its own copy. Two files are enough: `config.yaml`, which says what the network is
made of, and `checkpoint/coordinator.safetensors`, which holds the moving average of its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from fedwan.config import load
from fedwan.errors import ConfigError, FedwanError
from fedwan.models.velocity import VelocitySizes
from fedwan.trained import load as load_trained

__all__ = ["Teacher", "load_teacher", "read_teacher"]

_NETWORK = "velocity"


class Teacher(NamedTuple):
    """What a flow's run says of its network."""

    folder: Path
    """Of the run."""
    data_name: str
    """That it makes samples of."""
    sizes: VelocitySizes
    label_dropout: float
    """Share of samples whose class `dit` was not told."""
    shift: float
    """Of the schedule that it was trained and sampled with."""
    euler_steps: int
    """That it is sampled with."""

    @property
    def weights(self) -> Path:
        """The file that holds them."""
        return self.folder / "checkpoint" / "coordinator.safetensors"


def read_teacher(folder: Path) -> Teacher:
    """What a run's folder says of the flow that was trained there; weights are not read yet."""
    key = f"model.teacher = {str(folder)!r}"
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{key} holds no config.yaml on this machine; name the folder of a run with "
            "workload=flow, which every site has a copy of (`fedwan demo workload=flow "
            f"out={folder}` makes one here)"
        )
    config = load(folder / "config.yaml")
    if config.workload != "flow":
        raise ConfigError(
            f"{key} is of a run with workload = {config.workload!r}, which has no velocities to "
            "learn from; name the folder of one with workload=flow"
        )
    if config.data.labels == "site":
        raise ConfigError(
            f"{key} is of a run with data.labels = 'site', whose teacher knows no classes; name "
            "the folder of one without"
        )
    model = config.model
    try:
        sizes = VelocitySizes(*(model[field] for field in VelocitySizes._fields))
        dropout, shift, steps = (model[f] for f in ("label_dropout", "shift", "euler_steps"))
    except KeyError as error:
        raise ConfigError(
            f"{key}: its config.yaml leaves model.{error.args[0]} open; take the one that the run "
            "wrote to its folder"
        ) from None
    for network, patterns in config.excluded.items():
        raise ConfigError(
            f"{key} is of a run with network.{network}.exclude = {patterns}, whose checkpoint "
            "lacks what each site had of its own; name the folder of one without"
        )
    teacher = Teacher(folder, config.data.name, sizes, dropout, shift, steps)
    if not teacher.weights.is_file():
        raise ConfigError(
            f"{key} holds no checkpoint/{teacher.weights.name}; wait until that run is done, "
            "or copy the file there"
        )
    return teacher


def load_teacher(teacher: Teacher, network: nn.Module) -> None:
    """Put the moving average of the teacher's weights into a network, in place."""
    try:
        missing = load_trained(teacher.folder).load_into(network, _NETWORK)
    except FedwanError as error:
        raise ConfigError(f"model.teacher: {error} (copy both files from one run)") from None
    if missing:
        raise ConfigError(
            f"model.teacher = {str(teacher.folder)!r}: weight {missing[0]!r} is missing; copy both "
            "files from the same run"
        )
