"""Start a run, show it while it lasts, and end it in order: for `demo`, `run`, `coordinator`.

The services run in a thread, the live table in the main one, which is where signals arrive.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from fedwan.cli.failures import crash_reports, make_folder
from fedwan.config import Config
from fedwan.errors import ConfigError, RunStopped
from fedwan.flower.processes import stop_on_sigterm
from fedwan.output.live import watch
from fedwan.output.records import read_records
from fedwan.output.summary import read_summary, render_summary

RunServices = Callable[[Config, threading.Event], None]
"""Runs until the run is over or the event is set; raises a `FedwanError` if it did not end well."""


def holds_run(out: Path) -> bool:
    """Whether there is something to go on with, or to lose: a checkpoint, or a summary.

    What a start that failed before its first checkpoint left behind is neither.
    """
    return (out / "summary.json").exists() or any((out / "checkpoint").glob("*.safetensors"))


def choose_folder(default: Path, words: Sequence[str], *, resume: bool) -> Path:
    """The run's folder: what a word names, or else the default, or `default-2`, `default-3`, ….

    Resuming takes the latest that holds a run, instead of the first that holds none.

    Raises:
        ConfigError: there is nothing to resume.
    """
    for word in reversed(words):
        if word.startswith("out="):
            return Path(word.removeprefix("out="))
    folder, number = default, 1
    latest: Path | None = None
    while folder.exists() and (resume or holds_run(folder)):
        latest = folder if holds_run(folder) else latest
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    if not resume:
        return folder
    if latest is None:
        raise ConfigError(f"{str(default)!r} holds no run to go on with; leave --resume out")
    return latest


def load_config(path: Path | None, words: Sequence[str], *, resume: bool) -> Config:
    """The resolved configuration of a run that is about to start, its `out` absolute.

    When a run goes on, `path` may be the `config.yaml` in its folder, wherever that has moved to.

    Raises:
        ConfigError: a wrong setting, an `out` that holds a run already, or no checkpoint to resume.
    """
    # Recipes need torch, which takes seconds; the rest of the command line does without.
    from fedwan.app import load_run

    if resume and path is not None and path.name == "config.yaml" and holds_run(path.parent):
        words = [f"out={path.parent}", *words]
    config = load_run(path, words)
    out = Path(config.out).absolute()
    config.out = str(out)
    if resume and not holds_run(out):
        raise ConfigError(f"out = {config.out!r} holds no checkpoint yet; leave --resume out")
    if not resume and holds_run(out):
        raise ConfigError(
            f"out = {config.out!r} holds a run already; "
            f"go on with it: fedwan run {out / 'config.yaml'} --resume, or choose another out="
        )
    return config


def run_here(
    path: Path | None, words: Sequence[str], command: Sequence[str] = (), *, resume: bool
) -> None:
    """Run a configuration on this machine, show it, and print its summary."""
    config = load_config(path, words, resume=resume)
    if not resume:
        from fedwan.flower.site_file import SiteFile, find_command
        from fedwan.preflight import preflight

        preflight(config)
        if command:
            find_command(config, SiteFile(command=shlex.join(command), folder=str(Path.cwd())))

    def services(config: Config, stop: threading.Event) -> None:
        from fedwan.flower.coordinator import run_local

        run_local(config, command=command, resume=resume, stop=stop)

    start(config, services)


def start(config: Config, services: RunServices) -> None:
    """Run services to the end of a run, and show its summary; of a run that is done, only that."""
    out, console = Path(config.out), Console()
    if not (out / "summary.json").exists():
        make_folder("out", out)
        with crash_reports(out):
            _run_and_watch(config, services, console)
    summary = read_summary(out / "summary.json")
    short = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    console.print(render_summary(summary, read_records(out / "metrics.jsonl"), short))


def _run_and_watch(config: Config, services: RunServices, console: Console) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            services(config, stop)
        except BaseException as error:  # handed to the main thread, which decides
            errors.append(error)

    # Children end with the thread that started them, so it must live until it has ended them.
    thread = threading.Thread(target=work, name="services", daemon=True)
    with stop_on_sigterm(stop):
        try:
            thread.start()
            # Once it is to end, what happens on the way tells nothing: the error's line does.
            watch(
                Path(config.out),
                config,
                lambda: thread.is_alive() and not stop.is_set(),
                console,
            )
            thread.join()
        except KeyboardInterrupt:
            console.print("Ctrl-C: ending the services …")
            stop.set()
            if thread.ident is not None:
                thread.join()
            if errors and not isinstance(errors[0], RunStopped):
                raise errors[0] from None
            raise
    if errors:
        raise errors[0]
