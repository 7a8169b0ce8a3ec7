"""A whole run on this machine: certificates, the sites' services, and the coordinator's.

Nothing is short-cut: each site is a service of its own, behind its own forwarder, and reaches
SuperLink through the front door with a certificate made for the run.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from os import cpu_count
from pathlib import Path

from fedwan.config import Config, host_and_port, site_names
from fedwan.errors import ConfigError, FedwanError, UserError
from fedwan.flower.coordinator import Coordinator
from fedwan.flower.processes import Service, last_line, our_environment, stop_all
from fedwan.flower.relay import FrontDoor
from fedwan.flower.service import log_to, only_one, stop_on_sigterm
from fedwan.flower.site_file import SiteData, SiteFile
from fedwan.flower.status import Status, clientapp_status, serverapp_status
from fedwan.link import pki

__all__ = ["run_local", "site_dir"]

_HOST = "127.0.0.1"
_GRACE_S = 8.0
_LAST_WORDS_S = 60.0


def run_local(
    config: Config,
    *,
    command: Sequence[str] = (),
    resume: bool = False,
    stop: threading.Event | None = None,
) -> None:
    """Run a coordinator and all its sites on this machine until the run is over.

    `stop` ends it when set; SIGTERM does too. It is set here, too, as soon as the run has failed:
    all that is left is to end its processes.

    Raises:
        ConfigError: a port is in use, or another service uses `out`.
        RunStopped: `stop` was set.
        FedwanError: the run or a site's service failed.
    """
    stop = stop or threading.Event()
    out = Path(config.out)
    # Sites that each take every core would spend their time waiting for one another.
    config.threads = config.threads or max(1, (cpu_count() or 1) // config.sites)
    names = site_names(config)
    with only_one(out, "out"), stop_on_sigterm(stop):
        if status := Status.read(serverapp_status(out)):
            status.end_orphan()
        identity = _make_identities(out / "pki", names, keep=resume) / "coordinator"
        # Left in reverse: first the sites, which say goodbye through the door, then SuperLink.
        with (
            log_to(out / "logs" / "coordinator.log", echo=False),
            closing(FrontDoor(identity, *host_and_port(config.link.door))) as door,
            Coordinator(config, door, identity, resume=resume) as coordinator,
            _site_services(config, names, door.port, command) as sites,
        ):
            try:
                coordinator.run(stop, check=lambda: _check(sites))
            except FedwanError:
                stop.set()
                raise
            _let_end([clientapp_status(site_dir(out, name)) for name in names], stop)


def _let_end(paths: Sequence[Path], stop: threading.Event) -> None:
    """The run is over: let the sites' processes end by themselves; scripts may have more to do."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline and not stop.wait(0.1):
        found = [Status.read(path) for path in paths]
        if all(status is None or status.is_gone or status.outcome != "running" for status in found):
            return


def site_dir(out: Path, name: str) -> Path:
    """Folder of a local site's state and logs."""
    return out / "sites" / name


def _make_identities(folder: Path, names: Sequence[str], *, keep: bool) -> Path:
    """Certificates for one local run; new ones each time, unless a run goes on."""
    if not keep or not folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        pki.init(folder, [_HOST])
    for name in names:
        if not (folder / name).exists():
            pki.issue(folder, name)
    return folder


@contextmanager
def _site_services(
    config: Config, names: Sequence[str], door_port: int, command: Sequence[str]
) -> Iterator[list[Service]]:
    out = Path(config.out)
    services: list[Service] = []
    try:
        for name in names:
            folder = site_dir(out, name)
            path = folder / "site.json"
            SiteFile(
                site=name,
                identity=str(out / "pki" / name),
                door=f"{_HOST}:{door_port}",
                dir=str(folder),
                # Who starts all sites speaks for their owners.
                data=SiteData(show_samples=True),
                command=shlex.join(command),
                folder=str(Path.cwd()),
            ).write(path)
            argv = [sys.executable, "-P", "-m", "fedwan.flower.site", str(path)]
            log = folder / "logs" / "service.log"
            services.append(Service(f"site {name}", argv, log, our_environment()))
        yield services
    finally:
        stop_all(services, _GRACE_S)


def _check(sites: Sequence[Service]) -> None:
    for site in sites:
        code = site.poll()
        if code == ConfigError.exit_code:
            raise UserError(f"{site.name}: {last_line(site.log).removeprefix('fedwan: ')}")
        if code is not None:
            raise site.death()
