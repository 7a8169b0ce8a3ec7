"""The run's folder: that a new run overwrites no old one, and that an old one can go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedwan.errors import ConfigError

__all__ = ["choose_demo_folder", "holds_run", "is_named", "moved_folder", "require_fresh"]


def holds_run(out: Path) -> bool:
    """Whether there is something to go on with, or to lose: a checkpoint, or a summary.

    What a start that failed before its first checkpoint left behind is neither.
    """
    return (out / "summary.json").exists() or any((out / "checkpoint").glob("*.safetensors"))


def require_fresh(out: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        ConfigError: it does; the text says how to go on with it.
    """
    if holds_run(out):
        raise ConfigError(
            f"out = {str(out)!r} holds a run already; "
            f"go on with it: fedwan run {out / 'config.yaml'} --resume, or choose another out="
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out = {str(out)!r} is a file; choose another out=")


def is_named(key: str, words: Sequence[str]) -> bool:
    """Whether `key=value` words set a key."""
    return any(word.partition("=")[0] == key for word in words)


def choose_demo_folder(default: Path, *, resume: bool) -> Path:
    """The demo's folder where the user named none.

    Args:
        default: `runs/demo`; further runs get `runs/demo-2`, `runs/demo-3`, …
        resume: take the latest that holds a run, instead of the first that holds none.

    Raises:
        ConfigError: there is nothing to resume.
    """
    folder, number = default, 1
    latest: Path | None = None
    while folder.exists():
        if holds_run(folder):
            latest = folder
        elif not resume:
            break
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    if not resume:
        return folder
    if latest is None:
        raise ConfigError(f"{str(default)!r} holds no run to go on with; leave --resume out")
    return latest


def moved_folder(path: Path) -> Path | None:
    """The run's folder as it is now, if `path` is the `config.yaml` inside it."""
    return path.parent if path.name == "config.yaml" and holds_run(path.parent) else None
