"""The coordinator's service: SuperLink on loopback, the front door, and one run, watched.

`fedwan coordinator CONFIG.yaml` is `serve_coordinator`; `run_local` puts the sites beside it, on
this machine. Nothing is short-cut there: each site is a service of its own, behind its own
forwarder, and reaches SuperLink through the front door with a certificate made for the run.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from os import cpu_count
from pathlib import Path

from fedwan.app import installed_app
from fedwan.config import Config, host_and_port, site_names
from fedwan.coordinator.control import ask
from fedwan.errors import STOPPED, ConfigError, FedwanError, ProcessLost, RunStopped, UserError
from fedwan.files import replace_text
from fedwan.flower import private_port, processes
from fedwan.flower.front_door import FrontDoor
from fedwan.flower.private_port import HOST
from fedwan.flower.processes import Service
from fedwan.flower.site_file import SiteData, SiteFile, load_site, scripted_sha256
from fedwan.flower.status import RUN, Start, Status, clientapp_files, serverapp_files, service_file
from fedwan.link import pki

_TICK_S = 0.5
_START_TICK_S = 0.05
_GRACE_S = 6.0
_SITES_GRACE_S = 8.0
_LAST_WORDS_S = 60.0
_TELL_S = 3.0
_GPUS = "CUDA_VISIBLE_DEVICES"
_PROCESSES = re.compile(r"--nproc[-_]per[-_]node[ =](\d+)")
"""In a site's command, torchrun's."""

RunOnce = Callable[..., None]
"""Submits a run and waits for its end, or until an event is set."""

_log = logging.getLogger(__name__)


def serve_coordinator(
    config: Config,
    identity: Path,
    *,
    stop: threading.Event,
    resume: bool = False,
    from_version: int | None = None,
) -> None:
    """Run one run's coordinator until the run is over; `RunStopped` if `stop` was set before.

    With `resume` it goes on from its last checkpoint, or from that of `from_version`.
    """
    with (
        processes.serving(Path(config.out), "out", "coordinator.log"),
        coordinating(config, identity, resume=resume, from_version=from_version) as (_, run),
    ):
        run(stop)


def check_ports(config: Config) -> None:
    """Refuse ports that sites cannot know, and for a run without a folder those that are in use.

    What holds the ports of a run that has one may be an orphan of its own, which ends first.
    """
    is_new = not Path(config.out).exists()
    for key in ("listen", "door"):
        address = getattr(config.link, key)
        if host_and_port(address)[1] == 0:
            raise ConfigError(
                f"link.{key} = {address!r} has port 0; sites need to know the port: set it, and "
                "open it"
            )
        if is_new:
            processes.listen(address, f"link.{key}").close()


@contextmanager
def coordinating(
    config: Config, identity: Path, *, resume: bool, from_version: int | None = None
) -> Iterator[tuple[int, RunOnce]]:
    """A run's services while the block runs: the door's port, and what runs it to its end.

    Its folder is held by who calls. The state of SuperLink, Flower's server, is a file, so that a
    coordinator that comes back finds the SuperNodes it knew and does not disturb those still at
    work.
    """
    out, folder = Path(config.out), Path(config.out) / "flower"
    Status.end_orphan(serverapp_files(out)[1])
    # The ServerApp will listen there, seconds from now: say at once if it cannot.
    processes.listen(config.link.listen, "link.listen").close()
    if from_version is not None:
        from fedwan.coordinator.model import go_back  # needs torch

        go_back(out / "checkpoint", from_version)
    with (
        closing(FrontDoor(identity, config, partial(_tell_of_refusal, out))) as door,
        private_port.listen() as listener,
    ):
        goes_back = from_version is not None
        start = Start.begin(config, identity, resume=resume, goes_back=goes_back)
        Status.of().write(service_file(out))
        # A full disk leaves half of the app, which Flower would take for the whole.
        shutil.rmtree(folder / "apps", ignore_errors=True)
        database = folder / "superlink.db"
        for old in [] if resume else folder.glob(f"{database.name}*"):
            old.unlink()
        words = ("--disable-runtime-dependency-installation", "--database", _url_of(database))
        argv = private_port.command(listener, "flower-superlink", *words)
        env = processes.flower_environment(folder) | {RUN: str(out.absolute())}
        log, port = out / "logs" / "superlink.log", listener.getsockname()[1]
        superlink = Service("SuperLink", argv, log, env, inherited=[listener])
        _log.info("run %s: door at port %d, SuperLink at port %d", start.run_id, door.port, port)
        try:
            yield door.port, partial(_run_to_the_end, out, door, superlink, f"{HOST}:{port}")
        finally:
            door.close()
            superlink.stop(_GRACE_S)


def _url_of(database: Path) -> str:
    """What SuperLink finds it by; of a path it would make a URL without quoting it."""
    from sqlalchemy.engine import URL, make_url  # Flower's

    path = str(database.absolute())
    url = URL.create("sqlite", database=path).render_as_string()
    if make_url(url).database != path:  # before SQLAlchemy 2.1
        raise ConfigError(f"{path!r}: a database cannot have this path; choose another folder")
    return url


def _run_to_the_end(
    out: Path,
    door: FrontDoor,
    superlink: Service,
    address: str,
    stop: threading.Event,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Submit the run and wait for its end; raises how it ended if it did not end well.

    A ServerApp that was killed, or that Flower took for dead, is started again.

    `check` is called twice a second, and may end the wait by raising. What does is told to the
    ServerApp, for its journal, before its processes are ended.
    """
    # Imported while SuperLink starts: Flower's client takes half a second.
    from fedwan.flower.bundle import build_fab
    from fedwan.flower.control import Control

    fab, number, path = build_fab(installed_app()), 0, serverapp_files(out)[1]
    is_up, lost_at = False, -1
    try:
        with closing(Control(address)) as control:
            while True:
                try:
                    if _is_over(out, superlink):
                        return
                except ProcessLost as error:
                    number, lost_at = 0, _start_again(out, lost_at, error)
                check()
                if not is_up and control.answers():
                    door.start(f"http://{address}")
                    is_up = True
                if is_up and not number:
                    number = control.start_run(fab)
                elif number and Status.read(path) is None:
                    # It may fail before it could leave a status, or leave one meanwhile.
                    if (reason := control.failure(number)) and Status.read(path) is None:
                        raise FedwanError(f"the ServerApp failed before it began: {reason}")
                if stop.wait(_TICK_S if number else _START_TICK_S):
                    raise RunStopped(STOPPED)
    except FedwanError as error:
        with suppress(FedwanError):  # it may have ended already, or not have begun
            ask(out, {"ask": "ending", "text": str(error)}, _TELL_S)
        raise


