"""The folder of a run: which one it is, and what may change when the run in it goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fedwan.cli.arguments import resuming
from fedwan.config import COMMAND, MASKED, Config, load_dumped, merge
from fedwan.config_tree import leaves_of, nested
from fedwan.errors import ConfigError
from fedwan.flower.processes import only_one
from fedwan.names import nearest
from fedwan.output.journal import JOURNAL, require_begun
from fedwan.output.records import RoundRecord, iter_records

FIXED = frozenset(
    {
        *("workload", "strategy", "seed", "h", "model", "network", "codec", "privacy"),
        *("data.name", "data.split", "data.batch", "data.size", "data.classes", "data.labels"),
        "stream.fragments",
    }
)
"""Settings and sections that checkpoints are of: a run that goes on keeps them."""
FIXED_MASKED = frozenset({"sites", "round.quorum"})
"""Under masks also these: secrets are shared out among as many sites, for so many to open."""


def holds_run(out: Path) -> bool:
    """Whether there is something to go on with, or to lose: a checkpoint, or a summary.

    What a start that failed before its first checkpoint left behind is neither.
    """
    return (out / "summary.json").exists() or any((out / "checkpoint").glob("*.safetensors"))


def _has_begun(out: Path) -> bool:
    """Whether a run has begun there, or a copy of it: its `out` is of where it was then."""
    return holds_run(out) or (out / JOURNAL).exists() or (out / "flower").exists()


def _is_taken(folder: Path) -> bool:
    """Whether a run is there, or has begun there just now."""
    try:
        with only_one(folder, "out"):
            return holds_run(folder)
    except ConfigError:
        return True


def choose_folder(default: Path, words: Sequence[str], *, resume: bool) -> Path:
    """The run's folder: what a word names, or else the default, or `default-2`, `default-3`, ….

    Resuming takes the latest that holds a run, instead of the first that holds none and is free.
    """
    if named := [word.removeprefix("out=") for word in words if word.startswith("out=")]:
        return Path(named[-1])
    folders = [default]
    while folders[-1].exists() and (resume or _is_taken(folders[-1])):
        folders.append(default.with_name(f"{default.name}-{len(folders) + 1}"))
    if not resume:
        return folders[-1]
    return next((folder for folder in reversed(folders) if holds_run(folder)), default)


def load_config(
    path: Path | None, words: Sequence[str], *, resume: bool, from_version: int | None = None
) -> Config:
    """The resolved configuration of a run that is about to start, its `out` absolute.

    When a run goes on, `path` may be the `config.yaml` in its folder, wherever that has moved to;
    without one it is that of the folder that a word names.
    """
    # Recipes need torch, which takes seconds; the rest of the command line does without.
    from fedwan.app import load_run

    if resume and path is None:
        own = choose_folder(Path(Config().out), words, resume=True) / "config.yaml"
        path = own if own.exists() else None
    if resume and path is not None and path.name == "config.yaml" and _has_begun(path.parent):
        load_dumped(path.parent)  # what was cut off would look like settings of another run
        words = [f"out={path.parent}", *words]
    given = [word for word in words if not word.startswith("out=")]
    config = load_run(path, words)
    out = Path(config.out).absolute()
    config.out = str(out)
    if out.is_dir() and not (out / "summary.json").exists():
        with only_one(out, "out"):  # one that is live is told before all else
            pass
    is_done = (out / "summary.json").exists()
    if from_version is not None:
        given.append(f"--from-version={from_version}")
    if resume and not out.exists():
        near = nearest(out.name, (each.name for each in out.parent.glob("*") if holds_run(each)))
        raise ConfigError(
            f"there is no run: out = {config.out!r} does not exist{near or '; leave --resume out'}"
        )
    if resume and not holds_run(out):
        raise ConfigError(f"out = {config.out!r} holds no checkpoint yet; leave --resume out")
    if resume and is_done and given:
        # As they stand in the file alone, which may need words where a run is new.
        if from_version is not None or config != load_run(path, [f"out={out}"]):
            raise ConfigError(
                f"the run in {str(out)!r} is complete, {' '.join(given)} would change nothing; "
                "train on in a new run with init.NETWORK=FILE, which `fedwan export` writes"
            )
    if resume and not is_done:
        require_begun(out / JOURNAL)  # what is damaged is told before anything starts
        config = _as_begun(config, out / "checkpoint")
    if not resume and from_version is not None:
        raise ConfigError(f"--from-version={from_version} is for a run that goes on; add --resume")
    if not resume and is_done:
        raise ConfigError(
            f"out = {config.out!r} holds a finished run; choose another out=, with "
            "init.NETWORK=FILE, which `fedwan export` writes, to train on from its weights"
        )
    if not resume and holds_run(out):
        raise ConfigError(
            f"out = {config.out!r} holds a run already; "
            f"go on with it: {resuming(out)}, or choose another out="
        )
    is_once = config.codec.up in MASKED or config.privacy.epsilon > 0
    if from_version is not None and is_once:
        raise ConfigError(
            f"--from-version={from_version}: no version is made twice under masks or under "
            "privacy; begin a new run with init.NETWORK=FILE, which `fedwan export` writes"
        )
    return config


def _as_begun(asked: Config, folder: Path) -> Config:
    """Refuse what a run cannot change on its way, whose checkpoints are in a folder.

    Of a script's run what is not given, but for its seed, would be open until its networks are
    known: it stays as the run has it.
    """
    from fedwan.coordinator.model import another_version, newest_meta

    meta = newest_meta(folder)  # all of it is read, and checked, by who goes on from it
    try:
        begun, taken = merge(Config(), meta["config"]), int(meta["step"])
    except KeyError as error:
        raise another_version(folder, error) from None
    rounds = (r for r in iter_records(Path(asked.out)) if isinstance(r, RoundRecord))
    taken = max([taken, *(round_.run_step for round_ in rounds)])
    before, is_script = dict(leaves_of(begun)), asked.workload == COMMAND
    fixed = FIXED | (FIXED_MASKED if begun.codec.up in MASKED else set())
    if is_script:
        now, usual = dict(leaves_of(asked)), dict(leaves_of(Config()))
        own = {key for key, value in now.items() if value and value != usual.get(key)}
        own |= {"seed", "strategy"}
        # What will be settled as it was stays open: sites have the ticket of these settings.
        from fedwan.app import complete

        networks: dict[str, Any] = dict.fromkeys(begun.inner, "regression")
        settled = dict(leaves_of(complete(asked, networks, begun.steps)))
        kept = {
            key: value
            for key, value in before.items()
            if key not in own and _is_in(key, fixed) and value != settled.get(key)
        }
        asked = merge(asked, *(nested(key.split("."), value) for key, value in kept.items()))
    fixed |= {"steps"} if asked.privacy.epsilon else set()  # noise is made for so many
    fixed |= {f"inner.{network}.state" for network in asked.inner}  # whether moments travel
    faults = [
        f"{key} = {value!r}, and the run in {asked.out!r} began with {before.get(key)!r}; leave it "
        "out, or begin a new run with init.NETWORK=FILE, which `fedwan export` writes"
        for key, value in leaves_of(asked)
        if value != before.get(key) and _is_in(key, fixed)
        if value or key == "seed" or not (value is None or is_script)
    ]
    if 0 < asked.steps < taken:
        faults.append(
            f"steps = {asked.steps}, and the run in {asked.out!r} has taken {taken}; leave it "
            "out, or give more"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return asked


def _is_in(key: str, keys: Collection[str]) -> bool:
    return key in keys or key.split(".")[0] in keys
