"""The commands that train: `run`, `demo`, `launch`; `coordinator` and `site` of a deployment.

A run's services work in a thread, the live table in the main one, which is where signals arrive.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedwan.cli.arguments import (
    FileAndWords,
    Words,
    argument,
    file_and_words,
    has_sites_elsewhere,
    option,
    resuming,
)
from fedwan.cli.folder import choose_folder, holds_run, load_config
from fedwan.config import COMMAND, Config
from fedwan.errors import ConfigError, FailedAfter, FedwanError, RunStopped, UserError
from fedwan.flower.processes import stop_on_sigterm
from fedwan.output.board import read_run
from fedwan.output.live import watch
from fedwan.output.summary import read_summary, render_summary
from fedwan.uses import Faults

RunServices = Callable[..., None]
"""Runs a `Config` until its end, or until the event `stop` is set; raises how it failed."""

KEYS = (
    "Keys that are always there: workload strategy sites steps h seed data.name data.split "
    "codec.up codec.down link.rate_mbit link.rtt_ms out. A wrong key is refused with "
    "the nearest valid one."
)
"""Below the help of every command that takes settings."""

Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in `out` from its last checkpoint.")
]


FromVersion = Annotated[
    int | None,
    typer.Option(
        "--from-version",
        help="With --resume: go back to this version; the last two checkpoints are kept.",
        show_default=False,
    ),
]


def run(
    words: FileAndWords = None, resume: Resume = False, from_version: FromVersion = None
) -> None:
    """Train with a coordinator and all sites on this machine.

    KEY=VALUE words, such as h=50 outer.generator.lr=0.3, beat the file, which may be left out.

    A run that was stopped goes on with: fedwan run OUT/config.yaml --resume, or out=OUT --resume
    """
    run_here(*file_and_words(words), resume=resume, from_version=from_version)


def demo(words: Words = None, resume: Resume = False) -> None:
    """Train a GAN on handwritten digits: a coordinator and 4 sites on this machine.

    KEY=VALUE words change it: workload=flow sites=2 h=50 link.rtt_ms=100

    Results are in runs/demo; a second demo goes to runs/demo-2, and so on.
    """
    given = list(words or [])
    out = choose_folder(Path(Config().out), given, resume=resume)
    run_here(None, [f"out={out}", *given], resume=resume)


def launch(
    words: Annotated[
        list[str] | None,
        argument(
            "[KEY=VALUE]... -- COMMAND...",
            "Settings, such as h=50 codec.up=int4, then the command that each site runs.",
        ),
    ] = None,
    sites: Annotated[
        int | None, typer.Option("--sites", help="How many sites; 2 if left out.")
    ] = None,
    resume: Resume = False,
) -> None:
    """Train your own script on several sites of this machine: a federation of processes.

    fedwan launch --sites 2 -- python train.py

    fedwan launch --sites 2 h=50 -- torchrun --nproc-per-node 2 train.py

    fedwan launch --resume

    The script calls fedwan.join; docs/start.md shows how.

    Results are in runs/launch; a second launch goes to runs/launch-2, and so on.
    """
    settings, command = split_words(words or [], needs_command=not resume)
    out = choose_folder(Path("runs/launch"), settings, resume=resume)
    given = [f"sites={2 if sites is None else sites}", "workload=command"]
    if resume and (out / "config.yaml").exists():
        given = [] if sites is None else [f"sites={sites}"]
    run_here(None, [*given, f"out={out}", *settings], command, resume=resume)


def split_words(words: list[str], *, needs_command: bool = True) -> tuple[list[str], list[str]]:
    """Settings, and the command that follows them; a run goes on with its own.

    >>> split_words(["h=50", "seed=1", "python", "train.py", "--lr=1"])
    (['h=50', 'seed=1'], ['python', 'train.py', '--lr=1'])
    """
    count = next((i for i, word in enumerate(words) if "=" not in word), len(words))
    if count == len(words) and needs_command:
        what = repr(shlex.join(words)) if words else "fedwan launch"
        raise ConfigError(
            f"{what} names no command; write it after --, as in "
            "fedwan launch --sites 2 -- python train.py"
        )
    return words[:count], words[count:]


def coordinator(
    config_path: Annotated[Path, argument("CONFIG.yaml", "Settings of the run.")],
    identity: Annotated[Path, option("--identity", "DIR", "The coordinator's identity folder.")],
    words: Words = None,
    resume: Resume = False,
    from_version: FromVersion = None,
) -> None:
    """Serve one run to sites elsewhere, until it is done.

    Set link.listen and link.door, and open both ports.

    docs/deploy.md shows a whole deployment.
    """
    # Before torch is loaded: a wrong folder should be told at once.
    from fedwan.link.admission import Admission
    from fedwan.link.tls import Identity

    Identity.load(identity, "coordinator")
    Admission(identity)
    config = load_config(config_path, words or [], resume=resume, from_version=from_version)

    from fedwan.flower.coordinator import check_ports, serve_coordinator

    check_ports(config)
    serve = partial(serve_coordinator, from_version=from_version)
    start(config, partial(serve, identity=identity.absolute(), resume=resume))


def site(
    path: Annotated[Path, argument("SITE.yaml", "The site's file.")],
    words: Annotated[
        list[str] | None,
        argument("[KEY=VALUE]...", "Keys of the file, such as data.path=/data; they beat it."),
    ] = None,
) -> None:
    """Serve a site: take part in whatever the coordinator runs, until stopped.

    SITE.yaml has four keys: site (its name), identity (the folder that `fedwan pki request` made),
    door (host:port of the coordinator's front door) and dir (for checkpoints and logs).

    It may have more: data.path, data.show_samples, command, folder, recipes and bundles; see
    docs/deploy.md.
    """
    from fedwan.flower.site_file import find_command, load_site

    settings = load_site(path, words or [])
    if settings.command:
        find_command(Config(workload=COMMAND), settings)
    # Imported late, so that a wrong file is told at once.
    from fedwan.flower.site import serve_site

    serve_site(settings)


def run_here(
    path: Path | None,
    words: Sequence[str],
    command: Sequence[str] = (),
    *,
    resume: bool,
    from_version: int | None = None,
) -> None:
    """Run a configuration on this machine, show it, and print its summary."""
    config = load_config(path, words, resume=resume, from_version=from_version)
    out = Path(config.out)
    if resume and has_sites_elsewhere(out) and not (out / "summary.json").exists():
        raise ConfigError(
            f"the run in {config.out!r} has its sites elsewhere; go on with it: {resuming(out)}"
        )
    faults, warnings = Faults(), list[str]()
    if not resume:
        from fedwan.preflight import preflight

        with faults.caught():
            warnings = preflight(config)
    if command:
        from fedwan.flower.site_file import SiteFile, find_command

        with faults.caught():
            find_command(config, SiteFile(command=shlex.join(command), folder=str(Path.cwd())))
    faults.tell()
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)

    from fedwan.flower.coordinator import run_local

    run_services = partial(run_local, command=command, from_version=from_version)
    start(config, partial(run_services, resume=resume))


def start(config: Config, services: RunServices) -> None:
    """Run services to the end of a run, and show its summary; of a run that is done, only that."""
    out, console, failed = Path(config.out), Console(), None
    short = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    if not (out / "summary.json").exists():
        try:
            out.mkdir(0o700, parents=True, exist_ok=True)  # no other user may look into it
        except OSError as error:
            text = f"out = {str(out)!r} cannot be made: {error.strerror}; choose another out="
            raise ConfigError(text) from None
        typer.echo(f"results go to {short}")
        _run_and_watch(config, services, console)
        failed = _failed_after(out)
    else:
        typer.echo(f"the run in {short} is complete, and nothing was run")
    summary = read_summary(out / "summary.json")
    console.print(render_summary(summary, read_run(out), short))
    if failed is not None:
        raise failed


def _failed_after(out: Path) -> FedwanError | None:
    """Of sites on this machine, what a script failed with once the run was done."""
    from fedwan.flower.status import Status

    for path in sorted(out.glob("sites/*/clientapp.json")):
        if (status := Status.read(path)) and status.error == FailedAfter.__name__:
            return FailedAfter(f"site {path.parent.name}: {status.text}")
    return None


_GONE = (OSError, SystemExit)
"""Of what is shown: who looks has gone, or the disk of a log is full."""


def _run_and_watch(config: Config, services: RunServices, console: Console) -> None:
    stop, ended, out = threading.Event(), threading.Event(), Path(config.out)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            services(config, stop=stop)
        except BaseException as error:  # handed to the main thread, which decides
            errors.append(error)
        finally:
            ended.set()

    # Children end with the thread that started them, so it must live until it has ended them. An
    # event says so: of a thread whose `join` is interrupted, Python 3.11 thinks that it has ended.
    thread = threading.Thread(target=work, name="services", daemon=True)
    with stop_on_sigterm(stop):
        thread.start()
        try:
            with suppress(*_GONE):
                # Once it is to end, what happens on the way tells nothing: the error's line does.
                watch(out, config, lambda: not (ended.is_set() or stop.is_set()), console)
            while not ended.wait(0.5):
                pass  # a signal that comes right before a wait is heeded after it
        except KeyboardInterrupt as interrupt:
            stop.set()
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one changes nothing
            try:
                with suppress(*_GONE):
                    console.print("Ctrl-C: ending the services …")
                ended.wait()
            finally:
                signal.signal(signal.SIGINT, before)
            if not errors or isinstance(errors[0], RunStopped):
                errors = [interrupt]
    if errors:
        is_to_go_on = holds_run(out) and not (out / "summary.json").exists()
        if is_to_go_on and not isinstance(errors[0], ConfigError):  # nothing was run then
            # What is the user's to mend would only come again.
            first = "once that is mended, " if isinstance(errors[0], UserError) else ""
            typer.echo(f"{first}go on with it: {resuming(out)}")
        raise errors[0]
