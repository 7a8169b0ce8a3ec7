"""The training processes of a site: started for a ticket, watched, and ended with it.

A recipe runs as `python -m fedwan.site.recipe`, under torchrun where the run asks for several
processes; a run of `workload=command` runs the site's own command. Both find their assignment by an
environment variable and leave word of how they ended.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from fedwan.app import app_folders
from fedwan.config import COMMAND, SITE, Config, from_json
from fedwan.errors import ConfigError, FedwanError, UserError
from fedwan.flower.processes import Service, last_line
from fedwan.flower.site_file import SiteFile
from fedwan.flower.status import clientapp_log
from fedwan.link.ticket import Ticket
from fedwan.site.assignment import VARIABLE, Assignment, read_outcome

__all__ = ["find_command", "train"]

log = logging.getLogger(__name__)

_POLL_S = 0.1
_GRACE_S = 3.0


def train(ticket: Ticket, site: SiteFile) -> None:
    """Take part in the run that a ticket is for, until it is over.

    A script that fails by itself is started once more if it had got further than the time before:
    it goes on from its checkpoint.

    Raises:
        UserError: the site has no command, it does not exist, or the script failed.
        FedwanError: what the training processes ended with.
    """
    config = from_json(ticket.config)
    argv, folder = find_command(config, site)
    path = Path(site.dir) / "training" / "assignment.json"
    failed_at = -1
    while True:
        assignment = Assignment(
            address=f"{site.door.rpartition(':')[0]}:{ticket.address.rpartition(':')[2]}",
            run_id=ticket.run_id,
            config=ticket.config,
            site=site.site,
            identity=site.identity,
            dir=site.dir,
            data_path=site.data.path,
            show_samples=site.data.show_samples,
            parent=os.getpid(),
        )
        assignment.write(path)
        code = _run(argv, folder, path, site)
        outcome, has_joined = read_outcome(path)
        if outcome is None and code == 0 and has_joined:
            return
        if outcome is None:
            raise _silent_end(argv, code, has_joined, site)
        if not outcome.error:
            return
        if outcome.is_own or outcome.step <= failed_at:
            raise outcome.exception()
        failed_at = outcome.step
        log.warning("%s; it is started again", outcome.exception())


def find_command(config: Config, site: SiteFile) -> tuple[list[str], str]:
    """Words of what a run has a site run, and the folder that they start in.

    Raises:
        ConfigError: the site allows no such recipe, has no command, or it does not exist.
    """
    if config.workload != COMMAND:
        if site.recipes and config.workload not in site.recipes:
            raise ConfigError(
                f"workload = {config.workload!r} is not among the recipes that this site allows "
                f"({', '.join(site.recipes)}); its owner can add it to `recipes` in SITE.yaml"
            )
        launcher = [sys.executable, "-m"]
        if config.site.processes > 1:
            launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node"]
            launcher += [str(config.site.processes), "-m"]
        return [*launcher, "fedwan.site.recipe"], str(app_folders()[0])
    words = [word.replace(SITE, site.site) for word in shlex.split(site.command)]
    if not words:
        raise ConfigError(
            "the run trains a script of each site's own, and this site has none; add a line "
            "command: … to its SITE.yaml"
        )
    # Beside this Python first: torchrun and python are of the environment that has fedwan.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which(words[0], path=path)
    if found is None and (Path(site.folder) / words[0]).is_file():
        found = str(Path(site.folder) / words[0])
    if found is None:
        raise ConfigError(
            f"command {words[0]!r} is not to be found on the PATH or in {site.folder}; "
            "give a program that is, as in command: python train.py"
        )
    return [found, *words[1:]], site.folder


def _run(argv: list[str], folder: str, path: Path, site: SiteFile) -> int:
    env = dict(os.environ) | {VARIABLE: str(path)}
    service = Service(f"training of {site.site}", argv, clientapp_log(Path(site.dir)), env, folder)
    try:
        while (code := service.poll()) is None:
            time.sleep(_POLL_S)
        return code
    finally:
        service.stop(_GRACE_S)


def _silent_end(argv: list[str], code: int, has_joined: bool, site: SiteFile) -> FedwanError:
    """Of processes that have not said how they ended."""
    words, text = " ".join(argv), last_line(clientapp_log(Path(site.dir)))
    if not has_joined:
        done = "ended" if code == 0 else f"ended with status {code}"
        return UserError(f"{words!r} {done} before it called fedwan.join; its last words: {text}")
    return FedwanError(f"{words!r} was killed (status {code}); last words: {text}")
