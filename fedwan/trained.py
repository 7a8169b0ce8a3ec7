"""`fedwan.load`: what a run's folder holds of its networks, while it trains and afterwards.

Two files are read: `config.yaml`, and the coordinator's checkpoint. That holds what travels between
sites; what stays there (`fedwan.workloads.home`, spectral norm's vectors) it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import torch
from torch import nn

from fedwan.config import COMMAND, Config
from fedwan.config import load as load_config
from fedwan.errors import CheckpointError, UserError
from fedwan.initial import absent, load_initial, put
from fedwan.names import nearest
from fedwan.state import State, network_of, refresh_spectral_norm
from fedwan.workloads.optim import is_moment

if TYPE_CHECKING:
    from fedwan.workloads.base import Workload


@dataclass(frozen=True)
class Trained:
    """The networks of a run."""

    folder: Path
    config: Config
    networks: dict[str, State]
    """By name, tensors as the module's `state_dict` names them; parameters in fp32."""
    is_ema: bool
    """Whether they are the moving average."""

    def load_into(self, module: nn.Module, network: str) -> list[str]:
        """Put the weights of the run's `network` into a module of its class and sizes, in place.

        Returns names of the module's tensors that the run's folder lacks, since they stayed at the
        sites: they are as they were, but for spectral norm's vectors, which follow. A `UserError`
        if the run has no such network, or it does not fit.
        """
        if network not in self.networks:
            raise UserError(
                f"{self.folder} has no network {network!r}, but {', '.join(self.networks)}"
                f"{nearest(network, self.networks)}"
            )
        tensors = self.networks[network]
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        missing = absent(module, shapes, f"network {network!r} of {self.folder}")
        put(module, tensors)
        refresh_spectral_norm({network: module})
        return missing

    def workload(self, device: torch.device | str = "cpu") -> Workload:
        """The recipe's workload with these weights, in evaluation mode.

        Frozen networks and layers are as the recipe builds them, or `init` has them; layers of the
        sites' own (`network.NETWORK.exclude`) are as they were before the first step. A `UserError`
        if the run was of a script, or the recipe no longer fits.
        """
        if self.config.workload == COMMAND:
            raise UserError(
                f"{self.folder} is a run of a script, which has no recipe to build; build the "
                "networks as the script does, and call load_into(module, network) with each"
            )
        from fedwan.app import load_workload

        built: Workload = load_workload(self.config.workload).build(self.config, device)
        load_initial(built.networks, self.config.init, self.config.excluded)
        for network in self.networks:
            self.load_into(built.networks[network], network)
            built.networks[network].eval()
        return built


def load(run: str | Path, *, ema: bool = True) -> Trained:
    """The networks of the last checkpoint in a run's folder: their moving average, or the last.

        trained = fedwan.load("runs/demo")
        trained.load_into(generator, "generator")       into a module of your own
        trained.workload().sample(num=16, seed=0)       or as the recipe builds it

    Raises:
        CheckpointError: the folder holds no run, or no checkpoint yet, or one that is damaged.
    """
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{str(folder)!r} holds no run; give the folder with its config.yaml")
    tensors = _read(folder, "ema:" if ema else "global:")
    networks: dict[str, State] = {}
    for name in sorted(tensors):
        if not is_moment(name):
            network = network_of(name)
            networks.setdefault(network, {})[name[len(network) + 1 :]] = tensors[name]
    return Trained(folder, load_config(folder / "config.yaml"), networks, ema)


def _read(folder: Path, prefix: str) -> Mapping[str, torch.Tensor]:
    path = folder / "checkpoint" / "coordinator.safetensors"
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name[len(prefix) :]: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        what = (
            f"{str(folder)!r} holds no checkpoint yet; wait for the run's first, or see its logs/"
        )
    except (safetensors.SafetensorError, OSError) as error:
        what = f"checkpoint {path} cannot be read ({error}); copy it again"
    raise CheckpointError(what)