def _start_again(out: Path, before: int, error: ProcessLost) -> int:
    """Have another ServerApp go on for one that is gone; the version that it goes on from.

    As a site's service does: raises what it ended with if its last checkpoint is no newer than that
    of the one before, which was of version `before`.
    """
    from fedwan.coordinator.model import saved_version  # needs torch

    if (version := saved_version(out / "checkpoint")) <= before:
        raise ProcessLost(f"{error}; go on from the last checkpoint with --resume")
    _log.warning("%s; it is started again", error)
    path = serverapp_files(out)[1]
    status = Status.read(path)
    Status.end_orphan(path)
    Start.again(out, Start.read(out).port or (status.port if status else 0))
    return version


def _tell_of_refusal(out: Path, site: str, text: str) -> None:
    """For the journal, if the ServerApp is there that writes it."""
    with suppress(FedwanError):
        ask(out, {"ask": "refused", "site": site, "text": f"front door: {text}"}, _TELL_S)


def _is_over(out: Path, superlink: Service) -> bool:
    """Whether the run has ended well; raises if it has ended otherwise."""
    log, path = serverapp_files(out)
    if superlink.poll() is not None:
        raise superlink.death()
    if (status := Status.read(path)) is None:
        return False
    if status.is_killed:
        raise ProcessLost(f"the coordinator's ServerApp (process {status.pid}) was killed")
    if status.outcome not in ("running", "done"):
        raise status.exception(log)
    return status.outcome == "done"


