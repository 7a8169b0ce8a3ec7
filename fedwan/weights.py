"""Weights in files: what a run starts from (`init.NETWORK=path.safetensors`), and what it leaves.

Of a run's folder two files are read: `config.yaml`, and the coordinator's checkpoint. That holds
what travels between sites; what stays there (`fedwan.workloads.home`, spectral norm's vectors) it
lacks. Initial weights each site reads from its own copy; that all are the same is seen at Join.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedwan
from fedwan.config import COMMAND, Config, from_json, load_dumped
from fedwan.errors import CheckpointError, ConfigError, FedwanError, UserError
from fedwan.names import nearest
from fedwan.output.units import subject
from fedwan.pieces import local, piece_like
from fedwan.state import (
    Role,
    State,
    is_moment,
    network_of,
    read_tensors,
    role_of_buffer,
    select_prefix,
    spectral_norms,
)

if TYPE_CHECKING:
    from fedwan.workloads.descent import Descent

Shape = tuple[int, ...]
_ABOUT = "config.json"
"""Of an exported folder: what `export` says of it."""
FORMATS = ("safetensors", "diffusers")
"""Of `export`; of the second is what the recipe's workload writes by its `save_pretrained`."""


@dataclass(frozen=True)
class Trained:
    """The networks of a run."""

    folder: Path
    config: Config
    networks: dict[str, State] = field(repr=False)
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
        module = unwrapped(module)
        missing = self._lacking(module, network)
        if any(value.is_meta for value in _tensors(module).values()):
            raise UserError(
                f"the module for network {network!r} lies on meta, without memory; give it some "
                'before, as module.to_empty(device="cpu") does'
            )
        _put(module, self.networks[network])
        for refresh in spectral_norms({network: module}):
            refresh()
        return missing

    def _lacking(self, module: nn.Module, network: str) -> list[str]:
        """Names of its tensors that are not here; a `ConfigError` if it does not fit."""
        shapes = {name: tuple(value.shape) for name, value in self.networks[network].items()}
        return _absent(module, shapes, f"network {network!r} of {self.folder}")

    def workload(self, device: torch.device | str = "cpu") -> Descent:
        """The recipe's workload with these weights, in evaluation mode.

        Frozen networks and layers are as the recipe builds them, or `init` has them; layers of the
        sites' own (`network.NETWORK.exclude`) are as they were before the first step. A `UserError`
        if the run was of a script, or the recipe no longer fits.
        """
        if self.config.workload == COMMAND:
            raise UserError(
                f"{self.folder} is a run of a script, which has no recipe to build: for weights "
                "`fedwan export RUN --to safetensors DIR`, or in Python fedwan.load(RUN).load_into"
                "(module, network); what it drew itself is in samples.png there"
            )
        from fedwan.app import load_workload
        from fedwan.workloads.settings import networks_of

        recipe = load_workload(self.config.workload)
        if gone := sorted(networks_of(recipe, self.config).keys() ^ self.config.inner.keys()):
            raise UserError(
                f"recipe {self.config.workload!r} has other networks now than {self.folder}, "
                f"{gone[0]!r} for one; bring back its page as it was"
            )
        built: Descent = recipe.build(self.config, device)
        stayed = {n for n in built.networks if n not in self.networks}
        for network in self.networks:
            module = built.networks[network]
            if {*self._lacking(module, network)} - _spectral(module):
                stayed.add(network)
        init = {network: path for network, path in self.config.init.items() if network in stayed}
        load_initial(built.networks, dataclasses.replace(self.config, init=init))
        for network in self.networks:
            self.load_into(built.networks[network], network)
            built.networks[network].eval()
        return built


def load(run: str | Path, *, ema: bool = True) -> Trained:
    """The networks of the last checkpoint in a run's folder: their moving average, or the last.

        trained = fedwan.load("runs/demo")
        trained.load_into(generator, "generator")       into a module of your own
        trained.workload().sample(num=16, seed=0)       or as the recipe builds it

    Of a folder that `fedwan export --to safetensors` wrote, those that it holds.

    Raises:
        ConfigError: the folder holds no run, or not these weights.
        CheckpointError: it holds no checkpoint yet, or one that is damaged.
    """
    folder = Path(run)
    if (folder / _ABOUT).is_file() and not (folder / "config.yaml").exists():
        return _load_exported(folder, ema)
    config, path = load_dumped(folder), folder / "checkpoint" / "coordinator.safetensors"
    if not path.exists():
        why = "yet; wait for the run's first, or see its logs/"
        if (folder / "summary.json").exists():
            why = f"any more: {path.name} was removed; restore it"
        raise CheckpointError(f"{str(folder)!r} holds no checkpoint {why}")
    which = "ema" if ema else "global"
    tensors = select_prefix(which, read_tensors(path, f"{which}:")[0])
    networks: dict[str, State] = {}
    for name in sorted(tensors):
        if not is_moment(name):
            network = network_of(name)
            networks.setdefault(network, {})[name[len(network) + 1 :]] = tensors[name]
    return Trained(folder, config, networks, ema)


