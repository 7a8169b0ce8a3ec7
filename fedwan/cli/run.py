"""The commands that train: `run`, `demo`, `launch`; `coordinator` and `site` of a deployment."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path
from typing import Annotated

import typer

from fedwan.cli.arguments import Words, argument, option
from fedwan.cli.failures import crash_reports
from fedwan.cli.start import choose_folder, load_config, run_here, start
from fedwan.config import Config
from fedwan.errors import ConfigError

KEYS = (
    "Keys that are always there: workload strategy sites steps h seed data.name data.split "
    "codec.up codec.down link.rate_mbit link.rtt_ms link.loss out. A wrong key is refused with "
    "the nearest valid one."
)
"""Below the help of every command that takes settings."""

Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in `out` from its last checkpoint.")
]


def run(
    config_path: Annotated[str | None, argument("[CONFIG.yaml]")] = None,
    words: Words = None,
    resume: Resume = False,
) -> None:
    """Train with a coordinator and all sites on this machine.

    KEY=VALUE words, such as h=50 outer.generator.lr=0.3, beat the file, which may be left out.

    A run that was stopped goes on with: fedwan run OUT/config.yaml --resume
    """
    run_here(*path_and_words(config_path, words), resume=resume)


def path_and_words(first: str | None, words: list[str] | None) -> tuple[Path | None, list[str]]:
    """A command's arguments: CONFIG.yaml, which may be left out, and `key=value` words.

    >>> path_and_words("h=50", ["steps=100"])
    (None, ['h=50', 'steps=100'])
    """
    given = list(words or [])
    if first is None or ("=" in first and not Path(first).is_file()):
        return None, ([] if first is None else [first]) + given
    return Path(first), given


def demo(words: Words = None, resume: Resume = False) -> None:
    """Train a GAN on handwritten digits: a coordinator and 4 sites on this machine.

    KEY=VALUE words change it: workload=flow sites=2 h=50 link.rtt_ms=100

    Results are in runs/demo; a second demo goes to runs/demo-2, and so on.
    """
    given, default = list(words or []), Path(Config().out)
    out = choose_folder(default, given, resume=resume)
    if out != default and not resume and f"out={out}" not in given:
        typer.echo(f"{default} holds a run; this one goes to {out}", err=True)
    path = out / "config.yaml"
    run_here(path if resume and path.exists() else None, [*given, f"out={out}"], resume=resume)


def launch(
    words: Annotated[
        list[str],
        argument(
            "[KEY=VALUE]... -- COMMAND...",
            "Settings, such as h=50 codec.up=int4, then the command that each site runs.",
        ),
    ],
    sites: Annotated[int, typer.Option("--sites", help="How many sites.")] = 2,
    resume: Resume = False,
) -> None:
    """Train your own script on several sites of this machine: a federation of processes.

    fedwan launch --sites 2 -- python train.py

    fedwan launch --sites 2 h=50 -- torchrun --nproc-per-node 2 train.py

    The script calls fedwan.join; docs/start.md shows how. Results are in runs/launch.
    """
    settings, command = split_words(words)
    out = choose_folder(Path("runs/launch"), settings, resume=resume)
    given = [f"sites={sites}", *settings, "workload=command", f"out={out}"]
    run_here(None, given, command, resume=resume)


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Settings, and the command that follows them.

    Raises:
        ConfigError: there is no command.

    >>> split_words(["h=50", "seed=1", "python", "train.py", "--lr=1"])
    (['h=50', 'seed=1'], ['python', 'train.py', '--lr=1'])
    """
    count = next((i for i, word in enumerate(words) if "=" not in word), len(words))
    if count == len(words):
        raise ConfigError(
            f"{shlex.join(words)!r} names no command; write it after --, as in "
            "fedwan launch --sites 2 -- python train.py"
        )
    return words[:count], words[count:]


def coordinator(
    config_path: Annotated[Path, argument("CONFIG.yaml", "Settings of the run.")],
    identity: Annotated[
        Path, option("--identity", "DIR", "The coordinator's folder, from `fedwan pki init`.")
    ],
    words: Words = None,
    resume: Resume = False,
) -> None:
    """Serve one run to sites elsewhere, until it is done.

    Set link.listen and link.door, and open both ports.

    docs/deploy.md shows a whole deployment.
    """
    # Before torch is loaded: a wrong folder should be told at once.
    from fedwan.link.tls import Identity

    Identity.load(identity, "coordinator")
    config = load_config(config_path, words or [], resume=resume)

    def services(config: Config, stop: threading.Event) -> None:
        from fedwan.flower.coordinator import serve_coordinator

        serve_coordinator(config, identity.absolute(), resume=resume, stop=stop)

    start(config, services)


def site(
    path: Annotated[Path, argument("SITE.yaml", "The site's file.")],
    words: Words = None,
) -> None:
    """Serve a site: take part in whatever the coordinator runs, until stopped.

    SITE.yaml has four keys: site (its name), identity (the folder that `fedwan pki issue` made),
    door (host:port of the coordinator's front door) and dir (for checkpoints and logs).

    It may have more: data.path, data.show_samples, command and recipes; see docs/deploy.md.
    """
    from fedwan.flower.site_file import load_site

    settings = load_site(path, words or [])
    # Imported late, so that a wrong file is told at once.
    from fedwan.flower.site import serve_site

    with crash_reports(Path(settings.dir)):
        serve_site(settings)
