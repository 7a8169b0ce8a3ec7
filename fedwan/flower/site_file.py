"""What a site's owner has decided: who it is, where things lie, and what code may run there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedwan.app import app_folders, workload_names
from fedwan.config import COMMAND, SITE, Config
from fedwan.config_tree import check_address, overlay, parse_words, read_yaml
from fedwan.errors import ConfigError
from fedwan.files import replace_text
from fedwan.names import named_function, nearest
from fedwan.site.assignment import meeting_folder

VARIABLE = "FEDWAN_SITE"
"""Environment variable with the path of the file; SuperNode and ClientApp inherit it."""


@dataclass
class SiteData:
    """Where this site's data are, and what of them may be shown."""

    path: str = ""
    """Their folder, in place of the run's `data.path`."""
    show_samples: bool = False
    """Whether pictures that are made of them, as `pix2pix` makes them, may leave the site."""


@dataclass
class SiteFile:
    """What SITE.yaml holds; relative paths begin at the file's own folder."""

    site: str = ""
    """The site's name, the common name of its certificate."""
    identity: str = ""
    """Folder with `ca.crt`, `identity.crt` and `identity.key`."""
    door: str = ""
    """`host:port` of the coordinator's front door."""
    dir: str = ""
    """Folder for the site's checkpoints and logs; one service at a time."""
    data: SiteData = field(default_factory=SiteData)
    command: str = ""
    """The training script of runs with `workload=command`, as in `torchrun --nproc-per-node 8
    train.py`."""
    recipes: list[str] = field(default_factory=list)
    """Recipes that may run here, of those that are installed; empty for all of them."""
    bundles: list[str] = field(default_factory=list)
    """SHA-256 of code that the coordinator sends or names and that is no installed package:
    its app for sites, where it is not the installed fedwan's own, and TorchScript files."""
    folder: str = ""
    """Where `command` starts; the file's own folder unless it says otherwise."""

    def write(self, path: Path) -> None:
        """Pass the values on to another process of this machine; JSON is YAML, too."""
        replace_text(path, json.dumps(asdict(self)).replace("${", "\\\\${"))


def load_site(path: Path, words: Sequence[str] = ()) -> SiteFile:
    """Read and check a site's file and words; every path is absolute then."""
    settings = overlay(SiteFile(), read_yaml(path), parse_words(words, SiteFile))
    for key in ("site", "identity", "door", "dir"):
        if not getattr(settings, key):
            raise ConfigError(f"{str(path)!r} has no {key!r}; add a line {key}: …")
    check_address("door", settings.door)
    for bundle in settings.bundles:
        if not re.fullmatch("[0-9a-f]{64}", bundle):
            raise ConfigError(
                f"bundles = {bundle!r} is no SHA-256 of code; copy the one that the refusal tells"
            )
    names = workload_names() if settings.recipes else []
    for recipe in settings.recipes:
        if "." not in recipe and recipe not in names:
            raise ConfigError(f"recipes = {recipe!r} is not installed here{nearest(recipe, names)}")
    base = path.parent.absolute()
    for key in ("folder", "identity", "dir"):
        setattr(settings, key, str(base / getattr(settings, key)))
    if settings.data.path:
        settings.data.path = str(base / settings.data.path)
    return settings


def given_site() -> SiteFile:
    """That of the site whose service started this process."""
    if VARIABLE not in os.environ:
        raise ConfigError("this SuperNode belongs to no site; start it with `fedwan site`")
    return load_site(Path(os.environ[VARIABLE]))


def assignment_path(site: SiteFile) -> Path:
    """Where a site's training processes find what they are started for."""
    return Path(site.dir) / "training" / "assignment.json"


def _imported(config: Config) -> Iterator[tuple[str, str]]:
    """What a run has a site import, besides fedwan's own."""
    if "." in config.strategy:
        yield "strategy", config.strategy
    if config.workload == COMMAND:
        return
    yield "workload", config.workload
    if named := named_function(config.eval.features):
        yield "eval.features", named[0]


def scripted_sha256(config: Config) -> str:
    """Of the TorchScript file that `eval.features` names; empty where it names none.

    Such a file is code: it can read and write what its user can.
    """
    path = Path(config.eval.features)
    if config.workload == COMMAND or not (config.eval.features and path.is_file()):
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_code(config: Config, site: SiteFile) -> None:
    """Refuse what a site's owner has not allowed to run."""
    for key, name in _imported(config) if site.recipes else ():
        if name not in site.recipes:
            raise ConfigError(
                f"{key} = {name!r} is not among the recipes that this site allows "
                f"({', '.join(site.recipes)}); its owner can add it to `recipes` in SITE.yaml"
            )
    features = config.eval.features
    if features and not Path(features).is_absolute() and not named_function(features):
        # Where it begins is not where the script will start.
        raise ConfigError(
            f"eval.features = {features!r} is no absolute path, and no module:function"
        )
    if (found := scripted_sha256(config)) and found not in site.bundles:
        raise ConfigError(
            f"eval.features = {features!r} is code that this site has not allowed; its "
            f"owner can add a line bundles: [{found}] to SITE.yaml"
        )


def find_command(config: Config, site: SiteFile) -> tuple[list[str], str]:
    """Words of what a run has a site run, and the folder that they start in."""
    _check_code(config, site)
    if config.workload != COMMAND:
        launcher = [sys.executable, "-m"]
        if config.site.processes > 1:
            launcher += ["torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d"]
            launcher += ["--rdzv-conf", "store_type=file", "--rdzv-id", "site"]
            launcher += ["--rdzv-endpoint", str(meeting_folder(assignment_path(site)) / "torchrun")]
            launcher += ["--nproc-per-node", str(config.site.processes), "-m"]
        return [*launcher, "fedwan.site.recipe"], str(app_folders()[0])
    try:
        words = [word.replace(SITE, site.site) for word in shlex.split(site.command)]
    except ValueError as error:
        raise ConfigError(f"command {site.command!r}: {error}; mend the quotes") from None
    if not words:
        raise ConfigError(
            "the run trains a script of each site's own, and this site has none; add a line "
            "command: … to its SITE.yaml"
        )
    if not Path(site.folder).is_dir():
        raise ConfigError(f"folder = {site.folder!r} is no folder; give the one to start in")
    # Beside this Python first: torchrun and python are of the environment that has fedwan.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    own = Path(site.folder) / words[0]
    found = shutil.which(words[0], path=path) or (str(own) if own.is_file() else None)
    if found is None:
        raise ConfigError(
            f"command {words[0]!r} is not to be found on the PATH or in {site.folder}; "
            "give a program that is, as in command: python train.py"
        )
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    starts_it = words[0].startswith(("python", "torchrun")) and not {"-m", "-c"} & {*words}
    if starts_it and script and not (Path(site.folder) / script).is_file():
        raise ConfigError(f"command {site.command!r}: there is no {script!r} in {site.folder}")
    return [found, *words[1:]], site.folder