def _load_exported(folder: Path, ema: bool) -> Trained:
    try:
        about = json.loads((folder / _ABOUT).read_text())
        is_ema = {"ema": True, "last": False}[about["weights"]]
        config = from_json(json.dumps(about["config"]))
        files = {network: folder / Path(name).name for network, name in about["files"].items()}
        networks = {network: load_file(path) for network, path in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"{str(folder)!r} holds no run, and no whole export of one ({error!r}); give the "
            "folder of a run, or of `fedwan export --to safetensors`"
        ) from None
    if is_ema and not ema:
        raise ConfigError(
            f"{str(folder)!r} holds the moving average alone; export the run with --last"
        )
    return Trained(folder, config, networks, is_ema)


def unwrapped(module: nn.Module) -> nn.Module:
    """The network itself, where DDP, DataParallel or torch.compile are around it, in any order."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UserError(
            "a network holds a FullyShardedDataParallel (FSDP1), which makes its parameters others "
            "than torch names; shard it by FSDP2: torch.distributed.fsdp.fully_shard(network)"
        )
    while True:
        is_wrapped = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        inner = getattr(module, "module" if is_wrapped else "_orig_mod", None)
        if inner is None:
            return module
        module = inner


# Initial weights ---------------------------------------------------------------------------------


def load_initial(
    networks: Mapping[str, nn.Module], config: Config, held: Collection[int] | None = None
) -> None:
    """Put initial weights from files into networks, plain or sharded, in place.

    A file may lack what is frozen, and what stays at its site; `held` as of `check_initial`.
    """
    check_initial(networks, config, held)
    for network, path in config.init.items():
        targets, tensors = _tensors(networks[network]), load_file(path)
        for name, value in tensors.items():
            dtype, is_buffer = targets[name].dtype, not isinstance(targets[name], nn.Parameter)
            if (value.is_floating_point(), value.is_complex()) != (
                dtype.is_floating_point,
                dtype.is_complex,
            ):
                mend = f"is {value.dtype} for {dtype}; give weights as they were trained"
            elif not (is_buffer or value.to(dtype).isfinite().all()):  # a mask has infinities
                mend = f"holds values that are not finite in {dtype}; give another file"
            else:
                continue
            raise ConfigError(f"init.{network} = {path!r}: {name!r} {mend}")
        _put(networks[network], tensors)


def check_initial(
    networks: Mapping[str, nn.Module], config: Config, held: Collection[int] | None = None
) -> None:
    """Refuse files that do not fit networks, which may be on torch's meta device.

    `held`: `id` of the parameters that optimisers step; None for those that require a gradient.
    """
    for network, path in config.init.items():
        key = f"init.{network}"
        if network not in networks:
            raise ConfigError(
                f"{key}: networks are {', '.join(networks)}{nearest(network, networks)}"
            )
        module, key = networks[network], f"{key} = {path!r}"
        missing = {*_absent(module, shapes_of(key, Path(path)), key)} - _spectral(module)
        patterns = config.excluded.get(network, ())
        frozen = {
            name
            for name, value in module.named_parameters()
            if not (value.requires_grad if held is None else id(value) in held)
        }
        for name in sorted(missing - frozen):
            if not any(fnmatchcase(name, p) for p in patterns):
                raise ConfigError(
                    f"{key} lacks {name!r}, which is trained; give a file with all trained tensors"
                )


def shapes_of(key: str, path: Path) -> dict[str, Shape]:
    """Of a safetensors file's tensors; a `ConfigError` that begins with `key` if it is none."""
    if not path.is_file():
        raise ConfigError(f"{key} is no file on this machine; give the path of a safetensors file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{key} is no safetensors file ({error}); write one with "
            "safetensors.torch.save_model(module, path)"
        ) from None


def _spectral(module: nn.Module) -> set[str]:
    return {n for n, v in module.named_buffers() if role_of_buffer(n, v) is Role.SPECTRAL}


