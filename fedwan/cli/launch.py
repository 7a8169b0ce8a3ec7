"""Start a run, show it while it lasts, and end it in order: for `demo`, `run`, `coordinator`.

The services run in a thread, the live table in the main one, which is where signals arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from fedwan.cli.failures import crash_reports
from fedwan.cli.folders import holds_run, moved_folder, require_fresh
from fedwan.config import Config
from fedwan.errors import ConfigError, RunStopped
from fedwan.output.live import watch
from fedwan.output.records import read_records
from fedwan.output.summary import read_summary, render_summary

__all__ = ["RunServices", "launch", "load_config", "show_summary", "shown_path"]

RunServices = Callable[[Config, threading.Event], None]
"""Runs until the run is over or the event is set; raises a `FedwanError` if it did not end well."""


def shown_path(path: Path) -> Path:
    """A path as short as it can be written from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def load_config(path: Path | None, words: Sequence[str], *, resume: bool) -> Config:
    """The resolved configuration of a run that is about to start, its `out` absolute.

    Args:
        path: the YAML file, or None for defaults.
        words: `key=value` words.
        resume: whether the run in `out` goes on. Then `path` may be the `config.yaml` in a run's
            folder, wherever that has been moved to.

    Raises:
        ConfigError: a wrong setting, an `out` that holds a run already, or no checkpoint to resume.
    """
    # Recipes need torch, which takes seconds; the rest of the command line does without.
    from fedwan.app import load_run

    if resume and path is not None and (folder := moved_folder(path)) is not None:
        words = [f"out={folder}", *words]
    config = load_run(path, words)
    out = Path(config.out).absolute()
    config.out = str(out)
    if not resume:
        require_fresh(out)
    elif not holds_run(out):
        raise ConfigError(f"out = {config.out!r} holds no checkpoint yet; leave --resume out")
    return config


def launch(config: Config, services: RunServices, console: Console) -> None:
    """Run services to the end of a run, and show its summary.

    Args:
        config: resolved; `out` is absolute.
        services: what to run.
        console: where to show it.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once everything has been ended.
        ConfigError: `out` cannot be made.
        FedwanError: what the services raised.
    """
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out = {config.out!r} cannot be made ({error.strerror}); give a folder that can"
        ) from None
    with crash_reports(out):
        _run_and_watch(config, services, console)
    show_summary(out, console)


def show_summary(out: Path, console: Console) -> None:
    """Print a finished run's summary."""
    summary = read_summary(out / "summary.json")
    records = read_records(out / "metrics.jsonl")
    console.print(render_summary(summary, records, shown_path(out)))


def _run_and_watch(config: Config, services: RunServices, console: Console) -> None:
    # Heavy only in name: the Flower room imports neither torch nor flwr here.
    from fedwan.flower.logs import stop_on_sigterm

    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            services(config, stop)
        except BaseException as error:  # Handed to the main thread, which decides.
            errors.append(error)

    # Children end with the thread that started them, so it must live until it has ended them.
    thread = threading.Thread(target=work, name="services", daemon=True)
    with stop_on_sigterm(stop):
        try:
            thread.start()
            watch(Path(config.out), config, thread.is_alive, console)
            thread.join()
        except KeyboardInterrupt:
            console.print("Ctrl-C: ending the services …")
            stop.set()
            if thread.ident is not None:
                thread.join()
            _raise_unless_stopped(errors)
            raise
    if errors:
        raise errors[0]


def _raise_unless_stopped(errors: Sequence[BaseException]) -> None:
    """Raise what went wrong, other than that the run was stopped as it was told to."""
    for error in errors:
        if not isinstance(error, RunStopped):
            raise error