def run_local(
    config: Config,
    *,
    stop: threading.Event,
    command: Sequence[str] = (),
    resume: bool = False,
    from_version: int | None = None,
) -> None:
    """Run a coordinator and all its sites on this machine until the run is over.

    `stop` ends it when set. It is set here as soon as the run has failed: all that is left is to
    end its processes. Errors are as in `serve_coordinator`, or a site's.
    """
    out = Path(config.out)
    # Sites that each take every core would spend their time waiting for one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cpu_count() or 1) // config.num_sites)))
    folders = [out / "sites" / name for name in site_names(config)]
    # What a start that failed before has left in a new run's folder is nothing to go back to.
    kept = _taken_back(out) if resume else nullcontext()
    with processes.serving(out, "out", "coordinator.log"), kept:
        if not resume or not all((out / "pki" / folder.name).exists() for folder in folders):
            if keys := sorted((out / "pki" / "ca").glob("*.key")):  # no run's has one
                raise ConfigError(
                    f"out = {config.out!r} holds the key of an authority, {keys[0]}, which a run "
                    "on one machine would delete; choose another out="
                )
            shutil.rmtree(out / "pki", ignore_errors=True)
            pki.federation(out / "pki", [HOST], site_names(config))
        # Left in reverse: first the sites, which say goodbye through the door, then SuperLink.
        with (
            coordinating(
                config, out / "pki" / "coordinator", resume=resume, from_version=from_version
            ) as (door, run),
            _site_services(config, out / "pki", folders, door, command) as sites,
        ):
            paths = [clientapp_files(folder)[1] for folder in folders]
            try:
                run(stop, check=lambda: _check(sites, paths))
            except FedwanError:
                stop.set()
                raise
            _let_end(paths, stop)


@contextmanager
def _taken_back(out: Path) -> Iterator[None]:
    """Settings and commands are as they were where a start that changes them is refused.

    Else the next start would go on with what cannot be. Once a round was made with them they stay.
    """
    from fedwan.coordinator.model import saved_version  # needs torch

    version = saved_version(out / "checkpoint")
    paths = [out / "config.yaml", *out.glob("sites/*/site.yaml")]
    before = {path: path.read_text() for path in paths}
    try:
        yield
    except UserError:
        if saved_version(out / "checkpoint") <= version:
            for path, text in before.items():
                replace_text(path, text)
        raise


def _let_end(paths: Sequence[Path], stop: threading.Event) -> None:
    """The run is over: let the sites' processes end by themselves; scripts may have more to do."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline and not stop.wait(0.1):
        found = [Status.read(path) for path in paths]
        if all(status is None or status.is_gone or status.outcome != "running" for status in found):
            return


@contextmanager
def _site_services(
    config: Config,
    identities: Path,
    folders: Sequence[Path],
    door_port: int,
    command: Sequence[str],
) -> Iterator[list[Service]]:
    services: list[Service] = []
    gpus = visible_gpus()
    start = (shlex.join(command), str(Path.cwd()))
    files = [folder / "site.yaml" for folder in folders]
    if not command and (before := [load_site(path) for path in files if path.exists()]):
        start = (before[0].command, before[0].folder)  # a run goes on, with what it began with
    try:
        for number, (folder, path) in enumerate(zip(folders, files, strict=True)):
            SiteFile(
                site=folder.name,
                identity=str(identities / folder.name),
                door=f"{HOST}:{door_port}",
                dir=str(folder),
                # Who starts all sites speaks for their owners.
                data=SiteData(show_samples=True),
                bundles=[found] if (found := scripted_sha256(config)) else [],
                command=start[0],
                folder=start[1],
            ).write(path)
            argv = [sys.executable, "-P", "-m", "fedwan", "site", str(path)]
            log, env = folder / "logs" / "service.log", processes.flower_environment(folder)
            if gpus:
                asked = _PROCESSES.search(start[0])
                num_processes = int(asked[1]) if asked else config.site.processes
                env[_GPUS] = ",".join(gpus_of(number, config.num_sites, num_processes, gpus))
            services.append(Service(f"site {folder.name}", argv, log, env))
        yield services
    finally:
        processes.stop_all(services, _SITES_GRACE_S)


def visible_gpus() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    num = torch.cuda.device_count()
    named = os.environ.get(_GPUS) or ",".join(map(str, range(num)))
    return named.split(",")[:num]


def gpus_of(number: int, num_sites: int, num_processes: int, gpus: Sequence[str]) -> list[str]:
    """Of a machine's GPUs those of one of its sites; sites share some where there are too few."""
    num = max(1, len(gpus) // num_sites, min(num_processes, len(gpus)))
    return [gpus[(number * num + i) % len(gpus)] for i in range(num)]


def _check(sites: Sequence[Service], paths: Sequence[Path]) -> None:
    for site, path in zip(sites, paths, strict=True):
        code = site.poll()
        if code is not None and (status := Status.read(path)) and status.is_out:
            continue
        if code == ConfigError.exit_code:
            why = processes.last_line(site.log).removeprefix("fedwan: ")
            raise UserError(f"{site.name}: {why.removeprefix(f'{site.name}: ')}")
        if code is not None:
            raise site.death()