def _absent(module: nn.Module, shapes: Mapping[str, Shape], what: str) -> list[str]:
    """Names of a module's tensors that are not among the given ones; tied ones count as one.

    A `ConfigError` if one is not the module's, by name or shape.
    """
    tensors = _tensors(module)
    for name, shape in shapes.items():
        mine = tuple(tensors[name].shape) if name in tensors else None
        if shape != mine:
            says = f"not{nearest(name, tensors)}" if mine is None else f"as {mine}"
            raise ConfigError(f"{what}: {name!r} is of shape {shape}, which the module has {says}")
    given = {id(tensors[name]) for name in shapes}
    return [name for name, value in tensors.items() if id(value) not in given]


@torch.no_grad()
def _put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a module by name, in its own dtypes, on its own devices."""
    targets = _tensors(module)
    for name, value in tensors.items():
        local(targets[name]).copy_(piece_like(value, targets[name]))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, not detached."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


# Plain files that need no fedwan -----------------------------------------------------------------


def export(trained: Trained, to: str, folder: Path) -> None:
    """Write one file per network, `config.json`, and a README on loading, into a new folder.

    Of a recipe's networks their layers, too, as torch prints them. To `diffusers`, what its
    `from_pretrained` opens. A `UserError` if there is no such format, or none of the run's
    workload, or the folder holds something.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to} is none of {', '.join(FORMATS)}{nearest(to, FORMATS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} holds something already; give a new folder")
    if to == "diffusers":
        save = getattr(trained.workload(), "save_pretrained", None)
        if save is None:
            raise UserError(
                f"--to diffusers: workload {trained.config.workload!r} is of no diffusers model; "
                "use --to safetensors"
            )
        save(folder)
        _open_up(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    modules: dict[str, nn.Module] = {}
    with suppress(FedwanError):  # there is no recipe, or it has moved on
        built = trained.workload().networks
        modules = {name: built[name] for name in trained.networks}
    for network, tensors in trained.networks.items():
        whole = {name: value.contiguous() for name, value in tensors.items()}
        save_file(whole, folder / f"{network}.safetensors", {"format": "pt"})
    config = dataclasses.asdict(trained.config)
    for key in ("out", *(("model", "data", "site") if trained.config.workload == COMMAND else ())):
        del config[key]  # a folder of this machine's; what is a recipe's alone
    about: dict[str, object] = {
        "fedwan": fedwan.__version__,
        "weights": "ema" if trained.is_ema else "last",
        "files": {network: f"{network}.safetensors" for network in trained.networks},
        "config": config,
    }
    for name, module in modules.items():
        (folder / f"{name}.txt").write_text(f"{module}\n")
    if modules:
        about["missing"] = {n: _missing(m, trained.networks[n]) for n, m in modules.items()}
    (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    (folder / "README.md").write_text(_readme(trained, modules))
    _open_up(folder)


def _missing(module: nn.Module, tensors: State) -> list[str]:
    return [name for name in module.state_dict() if name not in tensors]


def _open_up(folder: Path) -> None:
    """Let those read the files who may read the folder; safetensors writes them for the owner."""
    for path in folder.rglob("*.safetensors"):
        path.chmod(folder.stat().st_mode & 0o666)


def _readme(trained: Trained, modules: Mapping[str, nn.Module]) -> str:
    """`modules` as the recipe builds them, by name; none where there is no recipe."""
    partial = {n for n, module in modules.items() if _missing(module, trained.networks[n])}
    loading = "\n".join(
        f'{name}.load_state_dict(load_file("{name}.safetensors")'
        f"{', strict=False' if name in partial else ''})"
        for name in trained.networks
    )
    built = "".join(
        f"`{n}` is a `{type(m).__name__}` of `{type(m).__module__}`, as workload "
        f"`{trained.config.workload}` builds it: `fedwan.load(DIR).workload().networks[{n!r}]`, "
        f"where DIR is this folder. Without fedwan, build it of the layers that `{n}.txt` lists.\n"
        for n, m in modules.items()
    )
    left = ""
    if partial or not modules:
        left = (
            "\nA file may lack names of its module, which `strict=False` leaves as they are:\n"
            "frozen layers and layers of the sites' own never left them, a tensor that is tied\n"
            "to another lies under one of their names, and spectral norm's vectors follow from\n"
            "weights.\n"
        )
    return (
        f"# Weights of {subject(trained.config)}, trained with fedwan {fedwan.__version__}\n\n"
        "One file per network, by the names of the module's `state_dict()`:\n\n"
        f"```python\nfrom safetensors.torch import load_file\n\n{loading}\n```\n\n{built}"
        "`config.json` holds the run's settings, and whether these are the moving average (`ema`) "
        f"or the `last` weights.\n{left}"
    )
